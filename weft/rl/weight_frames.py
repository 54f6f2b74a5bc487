"""Frames that carry weights from a rank that trains to a rank that generates elsewhere: all of them, or their changes.

How they are used. A rank that generates builds a model (:func:`weft.rl.generation_model.model_to_fill`) and says what
the model needs (:func:`said_needs`). Each rank that trains says which boxes its state holds. From both,
:func:`moves_to_others` computes what every pair of ranks exchanges. At each new version, a rank that trains copies what
it sends (:func:`copied_sources`), so that training can go on, and writes frames for each rank that needs them
(:func:`weight_frames`) to the channel of that pair. The other end passes every frame to its :class:`WeightIntake`,
between two steps of its engine. When the intake has all frames of a version, ``weights_changed`` of the engine is
called. If the copy of the version before is kept, frames can hold the changed elements alone, compared as bytes, so
that the result is exact. A frame has a JSON head and a raw payload; nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from weft.checkpoint.boxes import checksum, intersection, volume
from weft.checkpoint.pack import index_within
from weft.checkpoint.reshard import ElementMove
from weft.errors import WeftError
from weft.layout.dims import Box, Tensor
from weft.layout.parts import NAMES, TORCH_DTYPES
from weft.net.wire import Frame
from weft.parallel.state import Held
from weft.rl.weight_plan import Boxes, buckets, weight_plan

T = torch.Tensor

#: Most bytes of weights in a frame.
FRAME = 16 << 20
#: Types that view elements as opaque numbers, by their size in bytes.
OPAQUE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Bytes of the place of a changed element.
PLACE = 4

#: Tensors that a rank holds, by name and box.
Sources = Mapping[str, Mapping[Box, T]]


def said_needs(held: Sequence[Held]) -> dict[str, Any]:
    """Describe the parameters ``held`` that a generating model needs, as JSON values by name: shape, type and box of
    each.

    A training rank reads this by :func:`read_needs`.
    """
    return {
        h.name: [list(h.logical.shape), NAMES[h.parameter.dtype], [list(e) for e in h.box]]
        for h in held
    }  # fmt: skip


def read_needs(
    said: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, list[Box]]]:
    """Return the tensors and the boxes, by name, from the values that :func:`said_needs` returned on another rank."""
    tensors = {
        name: Tensor(tuple(shape), dtype) for name, (shape, dtype, _) in said.items()
    }
    return tensors, {name: [_box(edges)] for name, (_, _, edges) in said.items()}


def moves_to_others(
    tensors: Mapping[str, Tensor], held: Sequence[Boxes], needed: Sequence[Boxes]
) -> dict[tuple[int, int], list[ElementMove]]:
    """Return the plan which elements each training rank sends to each rank that generates in another process.

    The result has the moves for each pair ``(training rank, generating rank)``. An element comes to a generating rank
    once; if several training ranks hold it, they take turns.

    Arguments:
        ``tensors``: shapes of the tensors and the types in which they generate, by name.
        ``held``: for each training rank, numbered from 0, the boxes that it has, by name.
        ``needed``: for each generating rank, numbered from 0 as well, the boxes that it needs.

    Raises :class:`WeftError` if no training rank has an element.
    """
    ranks = len(held)
    nothing: Boxes = {}
    plan = weight_plan(
        tensors, [*held, *[nothing] * len(needed)], [*[nothing] * ranks, *needed]
    )
    pairs: dict[tuple[int, int], list[ElementMove]] = {}
    for move in plan:
        target = move.target - ranks
        pairs.setdefault((move.source, target), []).append(replace(move, target=target))
    return pairs


@torch.no_grad()
def copied_sources(
    moves: Sequence[ElementMove], tensors: Mapping[str, Tensor], sources: Sources
) -> Sources:
    """Copy the boxes of ``sources`` that ``moves`` read to host memory, in the types of ``tensors``.

    Frames are written from the copy while training changes the weights. A copy of the version before shows which
    elements have changed.
    """
    copies: dict[str, dict[Box, T]] = {}
    for move in moves:
        of_tensor = copies.setdefault(move.name, {})
        if move.held not in of_tensor:
            values = sources[move.name][move.held]
            kind = TORCH_DTYPES[tensors[move.name].dtype]
            of_tensor[move.held] = values.to("cpu", kind, copy=True).contiguous()
    return copies


def weight_frames(
    moves: Sequence[ElementMove],
    tensors: Mapping[str, Tensor],
    sources: Sources,
    version: int,
    before: Sources | None = None,
    base: int = -1,
    most: int = FRAME,
) -> Iterator[Frame]:
    """Yield the frames that bring the weights of ``version`` to one rank that generates.

    There is at least one frame, so that the receiver knows when it has all. With an adapter, later versions need only
    moves of parameters that learn.

    Arguments:
        ``moves``: the elements that this rank sends to the other, from :func:`moves_to_others`.
        ``tensors``: shapes and types, by name.
        ``sources``: the weights, from :func:`copied_sources`.
        ``before``: a copy of the weights of version ``base``, which the receiver has; None: all elements are sent.
            Otherwise each piece is sent in the shortest of three forms: all elements; a bit mask and the changed
            elements; or indices and values of the changed elements.
        ``most``: largest number of bytes of weights in a frame.
    """
    frames = buckets(moves, tensors, most) or [[]]
    for number, pieces in enumerate(frames):
        listed, payload = [], bytearray()
        for piece in pieces:
            now = _opaque(sources, piece)
            earlier = None if before is None else _opaque(before, piece)
            form, data = _encoded(now, earlier)
            if data or form == "all":
                listed.append(
                    [piece.name, [list(e) for e in piece.box], form, len(data)]
                )
                payload += data
        head = {
            "weights": version,
            "base": -1 if before is None else base,
            "frame": number,
            "frames": len(frames),
            "pieces": listed,
            "xxh3": checksum(memoryview(payload)),
        }
        yield Frame(head, memoryview(payload))


def move_bytes(moves: Sequence[ElementMove], tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes all elements of ``moves`` have together. ``tensors``: shapes and types, by name."""
    return sum(volume(move.box) * tensors[move.name].itemsize for move in moves)


