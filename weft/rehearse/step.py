"""One rank's training step alone, in a process group that moves nothing: what it runs, sends and keeps.

The planner's view of a layout on a machine at hand: our own modules, with every operator, collective and message in
the order in which this rank issues them, so that counts and shapes cannot drift from the code. Values are worthless.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.errors import WeftError
from weft.layout.groups import fake_rank
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.sequence import padded_length
from weft.recipe import Data, ModelShape, Recipe, Train
from weft.rehearse.ledger import Ledger
from weft.rehearse.tensors import tensors_in
from weft.train.setup import assemble, model_shape, prepare
from weft.train.step import clear_gradients, clipped, gradients, update


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Event:
    """``kind``: ``op``, ``collective`` (``later``: one that is not waited for here), ``send``, ``recv`` or ``wait``.

    ``bytes``: of an operator read and written; of a collective, its whole tensor; ``ranks``: who takes part (global),
    of a message the peer and the tag. ``shapes``: of an operator's first tensors, the last of which may be a
    ``turned`` (transposed) view. ``number``: of a message.
    """

    kind: str
    name: str = ""
    bytes: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] = ()
    number: int = 0
    turned: bool = False


@dataclass
class Rehearsal:
    """What one rank does in one step; ``peak``: bytes of tensors alive at most, ``state``: before the step.

    ``cpu``, ``wall``: seconds of the step without the recording; of a tiny model, those of the framework.
    """

    events: list[Event] = field(default_factory=list)
    state: int = 0
    peak: int = 0
    cpu: float = 0.0
    wall: float = 0.0


#: Operators that neither compute nor move anything, beside views of what is there.
_FREE = {
    "_record_function_enter_new", "_record_function_exit", "empty", "empty_like", "new_empty", "empty_strided",
    "new_empty_strided", "set_", "resize_", "detach", "_local_scalar_dense", "is_same_size", "lift_fresh", "alias",
}  # fmt: skip


class _Recorder(TorchDispatchMode):
    """Writes down operators and keeps account of the storages that are alive."""

    def __init__(self, found: Rehearsal) -> None:
        super().__init__()
        self.found = found
        self.ledger = Ledger()
        self.later = False  # the collective under way is waited for at some other time

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.namespace, func.overloadpacket.__name__
        if space == "weft":  # look inside: its kernels and messages count
            with self:
                result = OPDEFS[f"weft::{name}"]._init_fn(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        if "c10d" in space:
            self._collective(name, args)
        elif space != "weft" and name not in _FREE:
            tensors = tensors_in(args)
            made = tensors_in((result,))
            if (
                not name.endswith("_")
                and made
                and {t.untyped_storage()._cdata for t in made} <= {t.untyped_storage()._cdata for t in tensors}
            ):
                return result
            shapes = tuple(tuple(t.shape) for t in tensors[:3])
            moved = sum(t.nbytes for t in (*tensors, *made))
            turned = bool(tensors) and not tensors[: len(shapes)][-1].is_contiguous()
            self.found.events.append(Event("op", name, moved, shapes, turned=turned))
        self.ledger.hold((result,))
        return result

    def _collective(self, name: str, args: Any) -> None:
        if name in ("wait_tensor", "_wrap_tensor_autograd", "send", "recv_", "barrier", "monitored_barrier_"):
            return
        group = next((g for a in args if (g := group_in(a)) is not None), None)
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
        sizes = [t.nbytes for t in tensors_in(args)]
        whole = max(sizes, default=0)
        if name == "all_gather_into_tensor":
            whole *= len(ranks)
        elif name == "allgather_":
            whole = sizes[-1] * len(ranks)
        self.found.events.append(Event("collective" if not self.later else "later", name, whole, ranks=ranks))


def group_in(value: Any) -> dist.ProcessGroup | None:
    """The process group that this argument of a collective names, if it names one."""
    if isinstance(value, str) and value not in ("sum", "avg", "max", "min"):
        return dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return None


class _Sent:
    """What a send or receive returns: waiting for it is noted."""

    def __init__(self, events: list[Event], kind: str, number: int) -> None:
        self.events, self.kind, self.number = events, kind, number

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        self.events.append(Event("wait", self.kind, number=self.number))
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def _messages(found: Rehearsal) -> Iterator[None]:
    """Note what is sent to whom, asked of whom, and when the rank waits for it."""
    count = iter(range(1 << 60))

    def noted(kind: str) -> Callable[..., Any]:
        def call(
            tensor: torch.Tensor, peer: int | None = None, group: dist.ProcessGroup | None = None, tag: int = 0,
            group_src: int | None = None, group_dst: int | None = None, **kwargs: Any,
        ) -> _Sent:  # fmt: skip
            if peer is None:
                inner = group_dst or 0 if group_src is None else group_src
                peer = dist.get_process_group_ranks(group)[inner] if group is not None else inner
            number = next(count)
            found.events.append(Event(kind, bytes=tensor.nbytes, ranks=(int(peer or 0), tag), number=number))
            return _Sent(found.events, kind, number)

        return call

    send, recv = noted("send"), noted("recv")
    with ExitStack() as stack:
        for module in (dist, dist.distributed_c10d):
            stack.enter_context(mock.patch.object(module, "isend", send))
            stack.enter_context(mock.patch.object(module, "irecv", recv))
        yield


@contextmanager
def _pending(recorder: _Recorder) -> Iterator[None]:
    """Mark all-reduces that the step does not wait for at once."""
    real = dist.all_reduce

    def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        recorder.later = async_op
        try:
            return real(*args, **kwargs, async_op=async_op)  # type: ignore[misc]
        finally:
            recorder.later = False

    with mock.patch.object(dist, "all_reduce", call):
        yield


def rehearse(
    recipe: Recipe, shape: ModelShape, batches: Callable[[Mesh], Sequence[Batch]], rank: int, times: int = 1
) -> Rehearsal:
    """One step of ``rank`` under the recipe's layout, after a few that make what lasts. On the CPU, alone."""
    with fake_rank(rank, recipe.layout.world):
        return watch(recipe, shape, batches, times)


