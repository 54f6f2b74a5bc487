"""The cut of a sequence over ``cp``: the loader slices by this rule and attention reads it back."""

from weft.layout.layout import Layout
from weft.registry import find


def chunk_owners(layout: Layout) -> list[tuple[int, ...]]:
    """Return, for each rank of ``cp``, the indices of the chunks of a sequence that the rank owns, in the order it
    holds them.

    A sequence is cut into equal chunks. With most attention schemes a rank owns an early and a late chunk (zigzag):
    later tokens see more keys, so that this gives all ranks equal work. With the other schemes a rank owns one
    chunk. Ranks that exchange heads with each other, ``layout.ulysses`` of them, own consecutive chunks.
    """
    inner = layout.head_ranks
    tables = layout.cp // inner
    pairs = tables > 1 and find("context", layout.context).implementation.paired
    blocks = [(r, 2 * tables - 1 - r) if pairs else (r,) for r in range(tables)]
    owners: list[tuple[int, ...]] = []
    for owned in blocks:
        chunks = [block * inner + i for block in owned for i in range(inner)]
        owners += [
            tuple(chunks[i * len(owned) : (i + 1) * len(owned)]) for i in range(inner)
        ]
    return owners


def padded_length(seq_len: int, layout: Layout) -> int:
    """Round ``seq_len`` up, so that every rank of ``cp`` and ``tp`` owns equally many tokens of a sequence."""
    chunks = sum(len(owned) for owned in chunk_owners(layout))
    multiple = chunks * layout.tp
    return -(-seq_len // multiple) * multiple


def owned_ranges(length: int, layout: Layout, rank: int) -> list[tuple[int, int]]:
    """Return the half-open token ranges that rank ``rank`` of ``cp`` holds of a row with ``length`` tokens.

    ``length``: tokens with padding, as :func:`padded_length` returns.
    """
    owners = chunk_owners(layout)
    size = length // sum(len(owned) for owned in owners)
    return [(c * size, (c + 1) * size) for c in owners[rank]]
