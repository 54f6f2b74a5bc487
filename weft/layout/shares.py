"""Uneven cuts: how many heads, columns and vocabulary entries each rank of ``tp`` gets by its share.

Ranks of unequal devices finish together if each has work in proportion to its speed, as far as its memory allows
(TPI-LLM, Li et al. 2024, 2410.00531). Parameters stay logical, so that a checkpoint of any cut loads under any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.errors import UsageError

#: Elements of a block, and the fewest blocks for each part that are kept whole.
BLOCK, LEAST_BLOCKS = 64, 4


def read_shares(value: object) -> object:
    """Return the value of the setting ``layout.tp_shares``, with a text such as ``"2:1:1"`` parsed to integers."""
    if isinstance(value, str) and value != "auto":
        return tuple(map(str.strip, value.split(":"))) if value else ()
    return value


def uneven_part(count: int, shares: Sequence[int] | str, index: int) -> tuple[int, int]:
    """Return the range ``(start, stop)`` of part ``index`` if ``count`` elements are cut in proportion to ``shares``.

    Parts are contiguous, with the sizes of :func:`uneven_sizes`.
    """
    sizes = uneven_sizes(count, shares)
    start = sum(sizes[:index])
    return start, start + sizes[index]


def uneven_sizes(count: int, shares: Sequence[int] | str) -> list[int]:
    """Return the number of elements of each part if ``count`` elements are cut in proportion to ``shares``.

    Sizes are whole numbers by the method of the largest remainder, and at least 1 if there are enough elements. If
    there are many elements, sizes are multiples of :data:`BLOCK`, as matrix products of other widths are slower.
    With equal shares the parts are those of :func:`weft.layout.dims.part`. Raises :class:`UsageError` for shares
    that are still to be measured (``"auto"``).
    """
    if isinstance(shares, str):
        raise UsageError(
            'layout.tp_shares = "auto" is measured by the ranks of weft train, generate and serve when they start; '
            "give the shares as numbers here"
        )
    blocks, rest = divmod(count, BLOCK)
    if not rest and blocks >= LEAST_BLOCKS * len(shares) and len(set(shares)) > 1:
        return [BLOCK * size for size in uneven_sizes(blocks, shares)]
    total, least = sum(shares), int(count >= len(shares))
    sizes = [max(least, count * share // total) for share in shares]

    def lack(i: int) -> int:
        """How far part ``i`` is below its exact size, in units of ``1 / total``."""
        return count * shares[i] - sizes[i] * total

    while sum(sizes) != count:
        step = 1 if sum(sizes) < count else -1
        # those that have more than the least may give; of equal ones the first gets, and the last gives
        able = [i for i in range(len(sizes)) if step > 0 or sizes[i] > least]
        index = max(able, key=lambda i: (step * lack(i), -step * i))
        sizes[index] += step
    return sizes


def cuts_groups(heads: int, kv_heads: int, shares: Sequence[int] | str) -> bool:
    """Return whether a division of attention heads by ``shares`` never divides the query heads of one key/value
    head.

    Each rank then holds exactly the key/value heads that its query heads read. ``heads``, ``kv_heads``: numbers of
    query and of key/value heads.
    """
    group = heads // kv_heads
    own = uneven_sizes(heads, shares)
    return own == [group * size for size in uneven_sizes(kv_heads, shares)]
