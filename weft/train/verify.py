"""Proof that a layout computes what one device computes: by numbers, and by types without any device."""

import dataclasses
import linecache
import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch import nn

from weft.data.batch import Batch
from weft.errors import WeftError
from weft.layout import boundary
from weft.layout.boundary import BY_DATA, SAME, I, R, V, declare, gradient_types, parameter_types, state_types
from weft.layout.dims import Box, Logical
from weft.layout.groups import fake_rank
from weft.layout.layout import DATA_AXES, MODEL_AXES, Layout
from weft.layout.mesh import Mesh
from weft.models.transformer import Block, Transformer
from weft.parallel.build import check_fits, resident_state
from weft.parallel.context import context_attention
from weft.parallel.state import State
from weft.recipe import ModelShape, Optimizer, Recipe, Train
from weft.schedule.from_layout import routes
from weft.train.ranks import joined
from weft.train.setup import Job, assemble, device_type, prepare
from weft.train.step import StepResult, gradients
from weft.train.stepper import build_stepper

#: Largest relative difference that rounding explains. Linear attention over six layers loses two digits of float32.
TOLERANCE = {"float64": 1e-10, "float32": 5e-5}
#: Rounding of sums over a whole model, in units of the precision and of the global norm. Gradients that are zero in
#: exact arithmetic (of the keys' bias, of queries that see one key) are of this size, so that theirs is no measure.
NOISE = 64

