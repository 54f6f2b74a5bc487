"""Plans which elements of weights go from which rank to which, and their division into messages.

Boxes (regions of elements) that ranks hold are intersected with boxes that ranks need, so that a rank sends only what
another rank lacks (HybridFlow, Sheng et al. 2024, 2409.19256). A pair of ranks cuts its bytes into buckets in the same
way on both sides, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from weft.checkpoint.boxes import volume
from weft.checkpoint.pack import group_by_bytes
from weft.checkpoint.reshard import ALIGN, ElementMove, plan_moves
from weft.layout.dims import Box, Tensor

#: Pieces of so many bytes are sent alone.
ALONE = 1 << 18
#: Boxes of tensors that one rank holds or needs, by the name of the tensor.
Boxes = Mapping[str, Sequence[Box]]


def weight_plan(
    tensors: Mapping[str, Tensor],
    held: Sequence[Boxes],
    needed: Sequence[Boxes],
    rank: int | None = None,
) -> list[ElementMove]:
    """Return the plan which elements of tensors go from which rank to which, so that every rank gets the elements that
    it needs.

    ``tensors``: shapes of the tensors and the types in which they are needed, by name. ``held``: for each rank the
    boxes that it has. ``needed``: for each rank the boxes that it needs. An element that a rank has itself comes from
    that rank. ``rank``: only moves in which this rank sends or receives are returned; None: all moves. Raises
    :class:`WeftError` if no rank has an element.
    """
    wanted = sorted({name for of_rank in needed for name in of_rank})
    return [
        move
        for name in wanted
        for move in plan_moves(
            name,
            tensors[name],
            [of_rank.get(name, ()) for of_rank in held],
            [of_rank.get(name, ()) for of_rank in needed],
            rank,
        )
    ]


def cut_box(box: Box, most: int) -> Iterator[Box]:
    """Cut ``box`` into boxes of at most ``most`` elements, and yield them in the order of their elements in memory."""
    if volume(box) <= most:
        yield box
        return
    (lo, hi), *rest = box
    row = volume(tuple(rest))
    if row > most:
        for index in range(lo, hi):
            for inner in cut_box(tuple(rest), most):
                yield ((index, index + 1), *inner)
        return
    rows = max(1, most // row)
    for first in range(lo, hi, rows):
        yield ((first, min(hi, first + rows)), *rest)


def padded_bytes(move: ElementMove, tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes the elements of ``move`` take in a message: a multiple of :data:`ALIGN`. ``tensors``:
    shapes and types, by name.
    """
    size = volume(move.box) * tensors[move.name].itemsize
    return size + -size % ALIGN


def buckets(
    moves: Sequence[ElementMove],
    tensors: Mapping[str, Tensor],
    most: int,
    alone: int = ALONE,
) -> list[list[ElementMove]]:
    """Return the moves of one pair of ranks, divided into messages of at most ``most`` bytes; larger moves are cut.

    ``tensors``: shapes and types of the tensors, by name. Both ranks of the pair compute the same messages. A piece of
    ``alone`` bytes or more is a message by itself, so that it is sent without being copied.
    """
    pieces = [
        replace(move, box=box)
        for move in moves
        for box in cut_box(
            move.box, max(1, (most - ALIGN) // tensors[move.name].itemsize)
        )
    ]

    def size(move: ElementMove) -> int:
        return padded_bytes(move, tensors)

    small, large = (
        [piece for piece in pieces if (size(piece) >= alone) is apart]
        for apart in (False, True)
    )
    return [*([piece] for piece in large), *group_by_bytes(small, most, size)]