class WeightIntake:
    """Reads frames from training ranks, and writes the weights in them into a model that generates, in place.

    While frames of a version are missing, the weights are a mixture of two versions, and the model must not generate.
    ``targets``: the tensors of the model, by name and box. ``sources``: numbers of the ranks that send to this one.

    Attributes:
        ``version``: version of the weights if they are complete; -1 if none has come yet or frames are missing.
        ``received``: bytes of all payloads so far.
    """

    def __init__(self, targets: Sources, sources: Collection[int]) -> None:
        self.targets, self.sources = targets, frozenset(sources)
        self.version, self.received = -1, 0
        self._coming = -1
        # the version of each source's part that is complete here, and the one before, whose changes may be coming
        self._parts, self._bases = dict[int, int](), dict[int, int]()
        # for each source the frames that are missing; None: it has sent nothing yet
        self._missing: dict[int, set[int] | None] = {}

    def restart(self) -> None:
        """Forget which frames have come. The next version must then be sent with all elements."""
        self.version = self._coming = -1
        self._parts, self._bases = {}, {}

    @torch.no_grad()
    def take(self, source: int, frame: Frame) -> bool:
        """Write the weights of ``frame``, sent by rank ``source``, in place; return whether its version is complete
        now.

        A frame of a later version ends a version that is incomplete, and frames of an earlier version are ignored. A
        frame with changes must build on the last version that was complete from the same ``source``. Raises
        :class:`WeftError` for a frame that is damaged, does not fit this rank, or changes weights that are not here.
        The weights are incomplete then, and a version must come with all elements.
        """
        version, number = frame.head["weights"], frame.head["frame"]
        if version < self._coming:
            return False
        if version > self._coming:
            self._coming, self.version = version, -1
            self._missing = dict.fromkeys(self.sources)
        if self._missing.get(source) is None:  # its first frame
            self._bases[source] = self._parts.pop(source, -1)
        try:
            self._check(source, frame)
            at = 0
            for name, edges, form, size in frame.head["pieces"]:
                self._write(name, _box(edges), form, frame.payload[at : at + size])
                at += size
        except WeftError:
            self.restart()
            raise
        self.received += len(frame.payload)
        missing = self._missing[source]
        if missing is None:
            missing = self._missing[source] = set(range(frame.head["frames"]))
        missing.discard(number)
        if not missing:
            self._parts[source] = version
        if any(left is None or left for left in self._missing.values()):
            return False
        self._coming, self.version = -1, version
        return True

    def _check(self, source: int, frame: Frame) -> None:
        """Raise :class:`WeftError` unless ``frame`` is whole and can come now from the rank ``source``."""
        head = frame.head
        if source not in self.sources:
            raise WeftError(
                f"weights came from rank {source}, which has none of this rank's"
            )
        if checksum(frame.payload) != head["xxh3"]:
            raise WeftError(
                f"frame {head['frame']} of weights {head['weights']} from rank {source} is damaged; send all again"
            )
        base = self._bases.get(source, -1)
        if head["base"] >= 0 and head["base"] != base:
            raise WeftError(
                f"changes of weights {head['base']} came, and weights {base} are here; send all of them"
            )

    def _write(self, name: str, box: Box, form: str, data: memoryview) -> None:
        for own, values in self.targets.get(name, {}).items():
            if len(own) == len(box) and (intersection(own, box) == box or not box):
                place = values[index_within(box, own)]
                place.copy_(_decoded(place, form, data, f"{name} {list(box)}"))
                return
        raise WeftError(
            f"weights of {name} {list(box)} came, which this rank does not have; its layout is another one"
        )