Piece = tuple[str, Box, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest relative differences to one device: loss and norm per step; gradients, parameters and slots per tensor.

    Slots are what the optimizer keeps with each parameter.
    """

    ok: bool
    loss: float
    grad: float
    grad_norm: float
    param: float
    worst_grad: str = ""
    worst_param: str = ""
    slot: float = 0.0
    worst_slot: str = ""


@dataclass(frozen=True)
class Trace:
    """What a run of some steps produced on this rank."""

    losses: list[float]
    norms: list[float]
    grads: list[list[Piece]]  # per step, reduced and unclipped
    params: list[Piece]  # at the end
    slots: dict[str, list[Piece]]  # at the end, by slot


def run_layout(
    job: Job,
    mesh: Mesh,
    steps: int,
    watch: Callable[[Transformer, State], object] | None = None,
    follow: Sequence[dict[str, torch.Tensor]] = (),
) -> Trace:
    """Train ``steps`` steps from the seeded initial values and the first sample; keep what there is to compare.

    ``watch`` sees the model and its state before the first step; ``follow`` are the gradients to update with, by step,
    where these are not the run's own. On one device, the reference of a partial pipeline skips what that skips,
    microbatch by microbatch.
    """
    taken: list[tuple[int, ...]] = []
    if job.recipe.layout.skip and mesh.size("pp") == 1:
        rows, passes = job.recipe.rows_per_pass(job.recipe.layout)
        taken = routes(job.shape, job.recipe.layout, passes, job.recipe.data.seq_len)
        alike = job.recipe.train.model_copy(update={"micro_batch": rows})
        job = dataclasses.replace(job, recipe=job.recipe.model_copy(update={"train": alike}))
    model, state = assemble(job.shape, mesh, job.recipe)
    if watch is not None:
        watch(model, state)
    settings, loader = job.recipe.optimizer, job.loader(job.corpus.train, mesh)
    trace = Trace([], [], [], [], {})
    results: list[StepResult] = []

    def keep(grads: dict[str, torch.Tensor]) -> None:
        trace.grads.append([(p.name, p.box, grads[p.name].clone().cpu()) for p in state.learning])
        for name, grad in follow[len(trace.grads) - 1].items() if follow else ():
            grads[name].copy_(grad)

    stepper = build_stepper(model, state, mesh, settings, inspect=keep, routes=taken)
    for step in range(steps):
        batches = loader.step(step * job.recipe.train.batch)
        if batches is None:
            raise WeftError(f"the data ends after {step} steps; use fewer --steps or a smaller train.batch")
        results += stepper.step(batches, settings.lr)
    for result in results + stepper.finish():
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    for h in state.held:
        if h.local.is_floating_point():
            trace.params.append((h.name, h.box, h.local.clone().cpu()))
        for slot, part in h.slots.items():
            trace.slots.setdefault(slot, []).append((h.name, part.box, part.values.clone().cpu()))
    return trace


def prove(recipe: Recipe, steps: int) -> Difference | None:
    """As one of the ranks of ``recipe``, from its start to its end: how the layout differs from one device.

    On the first rank; None on the others.
    """
    device = device_type(recipe)
    with joined(device, recipe.train.timeout, recipe.train.threads):
        mesh, job = Mesh.create(recipe.layout, device), prepare(recipe)
        return compare(run_layout(job, mesh, steps), job, mesh)


def compare(mine: Trace, job: Job, mesh: Mesh) -> Difference | None:
    """Compare every rank's trace with a run on one device. Collective; the answer is on rank 0.

    One device computes its own gradients in every step, and then updates with the layout's: Adam would turn the
    rounding noise of gradients that are zero into steps of full size. So each step is compared from one and the same
    state, and the parameters at the end are what one device's optimizer makes of the same gradients.
    """
    traces = [mine] * mesh.layout.world
    if mesh.layout.world > 1:
        dist.gather_object(mine, traces if mesh.is_main else None, group=mesh.step_group)
    if not mesh.is_main:
        return None
    follow = [_assembled([t.grads[step] for t in traces]) for step in range(len(mine.grads))]
    reference = run_layout(job, Mesh.single(mesh.device), len(follow), follow=follow)
    return difference(traces, reference, job.recipe.train.dtype)


def difference(traces: Sequence[Trace], reference: Trace, dtype: str) -> Difference:
    """All ranks' traces beside one device's: per tensor, and on the scale of the whole model."""

    def relative(a: float, b: float) -> float:
        return abs(a - b) / max(abs(b), 1e-300) if a == a and b == b else float("inf")

    limit = TOLERANCE[dtype]
    noise = NOISE * torch.finfo(getattr(torch, dtype)).eps / limit
    loss = max(relative(a, b) for t in traces for a, b in zip(t.losses, reference.losses, strict=True))
    norm = max(relative(a, b) for t in traces for a, b in zip(t.norms, reference.norms, strict=True))
    grad = max(_worst([t.grads[i] for t in traces], whole, noise) for i, whole in enumerate(reference.grads))
    param = _worst([t.params for t in traces], reference.params, noise)
    slot = (0.0, "")
    for kind, whole in reference.slots.items():
        value, name = _worst([t.slots.get(kind, []) for t in traces], whole, noise)
        slot = max(slot, (value, f"{kind} of {name}"))
    ok = max(loss, norm, grad[0], param[0], slot[0]) <= limit
    return Difference(ok, loss, grad[0], norm, param[0], grad[1], param[1], *slot)


def _worst(ranks: Sequence[Sequence[Piece]], reference: Sequence[Piece], noise: float) -> tuple[float, str]:
    """Largest relative difference (2-norm) of any copy of any tensor, and its name; inf if a part is missing.

    A tensor whose norm is below ``noise`` of the norm of all is measured against that.
    """
    norms = {name: whole.double().norm().item() for name, _, whole in reference}
    least = max(noise * math.hypot(*norms.values()), 1e-300)
    worst = (0.0, "")
    for name, _, whole in reference:
        covered: dict[Box, int] = {}
        square: dict[Box, float] = {}
        for pieces in ranks:
            for other, box, values in pieces:
                if other == name:
                    diff = (values.double() - whole[_slices(box)].double()).square().sum().item()
                    square[box] = max(square.get(box, 0.0), diff) if diff == diff else float("inf")
                    covered[box] = values.numel()
        value = sum(square.values()) ** 0.5 / max(norms[name], least)
        if sum(covered.values()) != whole.numel() or value != value:
            value = float("inf")
        worst = max(worst, (value, name))
    return worst


def _assembled(ranks: Sequence[Sequence[Piece]]) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' parts of them; what no rank has is zero."""
    pieces = [piece for rank in ranks for piece in rank]
    ends: dict[str, list[int]] = {}
    for name, box, _ in pieces:
        here = [hi for _, hi in box]
        ends[name] = [max(pair) for pair in zip(ends.get(name, here), here, strict=True)]
    whole = {name: torch.zeros(shape, dtype=pieces[0][2].dtype) for name, shape in ends.items()}
    for name, box, values in pieces:
        whole[name][_slices(box)] = values
    return whole


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in box)


