"""Proof by numbers that a layout computes what one device computes. :mod:`weft.prove.types` proves it by types."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from weft.data.loader import shares_of
from weft.errors import UsageError, WeftError
from weft.layout.axes import BATCH_AXES
from weft.layout.mesh import Mesh
from weft.layout.parts import Part
from weft.models.transformer import Transformer
from weft.models.values import seeded_values, with_adapter
from weft.parallel.state import State
from weft.prove.simulated import agree
from weft.recipe import Memory, Recipe
from weft.registry import find
from weft.run.rank_processes import rank_process
from weft.schedule.stages import routes
from weft.sync.compress import build_compressor
from weft.sync.presence import Presence
from weft.sync.streams import open_streams
from weft.train.build_step import build_step
from weft.train.reference import with_computed_reference
from weft.train.reference_layout import reference_beside
from weft.train.setup import Job, build_for_training, device_type, prepare
from weft.train.step import StepContext
from weft.train.step_values import StepResult

#: Largest relative difference that rounding explains. Linear attention over six layers loses two digits of float32.
TOLERANCE = {"float64": 1e-10, "float32": 5e-5}
#: Rounding of sums over a whole model, in units of the precision and of the global norm. Gradients that are zero in
#: exact arithmetic (of the keys' bias, of queries that see one key) are of this size, so that theirs is no measure.
NOISE = 64
#: Slots that hold earlier parameters or differences of parameters. Errors of the size that parameters may have show in
#: them, however small their own values are.
OF_PARAMETERS = ("anchor", "outer", "own", "answer", "up", "down")
#: Slots that hold differences between islands of another slot, which may cancel out, and that slot (DADAO).
OF_SLOTS = {"pull": "dual", "pull_ahead": "dual"}

#: The parts of tensors that a rank holds, by the tensors' names.
Parts = dict[str, Part]
#: Whole gradients by step, and there by the tensors' names.
Gradients = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of a layout's results from those of one device.

    Attributes:
        ``ok``: whether rounding explains all differences.
        ``loss``: largest difference of a loss, over all steps.
        ``grad_norm``: largest difference of the gradients' global norm, over all steps.
        ``grad``: largest difference of a gradient, over all tensors and steps.
        ``param``: largest difference of a parameter after the last step, over all tensors.
        ``slot``: largest difference, after the last step, of a tensor that the optimizer keeps with a parameter.
        ``worst_grad``: name of the tensor with the difference ``grad``.
        ``worst_param``: name of the tensor with the difference ``param``.
        ``worst_slot``: name of the tensor with the difference ``slot``.
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
class StepTrace:
    """The results of some training steps on this rank, for comparison with those of another layout.

    Attributes:
        ``losses``: loss of each step.
        ``norms``: global norm of the gradients in each step.
        ``grads``: for each step, this rank's parts of the gradients, reduced and unclipped, by parameter name.
        ``params``: this rank's parts of the parameters after the last step, by name.
        ``slots``: this rank's parts of what the optimizer keeps after the last step, by slot name and parameter name.
    """

    losses: list[float]
    norms: list[float]
    grads: list[Parts]  # per step, reduced and unclipped
    params: Parts  # at the end
    slots: dict[str, Parts]  # at the end, by slot


def run_layout(
    job: Job,
    mesh: Mesh,
    steps: int,
    watch: Callable[[Transformer, State], object] | None = None,
    follow: Sequence[dict[str, torch.Tensor]] = (),
) -> StepTrace:
    """Train the first ``steps`` steps of a run from seeded initial values, and return their results on this rank.

    ``job``: the prepared recipe. ``mesh``: the layout over ranks. ``watch``: a function that is called with the model
    and its state before the first step. ``follow``: for each step, whole gradients by name, with which parameters are
    updated in place of the run's own gradients.
    """
    *_, (_, trace) = walk(job, mesh, steps, watch, follow)
    return trace


def walk(
    job: Job,
    mesh: Mesh,
    steps: int,
    watch: Callable[[Transformer, State], object] | None = None,
    follow: Sequence[dict[str, torch.Tensor]] = (),
    begun: int = 0,
    join: Callable[[StepContext], Any] | None = None,
) -> Iterator[tuple[State, StepTrace]]:
    """Train from step ``begun`` up to ``steps``, and yield ``(state, trace)`` after each step.

    ``state`` has the parameters. ``trace`` has the results of all steps so far. It is the same object each time, and is
    complete only when the iterator has ended.

    ``job``: the prepared recipe. ``mesh``: the layout over ranks. ``watch``: a function that is called with the model
    and its state before the first step. ``follow``: for each step, whole gradients by name, with which parameters are
    updated in place of the run's own gradients. ``join``: function that returns what fills the gradient phase of an
    island in a simulation; the iterator then yields once more, before the first step, so that all islands are built.

    If ``layout.skip`` is set, a run on one device skips the same blocks in each microbatch as the pipeline. Raises
    :class:`WeftError` if the data ends before the last step.
    """
    taken: list[tuple[int, ...]] = []
    if job.recipe.layout.skip and mesh.size("pp") == 1:
        rows, passes = job.recipe.rows_per_pass(job.recipe.layout)
        taken = routes(job.shape, job.recipe.layout, passes, job.recipe.data.seq_len)
        places = job.recipe.batch_layout(job.recipe.layout).size(*BATCH_AXES)
        batch = job.recipe.train.batch
        # Microbatches of several replicas that are not all full are no passes of one device, which takes row by row.
        if places > 1 and batch % (places * rows):
            shares = shares_of(batch, [1] * places)
            taken = [taken[i // rows] for share in shares for i in range(share)]
            rows = 1
        alike = job.recipe.train.model_copy(update={"micro_batch": rows})
        recipe = job.recipe.model_copy(update={"train": alike})
        job = dataclasses.replace(job, recipe=recipe)
    seed = job.recipe.train.seed
    job = with_computed_reference(
        job, mesh, with_adapter(seeded_values(seed + 1), job.shape, seed), steps
    )
    model, state = build_for_training(job.shape, mesh, job.recipe)
    if watch is not None:
        watch(model, state)
    loader = job.loader(job.corpus.train, mesh)
    trace = StepTrace([], [], [], {}, {})
    results: list[StepResult] = []

    held = {h.name: h for h in state.learning}
    for beside, other in state.beside.items():
        held |= {f"{beside}.{h.name}": h for h in other.state.learning}

    # of the whole model, or a unit's at a time
    def keep(grads: dict[str, torch.Tensor]) -> None:
        for name, grad in grads.items():
            grad = grad.to_dense() if grad.is_sparse else grad.clone()
            trace.grads[-1][name] = held[name].part(grad.cpu())
        for name, grad in follow[len(trace.grads) - 1].items() if follow else ():
            if name in grads:
                grads[name].copy_(grad)

    # none for islands that are simulated
    with open_streams(mesh, job.recipe.train.timeout) as streams:
        context = StepContext(
            model,
            state,
            mesh,
            inspect=keep,
            routes=taken,
            presence=Presence(streams) if streams else None,
        )
        training_step = build_step(context, job.recipe)
        if join is not None:
            training_step.gradients = join(context)
            yield state, trace
        for step in range(begun, steps):
            batches = loader.step(step * job.recipe.train.batch)
            if batches is None:
                raise WeftError(
                    f"the data ends after {step} steps; use fewer --steps or a smaller train.batch"
                )
            trace.grads.append({})
            results += training_step.take(batches, job.recipe.optimizer.lr)
            yield state, trace
        results += training_step.finish()
    for result in results:
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    for name, h in (held | {h.name: h for h in state.held}).items():
        if h.local.is_floating_point():
            trace.params[name] = h.part(h.local.clone().cpu())
        for slot, part in h.slots.items():
            kept = dataclasses.replace(part, values=part.values.clone().cpu())
            trace.slots.setdefault(slot, {})[name] = kept
    if (reference := reference_beside(state)) is not None:
        for name, part in reference.state.parts().items():
            slot, _, parameter = name.partition(".")
            kept = dataclasses.replace(part, values=part.values.clone().cpu())
            trace.slots.setdefault(slot, {})[parameter] = kept


def prove(recipe: Recipe, steps: int) -> Difference | None:
    """Join the ranks that train ``recipe``, and compare its layout with one device over ``steps`` training steps.

    Returns the differences on the first rank, and None on all others.
    """
    device = device_type(recipe)
    with rank_process(device, recipe.train.timeout, recipe.train.threads):
        mesh, job = Mesh.create(recipe.layout, device), prepare(recipe)
        return compare_with_one_device(run_layout(job, mesh, steps), job, mesh)


def compare_with_one_device(
    trace: StepTrace, job: Job, mesh: Mesh
) -> Difference | None:
    """Train the same steps on one device, and compare every rank's trace with the results. All ranks must call it.

    Returns the differences on the first rank, and None on all others. ``trace``: the results of this rank. ``job``: the
    prepared recipe.

    In every step the device computes gradients of its own, which are compared with the layout's. Then it updates its
    parameters with the layout's gradients. The final parameters thus differ only if the optimizers differ. With its own
    gradients, the parameters of device and layout would drift apart: where a gradient should be zero, Adam turns its
    rounding noise into an update of full size.
    """
    traces = [trace] * mesh.layout.world
    if mesh.layout.world > 1:
        dist.gather_object(
            trace, traces if mesh.is_main else None, group=mesh.step_group
        )
    if not mesh.is_main:
        return None
    simulates = mesh.islands > 1 and not job.recipe.sync.of_gradients
    against = _against_simulated if simulates else _against_one_device
    return worst_island(against(traces, job, mesh), mesh)


def worst_island(difference_here: Difference, mesh: Mesh) -> Difference | None:
    """Return the differences of the island whose results are farthest from those of one device.

    ``difference_here``: the differences of this island; ``mesh``: its ranks. Returns None on all islands but the first.
    """
    if mesh.island_store is None:
        return difference_here
    mesh.island_store.set(
        f"weft/difference/{mesh.island}",
        json.dumps(dataclasses.asdict(difference_here)),
    )
    if mesh.island:
        return None
    reported = (
        json.loads(mesh.island_store.get(f"weft/difference/{island}"))
        for island in range(mesh.islands)
    )
    differences = [Difference(**difference) for difference in reported]
    return max(differences, key=lambda d: (not d.ok, d.grad, d.param))


def _against_simulated(traces: Sequence[StepTrace], job: Job, mesh: Mesh) -> Difference:
    """Compare this island with its simulation: one process that runs all islands, each on one device."""
    if not build_compressor(job.recipe.sync.compress).exact:
        raise UsageError(
            f"sync.compress = {job.recipe.sync.compress!r} loses a part of what is sent, so that no two layouts are "
            "equal; verify with --set sync.compress=none"
        )
    alone = dataclasses.replace(Mesh.single(mesh.device), islands=mesh.islands)
    limit = job.recipe.train.timeout
    follow = _of_all_islands(_whole_gradients(traces), mesh, limit)
    job = _on_the_device(job)
    meshes = [dataclasses.replace(alone, island=i) for i in range(mesh.islands)]
    join = None
    if job.recipe.sync.routes == "random":
        technique = find("phases", "routed-stages").implementation()
        simulated = technique.simulated(job, meshes)
        job, join = simulated.job, simulated.join
    walks = [
        walk(job, here, len(own), follow=own, join=join)
        for here, own in zip(meshes, follow, strict=True)
    ]
    if join is not None:
        for begun in walks:
            next(begun)
    past: dict[str, Any] = {}
    for step, now in enumerate(zip(*walks, strict=True), 1):
        agree(dict(enumerate(state for state, _ in now)), step, job.recipe.sync, past)
        trace = now[mesh.island][1]
    trace.slots.pop("answer", None)  # a simulation need not wait for answers
    return difference(traces, trace, job.recipe.train.dtype, _apart(job))


def _of_all_islands(
    gradients_here: Gradients, mesh: Mesh, limit: float
) -> list[Gradients]:
    """Return the gradients of every island, by its number. Collective over islands' first ranks.

    They travel by streams of their own, as the store still has the addresses of the streams of the steps.
    """
    if mesh.island_store is None:
        raise ValueError("this mesh has no store that islands share")
    apart = dataclasses.replace(
        mesh, island_store=dist.PrefixStore("weft/proof", mesh.island_store)
    )
    sent = [
        (f"{step}/{name}", grad)
        for step, grads in enumerate(gradients_here)
        for name, grad in grads.items()
    ]
    gradients = [gradients_here] * mesh.islands
    with open_streams(apart, limit) as streams:
        assert streams is not None
        others = [island for island in range(mesh.islands) if island != mesh.island]
        for island in others:
            for tag, grad in sent:
                streams.send(island, tag, grad.flatten(), control=True)
        for island in others:
            receive = partial(streams.receive, island)
            gradients[island] = [
                {
                    name: receive(f"{step}/{name}", own.dtype).view(own.shape)
                    for name, own in grads.items()
                }
                for step, grads in enumerate(gradients_here)
            ]
    return gradients


def _against_one_device(
    traces: Sequence[StepTrace], job: Job, mesh: Mesh
) -> Difference:
    follow = _whole_gradients(traces)
    alone = Mesh.single(mesh.device)
    reference = run_layout(_on_the_device(job), alone, len(follow), follow=follow)
    return difference(traces, reference, job.recipe.train.dtype, _apart(job))


def _on_the_device(job: Job) -> Job:
    """Return the job as one device computes it."""
    return dataclasses.replace(job, recipe=on_one_device(job.recipe))


def on_one_device(recipe: Recipe) -> Recipe:
    """Return ``recipe`` as one device computes it: with its whole state there, and no stages that update early."""
    optimizer = recipe.optimizer.model_copy(update={"post_validation": False})
    return recipe.model_copy(update={"memory": Memory(), "optimizer": optimizer})


def _apart(job: Job) -> float | None:
    """Return the distance of the points whose losses estimate gradients; None if backward computes gradients."""
    optimizer = job.recipe.optimizer
    return 2 * optimizer.epsilon if optimizer.estimate == "zeroth-order" else None


def difference(
    traces: Sequence[StepTrace],
    reference: StepTrace,
    dtype: str,
    apart: float | None = None,
) -> Difference:
    """Compare all ranks' traces with ``reference``, the trace of one device.

    ``dtype``: type of the computation, on which the tolerance depends. ``apart``: distance of the two points, if
    gradients are estimated from losses at two points; else None.

    Differences are relative to the norm of each tensor. For a gradient whose norm is below a least slope, they are
    relative to the least slope instead, because such a gradient may be rounding noise. At the least slope, the loss
    changes by its own rounding over a certain distance. This distance is ``apart`` or, if that is None, the norm of the
    trained parameters.
    """

    def relative(a: float, b: float) -> float:
        return abs(a - b) / max(abs(b), 1e-300) if a == a and b == b else float("inf")

    limit = TOLERANCE[dtype]
    noise = NOISE * torch.finfo(getattr(torch, dtype)).eps / limit
    own = {name: _norm(part) for name, part in reference.params.items()}
    learns = [own[name] for name in reference.grads[0] if name in own]
    least = [
        noise * abs(loss) / (apart or math.hypot(*learns) or 1.0)
        for loss in reference.losses
    ]
    share = [
        1 / max(1.0, low / max(norm, 1e-300))
        for low, norm in zip(least, reference.norms, strict=True)
    ]
    loss = max(
        relative(a, b)
        for t in traces
        for a, b in zip(t.losses, reference.losses, strict=True)
    )
    norm = max(
        weight * relative(a, b)
        for t in traces
        for weight, a, b in zip(share, t.norms, reference.norms, strict=True)
    )
    grads = [
        _worst([t.grads[i] for t in traces], whole, noise)
        for i, whole in enumerate(reference.grads)
    ]
    grad = max((s * value, name) for s, (value, name) in zip(share, grads, strict=True))
    param = _worst([t.params for t in traces], reference.params, noise)
    slot = (0.0, "")
    for kind, whole in reference.slots.items():
        scale = own if kind in OF_PARAMETERS else {}
        if kind in OF_SLOTS:
            parts = reference.slots[OF_SLOTS[kind]]
            scale = {name: _norm(part) for name, part in parts.items()}
        value, name = _worst(
            [t.slots.get(kind, {}) for t in traces], whole, noise, scale
        )
        slot = max(slot, (value, f"{kind} of {name}"))
    ok = max(loss, norm, grad[0], param[0], slot[0]) <= limit
    return Difference(ok, loss, grad[0], norm, param[0], grad[1], param[1], *slot)


def _norm(whole: Part) -> float:
    return whole.values.double().norm().item()


def _worst(
    ranks: Sequence[Parts],
    reference: Parts,
    noise: float,
    scale: Mapping[str, float] = MappingProxyType({}),
) -> tuple[float, str]:
    """Return the largest relative difference (2-norm) of any copy of any tensor, and its name; inf for missing parts.

    Differences are relative to the tensor's norm, but at least to ``noise`` times the norm of all tensors, and to the
    tensor's ``scale``.
    """
    norms = {name: _norm(whole) for name, whole in reference.items()}
    least = max(noise * math.hypot(*norms.values()), 1e-300)
    worst = (0.0, "")
    for name, whole in reference.items():
        covered: dict[object, int] = {}
        square: dict[object, float] = {}  # of the copy of a part that differs most
        for part in (parts[name] for parts in ranks if name in parts):
            difference = part.values.double() - whole.values[part.index].double()
            error = difference.square().sum().item()
            where = part.rows, part.box
            # not a number counts as infinity
            larger = max(square.get(where, 0.0), error)
            square[where] = larger if error == error else math.inf
            covered[where] = part.values.numel()
        size = max(norms[name], least, scale.get(name, 0.0))
        value = sum(square.values()) ** 0.5 / size
        if sum(covered.values()) != whole.values.numel() or value != value:
            value = math.inf
        worst = max(worst, (value, name))
    return worst


def _whole_gradients(traces: Sequence[StepTrace]) -> Gradients:
    """Assemble whole gradients, by step, from all ranks' traces."""
    return [
        _whole([trace.grads[step] for trace in traces])
        for step in range(len(traces[0].grads))
    ]


def _whole(ranks: Sequence[Parts]) -> dict[str, torch.Tensor]:
    """Assemble whole tensors from all ranks' parts; elements that no rank has are zero."""
    tensors: dict[str, torch.Tensor] = {}
    for name, part in (item for parts in ranks for item in parts.items()):
        if name not in tensors:
            tensors[name] = torch.zeros(part.tensor.shape, dtype=part.values.dtype)
        tensors[name][part.index] = part.values
    return tensors