def _box(edges: Sequence[Sequence[int]]) -> Box:
    return tuple((int(lo), int(hi)) for lo, hi in edges)


def _opaque(sources: Sources, piece: ElementMove) -> np.ndarray:
    """The elements of ``piece``, flat and as opaque numbers."""
    values = sources[piece.name][piece.held][index_within(piece.box, piece.held)]
    flat = values.contiguous().flatten()
    return flat.view(OPAQUE[flat.element_size()]).numpy()


def _encoded(now: np.ndarray, before: np.ndarray | None) -> tuple[str, bytes]:
    """The form and the bytes in which ``now`` is sent to who has ``before``."""
    if before is None:
        return "all", now.tobytes()
    changed = now != before
    count = int(changed.sum())
    if not count:
        return "places", b""
    values = count * now.itemsize
    sizes = {
        "places": count * PLACE + values,
        "mask": math.ceil(now.size / 8) + values,
        "all": now.nbytes,
    }
    form = min(sizes, key=sizes.__getitem__)
    if form == "all":
        return form, now.tobytes()
    where = (
        np.flatnonzero(changed).astype("<u4")
        if form == "places"
        else np.packbits(changed)
    )
    return form, where.tobytes() + now[changed].tobytes()


def _decoded(place: T, form: str, data: memoryview, what: str) -> T:
    """The values of ``place`` after what :func:`_encoded` has written to ``data``."""
    size, kind = place.element_size(), place.dtype
    count = place.numel()
    if form == "all":
        flat = np.frombuffer(data, np.uint8).copy()
        if flat.size != count * size:
            raise WeftError(
                f"{flat.size} bytes came for {what}, which has {count * size}"
            )
        return torch.from_numpy(flat).view(kind).view(place.shape)
    flat = place.cpu().contiguous().flatten().view(OPAQUE[size]).numpy().copy()
    if form == "mask":
        bits = np.frombuffer(data[: math.ceil(count / 8)], np.uint8)
        changed: np.ndarray = np.flatnonzero(np.unpackbits(bits, count=count))
        values = data[math.ceil(count / 8) :]
    else:
        number = len(data) // (PLACE + size)
        changed = np.frombuffer(data[: number * PLACE], "<u4")
        values = data[number * PLACE :]
    if len(values) != len(changed) * size or (
        len(changed) and int(changed.max()) >= count
    ):
        raise WeftError(f"the changes of {what} do not fit; its layout is another one")
    flat[changed] = np.frombuffer(values, flat.dtype)
    return torch.from_numpy(flat).view(kind).view(place.shape)