@dataclass(frozen=True)
class TypeFault:
    """Where the types do not fit: the innermost line outside the type checker, and why."""

    file: str
    line: int
    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}\n    {self.message}"


def check_types(
    shape: ModelShape, layout: Layout, train: Train, optimizer: Optimizer | None = None
) -> TypeFault | None:
    """Type-check one whole training step of ``layout`` on this process alone, whatever its world size.

    Tensors live on the meta device and collectives in a fake process group, so neither memory nor ranks are needed.
    What shards the state stands for its contract: gradients are partial sums over the data axes before, and rows of the
    sum after.
    Pipeline stages hand each other tensors of one and the same type, so one place along ``pp`` stands for all.
    """
    check_fits(shape, layout, train, optimizer)
    kinds = [shape.mixer_of(i) for i in range(shape.layers)]
    # Layers of a kind are alike: as many as have each kind, and two, stand for all.
    few = max(min(2, len(kinds)), 1 + max(kinds.index(kind) for kind in kinds))
    shape = shape.model_copy(update={"layers": few})
    layout = layout.model_copy(update={"pp": 1})
    with fake_rank(0, layout.world) if layout.world > 1 else nullcontext():
        mesh = dataclasses.replace(Mesh.create(layout, "cpu"), device=torch.device("meta"))
        model = Transformer(shape, mesh, train.loss_chunk)
        model.freq = model.freq.to("meta")
        for block in model.blocks.values():
            assert isinstance(block, Block)
            if block.attention.mixer == "softmax":
                block.attention.attend = context_attention(mesh, shape)
            block.recompute = train.recompute
        try:
            state, batch = resident_state(model, mesh), _meta_batch(mesh)
            if mesh.device_mesh is None:
                gradients(model, state, [batch], mesh)
                return None
            with spmd.set_current_mesh(mesh.device_mesh), typecheck():
                for ids in (batch.tokens, batch.labels, batch.positions):
                    declare(ids, mesh, **BY_DATA)
                declare(model.freq, mesh, **SAME)
                declare(batch.cu_seqlens, mesh, **BY_DATA | {"cp": R})
                gradients(model, _typed(state, mesh), [batch], mesh)
        except spmd.SpmdTypeError as error:
            return _locate(error)
    return None


def _typed(state: State, mesh: Mesh) -> State:
    """``state`` with typed parameters, whose gradients have been through the contract of the units that share state."""

    def reduced_gradient(logical: Logical) -> Callable[[nn.Parameter], torch.Tensor | None]:
        def gradient(parameter: nn.Parameter) -> torch.Tensor | None:
            grad = parameter.grad
            assert grad is not None
            declare(grad, mesh, **gradient_types(logical))
            for axis in DATA_AXES:
                if mesh.size(axis) > 1:
                    grad = spmd.all_reduce(grad, mesh.group(axis), dst=I)
                    if state_types(logical)[axis] is V:  # each rank keeps its rows of the sum
                        grad = spmd.mutate_type(grad, mesh.group(axis), src=I, dst=V)
            return grad

        return gradient

    for h in state.held:
        declare(h.parameter, mesh, **parameter_types(h.logical))
        h.gradient = reduced_gradient(h.logical)
    return state


def _meta_batch(mesh: Mesh) -> Batch:
    """A batch of the right shapes: two rows, of which each rank holds its share of the tokens."""
    local = 2 * mesh.size(*MODEL_AXES) * (2 if mesh.size("cp") > 1 else 1)
    length = local * mesh.size("cp")
    tokens, labels, positions = torch.empty(3, 2, local, dtype=torch.long, device="meta").unbind()
    return _MetaBatch(tokens, labels, positions, torch.tensor([0, length, 2 * length], dtype=torch.int32))


class _MetaBatch(Batch):
    @property
    def real_tokens(self) -> int:
        return self.labels.numel()


def _locate(error: BaseException) -> TypeFault:
    """The innermost frame that is neither the type checker's, PyTorch's nor a boundary's (whose caller is meant)."""
    libraries = (str(Path(spmd.__file__).parent), str(Path(torch.__file__).parent), boundary.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]
    file, line = frames[-1].filename, frames[-1].lineno or 0
    return TypeFault(file, line, linecache.getline(file, line).strip(), str(error).strip().splitlines()[0])
