"""How a sequence is cut over ``cp``: the loader slices by this rule and attention reads it back."""

from weft.layout.layout import Layout


def chunk_owners(layout: Layout) -> list[tuple[int, ...]]:
    """Chunks of the sequence that each ``cp`` rank owns, in the order in which the rank holds them.

    Ring attention pairs an early chunk with a late one (zigzag), so that causal work is even; Ulysses keeps one
    contiguous chunk per rank, since its all-to-all restores the sequence in rank order.
    """
    cp = layout.cp
    if cp > 1 and layout.context == "ring":
        return [(r, 2 * cp - 1 - r) for r in range(cp)]
    return [(r,) for r in range(cp)]


def padded_length(seq_len: int, layout: Layout) -> int:
    """``seq_len`` rounded up until every rank owns equally many tokens in every region."""
    chunks = sum(len(owned) for owned in chunk_owners(layout))
    multiple = chunks * layout.tp
    return -(-seq_len // multiple) * multiple


def owned_ranges(length: int, layout: Layout, rank: int) -> list[tuple[int, int]]:
    """Half-open token ranges of a row of ``length`` (padded) tokens that ``cp`` rank ``rank`` holds, in order."""
    owners = chunk_owners(layout)
    size = length // sum(len(owned) for owned in owners)
    return [(c * size, (c + 1) * size) for c in owners[rank]]
