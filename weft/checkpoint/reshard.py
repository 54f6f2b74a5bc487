"""Reshard: move a state from one layout to another between running ranks, without storage.

The ranks tell each other which boxes they have and which they need. From that every rank computes the same list of
moves: each needed element comes from the rank itself if it has it, else from one of the ranks that have it, chosen in
turn. The bytes go in a few all-to-all exchanges of bounded size. Loading with shared reads works in the same way: each
replica reads a different part of what all of them need from storage, and gets the rest from the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from weft.checkpoint.boxes import intersection, replica_share, volume
from weft.checkpoint.pack import group_by_bytes, index_within
from weft.checkpoint.storage import LocalStorage
from weft.errors import WeftError
from weft.layout.dims import Box, Tensor, extents
from weft.layout.mesh import from_all
from weft.layout.parts import TORCH_DTYPES, Part

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint

#: Bytes of the logical tensors that are exchanged at a time; a tensor is never cut for this.
ROUND = 256 << 20
#: Pieces begin at a multiple of this in a message, so that they can be read as numbers.
ALIGN = 8


@dataclass(frozen=True)
class ElementMove:
    """Transfer of some elements of one tensor from one rank to another, or within one rank.

    Attributes:
        ``name``: name of the tensor.
        ``box``: elements to transfer.
        ``held``: box of the part on the source rank that has these elements.
        ``needed``: box of the part on the target rank that needs them.
        ``source``: rank that sends.
        ``target``: rank that receives.
    """

    name: str
    box: Box
    held: Box
    needed: Box
    source: int
    target: int


def plan_moves(
    name: str,
    tensor: Tensor,
    held: Sequence[Iterable[Box]],
    needed: Sequence[Iterable[Box]],
    rank: int | None,
) -> Iterator[ElementMove]:
    """Yield the transfers of the tensor ``name`` in which this rank sends or receives.

    ``tensor``: description of the tensor; ``held``: for each rank the boxes of the tensor that it has; ``needed``: for
    each rank the boxes that it needs; ``rank``: number of this rank, or None for the transfers of all ranks. Raises
    :class:`WeftError` if the ranks together lack an element, or hold unequal boxes that overlap.
    """
    holders: dict[Box, list[int]] = {}
    for r, boxes in enumerate(held):
        for box in boxes:
            if volume(box):
                holders.setdefault(box, []).append(r)
    if sum(map(volume, holders)) != tensor.numel:
        raise WeftError(
            f"the running ranks do not hold {name} {list(tensor.shape)} once: {sorted(holders)}"
        )
    turn = zlib.crc32(name.encode())
    for target, boxes in enumerate(needed):
        for box in boxes:
            for have, ranks in holders.items():
                source = (
                    target if target in ranks else ranks[(turn + target) % len(ranks)]
                )
                if (
                    rank in (None, source, target)
                    and (common := intersection(have, box)) is not None
                ):
                    yield ElementMove(name, common, have, box, source, target)


#: A rank's parts of logical tensors, by the name of the tensor and the box.
_Parts = dict[str, dict[Box, Part]]


def _by_box(parts: Iterable[tuple[str, Part]]) -> _Parts:
    boxes: _Parts = {}
    for name, part in parts:
        boxes.setdefault(name, {})[part.box] = part
    return boxes


def redistribute(
    sources: Iterable[tuple[str, Part]],
    targets: Mapping[str, Part],
    group: dist.ProcessGroup | None = None,
) -> int:
    """Fill this rank's parts ``targets`` in place with elements that the ranks hold in ``sources``. Collective.

    ``sources``: this rank's parts of tensors under the old layout, each as a pair of the tensor's name and the part. A
    tensor may occur several times. ``targets``: this rank's parts under the new layout, by the tensor's name. A rank
    that is not in the old layout passes no sources, and one that is not in the new layout passes no targets. ``group``:
    the ranks that take part (default: all). Returns the number of bytes that this rank sent. Raises :class:`WeftError`
    on all ranks if shapes or types differ or an element is missing.
    """
    rank, world = (
        (dist.get_rank(group), dist.get_world_size(group))
        if dist.is_initialized()
        else (0, 1)
    )
    sides = _by_box(sources), _by_box(targets.items())
    about = tuple(
        {
            name: (next(iter(parts.values())).tensor, list(parts))
            for name, parts in side.items()
        }
        for side in sides
    )
    everyones = from_all(about, group)
    tensors: dict[str, Tensor] = {}
    for side in (side for sides in everyones for side in sides):
        for name, (tensor, _) in side.items():
            known = tensors.setdefault(name, tensor)
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise WeftError(
                    f"{name} is {known.dtype} {list(known.shape)} and {tensor.dtype} {list(tensor.shape)}"
                )
    held, needed = zip(*everyones, strict=True)

    def boxes(
        side: Sequence[Mapping[str, tuple[Tensor, list[Box]]]], name: str
    ) -> list[list[Box]]:
        return [of_rank[name][1] if name in of_rank else [] for of_rank in side]

    wanted = sorted({name for side in needed for name in side})
    plan = {
        name: list(
            plan_moves(
                name, tensors[name], boxes(held, name), boxes(needed, name), rank
            )
        )
        for name in wanted
    }
    sent = 0
    for names in group_by_bytes(
        wanted, ROUND, lambda name: tensors[name].numel * tensors[name].itemsize
    ):
        chosen = [move for name in names for move in plan[name]]
        sent += _exchange(chosen, *sides, tensors, rank, world, group)
    return sent


def _exchange(
    plan: Sequence[ElementMove],
    sources: _Parts,
    targets: _Parts,
    tensors: Mapping[str, Tensor],
    rank: int,
    world: int,
    group: dist.ProcessGroup | None,
) -> int:
    """One round: pack, exchange, unpack. The messages of two ranks hold their moves in the order of ``plan``."""
    parts = (
        part
        for side in (targets, sources)
        for boxes in side.values()
        for part in boxes.values()
    )
    device = next((part.values.device for part in parts), torch.device("cpu"))

    def source(move: ElementMove) -> torch.Tensor:
        return _part(sources[move.name][move.held], move.box)

    def target(move: ElementMove) -> torch.Tensor:
        return _part(targets[move.name][move.needed], move.box)

    outgoing = [(m.target, m) for m in plan if m.source == rank != m.target]
    incoming = [(m.source, m) for m in plan if m.target == rank != m.source]
    send, sent, places = _message(outgoing, tensors, world, device)
    for move, place in places:
        place.copy_(source(move))
    receive, received, places = _message(incoming, tensors, world, device)
    if world > 1:
        dist.all_to_all_single(receive, send, received, sent, group=group)
    for move in plan:
        # Equal addresses: it is where it belongs already.
        if (
            move.source == move.target == rank
            and source(move).data_ptr() != target(move).data_ptr()
        ):
            target(move).copy_(source(move))
    for move, place in places:
        target(move).copy_(place)
    return sum(sent)


class _Message(NamedTuple):
    """Message to (or from) all ranks: its memory, its bytes by rank, and the elements of each move."""

    memory: torch.Tensor
    sizes: list[int]
    places: list[tuple[ElementMove, torch.Tensor]]


def _message(
    plan: Sequence[tuple[int, ElementMove]],
    tensors: Mapping[str, Tensor],
    world: int,
    device: torch.device,
) -> _Message:
    """Memory for what moves to (or from) every other rank, one rank after the other.

    ``plan``: the other rank, and the move.
    """
    sizes, begins = [0] * world, [0]
    plan = sorted(plan, key=lambda pair: pair[0])
    for peer, move in plan:
        size = volume(move.box) * tensors[move.name].itemsize
        sizes[peer] += size + -size % ALIGN
        begins.append(begins[-1] + size + -size % ALIGN)
    memory = torch.zeros(begins[-1], dtype=torch.uint8, device=device)
    places = []
    for at, (_, move) in zip(begins, plan, strict=False):
        tensor, shape = tensors[move.name], extents(move.box)
        elements = (
            memory[at : at + volume(move.box) * tensor.itemsize]
            .view(TORCH_DTYPES[tensor.dtype])
            .view(shape)
        )
        places.append((move, elements))
    return _Message(memory, sizes, places)


def _part(local: Part, box: Box) -> torch.Tensor:
    return local.values[index_within(box, local.box)]


def load_parts(
    checkpoint: StoredCheckpoint,
    locals_: Mapping[str, Part],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill this rank's parts of tensors from ``checkpoint``. Collective over ``group`` (default: all ranks).

    ``locals_``: the parts, by the tensor's name in the checkpoint. From remote storage each replica reads a different
    share of a part and passes it on to the other replicas. An error of any rank is raised on all ranks.
    """
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    shared = world > 1 and not isinstance(checkpoint.storage, LocalStorage)
    parts = (
        {
            name: part
            for name, v in locals_.items()
            if (part := _share(name, v)) is not None
        }
        if shared
        else locals_
    )
    problem: WeftError | None = None
    try:
        checkpoint.check_fits(locals_)
        checkpoint.load(parts)
    except WeftError as error:
        problem = error
    for failure in from_all(problem, group):
        if failure is not None:
            raise failure
    if shared:
        redistribute(parts.items(), locals_, group)


def _share(name: str, local: Part) -> Part | None:
    """Return the share of ``local`` that this rank reads from storage while its replicas read the rest, or None."""
    if local.replicas == 1:
        return local
    box = replica_share(
        local.box,
        local.tensor.itemsize,
        local.replica,
        local.replicas,
        zlib.crc32(name.encode()),
    )
    return (
        None
        if box is None
        else replace(local, values=_part(local, box), box=box, replica=0, replicas=1)
    )