def every_rank(
    recipe: Recipe,
    shape: ModelShape,
    batches: Callable[[Mesh], Sequence[Batch]],
    watched: Callable[[], None] = _nothing,
) -> list[Rehearsal]:
    """The rehearsed step of all ranks. ``watched`` is called after every one that was really rehearsed.

    Ranks along ``dp``, ``shard`` and ``tp`` do the same on parts of one size (to a row), so that one of them stands for
    all: the others' groups and peers are its own, moved along these axes.
    """
    layout = recipe.layout
    found: dict[tuple[int, ...], Rehearsal] = {}
    sizes = [layout.size(axis) for axis in layout.axis_order]
    alike = [axis in ("dp", "shard", "tp") for axis in layout.axis_order]
    ranks = []
    for rank in range(layout.world):
        place = np.array(np.unravel_index(rank, sizes))
        model = np.where(alike, 0, place)
        key = tuple(model.tolist())
        if key not in found:
            source = int(np.ravel_multi_index(key, sizes))
            found[key] = rehearse(recipe, shape, batches, source, times=0)
            watched()
        ranks.append(_moved(found[key], place - model, sizes))
    return ranks


def _moved(seen: Rehearsal, by: np.ndarray, sizes: Sequence[int]) -> Rehearsal:
    """The rehearsal of the rank whose coordinates are ``by`` further along every axis."""
    if not by.any():
        return seen
    wide = np.array(sizes)
    at = np.array(np.unravel_index(np.arange(wide.prod()), sizes)).T  # [rank, axis]
    to = np.ravel_multi_index(tuple(((at + by) % wide).T), sizes).tolist()

    def move(e: Event) -> Event:
        if e.kind in ("send", "recv"):
            return replace(e, ranks=(to[e.ranks[0]], e.ranks[1]))
        return replace(e, ranks=tuple(sorted(to[r] for r in e.ranks))) if e.ranks else e

    return replace(seen, events=[move(e) for e in seen.events])


def watch(recipe: Recipe, shape: ModelShape, batches: Callable[[Mesh], Sequence[Batch]], times: int = 1) -> Rehearsal:
    """As :func:`rehearse`, in the process group that there is. ``times``: steps to take the time of."""
    found = Rehearsal()
    mesh = Mesh.create(recipe.layout, "cpu")
    recorder = _Recorder(found)
    model, state = assemble(shape, mesh, recipe, lambda *_: torch.zeros(()))
    ledger = recorder.ledger
    ledger.hold((*model.parameters(), *(part.values for part in state.tensors().values())))
    given = batches(mesh)

    def step() -> None:
        grads, _ = gradients(model, state, given, mesh)
        clipped(grads, 2.0, 1.0)
        update(state, grads, 1e-3)
        clear_gradients(model, state)

    step()
    cpu, wall = [], []
    for _ in range(times):
        begun = time.process_time(), time.perf_counter()
        step()
        cpu.append(time.process_time() - begun[0])
        wall.append(time.perf_counter() - begun[1])
    if times:
        found.cpu, found.wall = statistics.median(cpu), statistics.median(wall)
    found.state = ledger.peak = ledger.level
    with recorder, _messages(found), _pending(recorder):
        step()
    found.peak = ledger.peak
    return found


def plain_batches(recipe: Recipe, shape: ModelShape, most: int = sys.maxsize) -> Callable[[Mesh], list[Batch]]:
    """Batches of the recipe's sizes with one document per row, at ``most`` so many."""

    def make(mesh: Mesh) -> list[Batch]:
        rows, passes = recipe.rows_per_pass(recipe.layout)
        length = padded_length(recipe.data.seq_len, recipe.layout)
        ids = torch.arange(rows * length // mesh.size("cp")).view(rows, -1)
        edges = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        return [Batch(ids % shape.vocab, ids % shape.vocab, ids % length, edges) for _ in range(min(passes, most))]

    return make


def batches_of(recipe: Recipe) -> tuple[ModelShape, Callable[[Mesh, int], Sequence[Batch]]]:
    """The model's shape, and what makes the batches of a step: the recipe's data, plain rows where it has none."""
    shape = model_shape(recipe)
    if recipe.data.sources:
        try:
            job = prepare(recipe)
        except WeftError:
            pass  # whether the data is there is not what is asked
        else:
            loaders: list[Loader] = []  # made once the mesh is there

            def real(mesh: Mesh, step: int) -> Sequence[Batch]:
                loaders[:] = loaders or [job.loader(job.corpus.train, mesh)]
                return loaders[0].step(step * recipe.train.batch) or []

            return job.shape, real
    plain = plain_batches(recipe, shape)
    return shape, lambda mesh, step: plain(mesh)


def reference(layout: str, size: str, alone: bool = True) -> Rehearsal:
    """Rank 0's step of a small model for the probe: ``tiny`` is all framework, ``small`` has work to do.

    ``alone``: in a process group that moves nothing, else with the ranks that there are.
    """
    sizes = {"tiny": (4, 16, 8, 64), "small": (2, 256, 256, 2048), "large": (4, 256, 512, 2048)}
    layers, embed, seq, vocab = sizes[size]
    model = ModelShape(
        layers=layers, embed=embed, heads=4, kv_heads=2, ffn=2 * embed, vocab=vocab, qk_norm=True, tied=True
    )
    recipe = Recipe(model=model, layout=Layout.parse(layout), data=Data(seq_len=seq), train=Train(batch=4))
    batches = plain_batches(recipe, model)
    times = {"tiny": 9, "small": 5, "large": 4}[size]
    return rehearse(recipe, model, batches, 0, times) if alone else watch(recipe, model, batches)
