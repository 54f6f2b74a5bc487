"""The training step: the same code for one device and for every layout.

Gradients are reduced in two places only, both before clipping: the units of the state sum gradients over the data axes
while backward runs, and :func:`reduced` sums those that several ranks computed from their share of the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch.profiler import record_function

from weft.data.order import sample_hashes
from weft.layout.axes import DATA_AXES, MODEL_AXES
from weft.layout.boundary import (
    BY_DATA,
    OWN,
    SHARE,
    I,
    P,
    V,
    declare,
    gradient_types,
    own_number,
    own_share,
    share_of_sum,
    state_types,
    step_sum,
    sum_over,
    untyped,
)
from weft.train.step_values import Agreed, StepInput, StepResult

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.layout.mesh import Mesh
    from weft.models.answer_loss import Objective
    from weft.models.hooks import EarlyUpdates, Hooks
    from weft.models.pair_loss import PairLoss
    from weft.models.transformer import Transformer
    from weft.parallel.state import State, Unit
    from weft.sync.presence import Presence
    from weft.train.phases import AfterPhase, AgreePhase, GradientPhase, UpdatePhase

    #: The reduced local gradients by which a unit is updated, by name.
    UnitGradients = Callable[[Unit], Mapping[str, torch.Tensor]]

#: Sums a tensor over all islands whose gradients become one update, after its sum over this island's ranks.
Beyond = Callable[[torch.Tensor], torch.Tensor]


def unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


#: Where the sums of a step (:func:`shares_of_sums`) stand in their vector; those of experts follow.
LOSS, SQUARE_NORM, STOPS, TOKENS, SAMPLES, MARKS = range(6)


def share_of_tokens(batches: Sequence[Batch], mesh: Mesh) -> torch.Tensor:
    """Return this rank's share of the number of real tokens in a step; the shares of all ranks add up to it.

    Ranks with the same data count once; padding does not count. Scalar, float64.
    """
    return own_share(sum(b.real_tokens for b in batches), mesh, **BY_DATA)


def share_of_samples(batches: Sequence[Batch], mesh: Mesh) -> torch.Tensor:
    """Return this rank's shares of the number of samples in a step, and of the sum of their hashes. Float64 ``[2]``.

    The hash of a sample is 32 pseudo-random bits of its number, so that the sum proves which samples a step has seen.
    The shares of all ranks add up to the totals.
    """
    seen = [sample for batch in batches for sample in batch.samples]
    return torch.stack(
        [
            own_share(number, mesh, **BY_DATA)
            for number in (len(seen), int(sample_hashes(seen).sum()))
        ]
    )


def share_of_weight(batches: Sequence[Batch], mesh: Mesh) -> torch.Tensor:
    """Return this rank's share of the total weight of a step's labels, by which the summed loss is divided.

    A label has weight 1 unless the data say otherwise. The shares of all ranks add up to the total. Scalar, float64.
    """
    return own_share(sum(b.label_weight for b in batches), mesh, **BY_DATA)


def count_loads(
    model: Transformer, batches: Sequence[Batch], mesh: Mesh, beyond: Beyond = unchanged
) -> None:
    """Start to count how many tokens the routers send to each expert in the step of ``batches``.

    ``beyond``: sums a tensor over the islands that share one update (:meth:`PhaseFiller.beyond`). Collective if the
    routers' losses divide by the number of tokens of the whole step.
    """
    if model.loads is None:
        return
    tokens = own_share(sum(b.document_tokens for b in batches), mesh, **BY_DATA)
    total = beyond(step_sum(tokens, mesh)) if model.loads.balances else tokens
    model.loads.begin(lambda: total)


def nonzero_weight(total: torch.Tensor) -> torch.Tensor:
    """Return ``total``, the weight of all labels, or 1 where it is 0, so that a division is safe."""
    return torch.where(total > 0, total, 1.0)


class PendingSum:
    """An asynchronous sum of all ranks' ``share``. Calling the object waits for the sum and returns it."""

    def __init__(self, share: torch.Tensor, mesh: Mesh) -> None:
        self.value = share.clone()
        alone = mesh.layout.world == 1  # which may have no process group
        self.work = (
            None
            if alone
            else dist.all_reduce(self.value, async_op=True, group=mesh.step_group)
        )

    def __call__(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.value


def pass_loss(
    model: Transformer,
    batch: Batch,
    total: torch.Tensor,
    mesh: Mesh,
    route: Sequence[int] | None = None,
    hooks: Hooks | None = None,
) -> torch.Tensor:
    """Run forward on ``batch``, and return this rank's share of the step's mean loss, equal on all ranks of ``tp``.

    ``total``: the weight of all labels of the step, by which the summed loss is divided. ``route``: indices of the
    blocks to run, by default all. ``hooks``: functions whose losses replace the model's; None: the model's own.
    """
    seen = model.loads.seen(batch) if model.loads else None
    ids = batch.tokens, batch.positions, batch.cu_seqlens
    loss = model(*ids, batch, seen=seen, hooks=hooks, route=route)
    return share_of_sum(loss, mesh, **dict.fromkeys(DATA_AXES, V)) / total


def accumulate(
    model: Transformer,
    state: State,
    batches: Sequence[Batch],
    mesh: Mesh,
    routes: Sequence[Sequence[int]] = (),
    before_last: Callable[[torch.Tensor], None] = lambda share: None,
    weight: torch.Tensor | None = None,
    beyond: Beyond = unchanged,
    early: EarlyUpdates | None = None,
    hooks: Callable[[Batch], Hooks | None] = lambda batch: None,
) -> torch.Tensor:
    """Run forward and backward of every pass of a step (gradient accumulation).

    Returns this rank's share of the mean loss.

    Arguments:
        ``batches``: this rank's batches, one for each pass.
        ``routes``: for each pass, the indices of the blocks to run; empty: all blocks. If there are more passes than
            routes, the routes are used again from the first.
        ``before_last``: function that is called before the last backward, with this rank's share of the mean loss. With
            a pipeline it is never called.
        ``weight``: number by which the summed loss is divided. By default it is the sum of the labels' weights over all
            ranks of all islands that share one update.
        ``beyond``: function that sums a tensor over these islands.
        ``early``: updates of parameters that a pipeline makes while its backward still runs.
        ``hooks``: function that returns the functions that a pass calls, for its batch on this rank's device; None
            stands for the model's own. A pipeline does not use it.
    """
    set_reference_point(model, state, batches, mesh, beyond)
    count_loads(model, batches, mesh, beyond)
    if model.pipeline is not None:
        # due when the first microbatch has passed all stages
        total = PendingSum(share_of_weight(batches, mesh), mesh)
        return model.pipeline.accumulate(
            batches, cache(lambda: nonzero_weight(beyond(total()))), early
        )
    planned = batches[0].group is not None
    if planned:
        from weft.parallel.hybrid import check_plan, share_pass

        check_plan(batches, mesh)
        state.gather()  # within a pass that not all ranks share it is too late
    if weight is None:
        weight = nonzero_weight(beyond(step_sum(share_of_weight(batches, mesh), mesh)))
    shares = []
    for i, batch in enumerate(batches):
        state.begin_pass(last=i == len(batches) - 1)
        if planned:
            share_pass(model, batch.group)
        route = routes[i % len(routes)] if routes else None
        batch = batch.to(mesh.device)
        share = pass_loss(model, batch, weight, mesh, route, hooks(batch))
        shares.append(share.detach())
        if i == len(batches) - 1:
            before_last(torch.stack(shares).sum())
        if share.requires_grad:  # not so of a route without the blocks that learn
            share.backward()
        if model.hooks.passed is not None:
            model.hooks.passed(i + 1, len(batches))
    if planned:
        share_pass(model, None)
    return torch.stack(shares).sum()


def compares_with_a_point(objective: Objective | None) -> TypeGuard[PairLoss]:
    """Return whether ``objective`` is a loss on pairs that needs a reference point, as KTO does.

    :func:`set_reference_point` sets the point.
    """
    return bool(getattr(objective, "has_point", False))


def set_reference_point(
    model: Transformer,
    state: State,
    batches: Sequence[Batch],
    mesh: Mesh,
    beyond: Beyond = unchanged,
) -> None:
    """Set the reference point of the model's loss if the loss has one, as KTO does; else do nothing. Collective.

    The reference point is a number with which the loss compares the log ratio of each answer. It is the mean divergence
    of the model from the reference model, at least 0. It is computed in forward passes over the step's ``batches``.
    ``beyond``: sums a tensor over the islands that share one update.
    """
    loss = model.hooks.objective
    if not compares_with_a_point(loss):
        return
    hooks = replace(model.hooks, objective=loss.divergence)
    shares = loss_shares(model, state, [batches], mesh, hooks)
    moved, weight = beyond(step_sum(shares, mesh)).tolist()
    loss.point = max(0.0, moved / (weight or 1.0))


def move_to(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``x`` on ``device``: ``x`` itself if it is there, else a copy, as for gradients of an offloaded state."""
    return x if x.device == device else x.to(device)


@torch.no_grad()
def sum_over_axis(
    axis: str, grads: dict[str, torch.Tensor], state: State, mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Sum over the mesh axis ``axis`` the gradients of those parameters that are whole on each of its ranks.

    With ``tp`` these are, for example, the weights of norms. Each rank along the axis has computed a part of these
    gradients from its share of the work. All are summed in one all-reduce. Returns a dict like ``grads`` with the sums
    in it.
    """
    names = [h.name for h in state.learning if gradient_types(h.logical)[axis] is P]
    if mesh.size(axis) == 1 or not names:
        return grads
    return grads | as_flat(
        names, grads, mesh.device, lambda flat: sum_over(axis, flat, mesh)
    )


@torch.no_grad()
def sum_over_copies(
    grads: dict[str, torch.Tensor], state: State, mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Sum the gradients of parameters that several pipeline stages use, such as tied embeddings.

    There is one all-reduce per set of stages. Returns ``grads`` with the sums in it.
    """
    for group, names in state.copies.items():

        def summed(
            flat: torch.Tensor, group: dist.ProcessGroup = group
        ) -> torch.Tensor:
            dist.all_reduce(flat, group=group)
            return flat

        grads = grads | as_flat(names, grads, mesh.device, summed)
    return grads


def as_flat(
    names: Sequence[str],
    grads: Mapping[str, torch.Tensor],
    device: torch.device,
    work: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Concatenate the gradients named ``names`` of ``grads`` into one flat tensor on ``device``, and apply the function
    ``work`` to it.

    Returns the function's result, split by name into tensors of the gradients' shapes.
    """
    flat = torch.cat([grads[name].flatten() for name in names])
    place = flat.device
    flat = move_to(work(move_to(flat, device)), place)  # they may be on the host
    return split_like(flat, {name: grads[name] for name in names})


def split_like(
    flat: torch.Tensor, like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Split the tensor ``flat``, and return views by name that have the names and shapes of the tensors in ``like``."""
    pieces = flat.split([x.numel() for x in like.values()])
    return {
        name: piece.view(x.shape)
        for (name, x), piece in zip(like.items(), pieces, strict=True)
    }


@torch.no_grad()
def square_norm(
    grads: Mapping[str, torch.Tensor], state: State, mesh: Mesh
) -> torch.Tensor:
    """Return this rank's share of the squared global norm of the gradients ``grads``.

    The shares of all ranks add up to the squared norm, and every element of a gradient is counted on one rank only.
    Scalar, float64.
    """
    for h in state.learning:
        declare(grads[h.name], mesh, **state_types(h.logical))
    with untyped():  # that each counts once follows from the placements, not from types
        # By name: units come in another order where they rest in tiers.
        counted = sorted(
            (h for h in state.learning if h.placement.counted), key=attrgetter("name")
        )
        # A norm that is known stands for its gradient, unless that has been summed further.
        known = (
            h.norm if h.norm is not None and grads[h.name] is h.grad else grads[h.name]
            for h in counted
        )
        norm = torch.nn.utils.get_total_norm(list(known))
        square = move_to(norm.double().square(), mesh.device)
    return declare(square, mesh, **SHARE)


def reduced(
    state: State, mesh: Mesh, looked_at: bool = True
) -> dict[str, torch.Tensor]:
    """Return this rank's gradients by parameter name, summed over all ranks that have computed a part of them.

    ``looked_at``: whether the caller reads the gradients at once. If not, the call does not wait for gradients that are
    being moved to the host or to a file.
    """
    grads = state.gradients(
        settled=looked_at or bool(state.copies) or mesh.size(*MODEL_AXES) > 1
    )
    return sum_over_copies(summed_over_axes(grads, state, mesh), state, mesh)


def summed_over_axes(
    grads: dict[str, torch.Tensor], state: State, mesh: Mesh
) -> dict[str, torch.Tensor]:
    """Return ``grads`` summed over each of :data:`weft.layout.axes.MODEL_AXES` by :func:`sum_over_axis`."""
    for axis in MODEL_AXES:
        grads = sum_over_axis(axis, grads, state, mesh)
    return grads


def step_result(sums: torch.Tensor) -> StepResult:
    """Return the result of a step from ``sums``, the totals over all ranks of the vector :func:`shares_of_sums`."""
    loss, square, stops, tokens, samples, marked, *counts = sums.tolist()
    sent, loads = list[float](), list[float]()
    if counts:
        from weft.models.router import SENT

        sent, loads = counts[: len(SENT)], counts[len(SENT) :]
    norm = math.sqrt(square) if square >= 0 else math.nan
    skipped = not (math.isfinite(norm) and math.isfinite(loss))
    return StepResult(
        loss, norm, round(tokens), skipped, stops > 0, tuple(map(round, loads)), tuple(map(round, sent)),
        (round(samples), round(marked)),
    )  # fmt: skip


def update(
    state: State, grads: Mapping[str, torch.Tensor], lr: float, scale: float = 1.0
) -> None:
    """Update all parameters by their reduced gradients ``grads`` times ``scale``, unit by unit.

    A unit is a group of parameters that are updated together. ``lr``: the learning rate.
    """
    for unit in state.units:
        state.update(unit, grads, lr, scale)
    state.settle()


def clear_gradients(model: Transformer, state: State) -> None:
    model.zero_grad()
    state.clear_gradients()


def clip_scale(norm: float, clip: float) -> float:
    """Return the factor that scales gradients of global norm ``norm`` down to the norm ``clip``.

    The factor is 1 if the norm is not larger, or if ``clip`` is 0.
    """
    return clip / (norm + 1e-6) if clip and norm > clip else 1.0


@dataclass(frozen=True)
class StepContext:
    """Objects and functions of a run that the phases of its steps use.

    Attributes:
        ``model``: this rank's shard of the model.
        ``state``: this rank's shard of parameters and optimizer state.
        ``mesh``: this rank's position among the ranks of the run.
        ``before_update``: function that returns when parameters and optimizer state may change. Every rank calls it
            before it contributes to the step's sums. A rank that has these sums thus knows that the call has returned
            on all ranks.
        ``inspect``: function that is called with the reduced, unclipped gradients of this rank.
        ``routes``: for each pass, the indices of the blocks to run; empty: all blocks.
        ``presence``: which islands take part; None if the run has no islands.
        ``begun``: the number of steps taken before.
        ``report``: function that is called when a technique has chosen something, with a kind of record, a line to
            print, and the record's values.
    """

    model: Transformer
    state: State
    mesh: Mesh
    before_update: Callable[[], None] = lambda: None
    inspect: Callable[[dict[str, torch.Tensor]], None] | None = None
    routes: Sequence[Sequence[int]] = ()
    presence: Presence | None = None
    begun: int = 0
    report: Callable[[str, str, Mapping[str, Any]], None] = lambda kind, line, values: (
        None
    )

    @property
    def streamed(self) -> bool:
        """Whether the weights rest in files, from which the units of the model are loaded one after the other."""
        return self.model.pipeline is not None and self.model.pipeline.streamed


class PhaseFiller:
    """Base class of objects that fill phases of a training step; the base class fills none.

    A technique (:mod:`weft.train.step_technique`) adds the methods of the phases that it declares
    (:mod:`weft.train.phases`).
    """

    def label_weight(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """Return the number by which the plain gradient phase divides the summed loss of a step.

        None stands for the sum of the labels' weights over all ranks. ``batches``: this rank's batches of the step.
        """
        return None

    def beyond(self, number: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``number`` over all islands that share one update.

        ``number``: a total over the ranks of this island. Unless a subclass sums over islands, ``number`` itself is
        returned.
        """
        return number

    def finish(self) -> list[StepResult]:
        """Make the last step's result final. Returns the results that were not yet final, oldest first."""
        return []

    def conclude(self) -> None:
        """Do the last work of a run that ends as a complete one; by default none."""

    def summary(self) -> str:
        """Return a line about all steps that is printed at the end of a run; empty if there is nothing to say."""
        return ""

    def news(self) -> list[str]:
        """Return the lines to print that are new since the last call."""
        return []


class PlainStep(PhaseFiller):
    """Fills the phases of a training step that no technique fills: gradients, one all-reduce, one update."""

    def __init__(self, context: StepContext) -> None:
        self.context = context

    def gradients(self, given: StepInput, agree: AgreePhase) -> torch.Tensor:
        of = self.context
        weight = agree.label_weight(given.batches)
        return accumulate(
            of.model, of.state, given.batches, of.mesh, of.routes, weight=weight, beyond=agree.beyond
        )  # fmt: skip

    def agree(self, given: StepInput, shares: torch.Tensor) -> Agreed:
        context = self.context
        grads, sums = reduced_and_sums(context, given, shares, context.before_update)
        return Agreed(grads, partial(step_result, sums))

    def update(self, given: StepInput, agreed: Agreed) -> list[StepResult]:
        return [update_unless_skipped(self.context, given, agreed, self._update)]

    def _update(self, grads: UnitGradients, lr: float, scale: float) -> None:
        """Update every unit by what ``grads`` says of it, times ``scale``; streamed units in the next forward."""
        self.context.state.update_later(grads, lr, scale)
        if not self.context.streamed:
            self.context.state.settle()


def update_unless_skipped(
    context: StepContext,
    given: StepInput,
    agreed: Agreed,
    update: Callable[[UnitGradients, float, float], None],
) -> StepResult:
    """Call ``update``, unless the step is skipped because its loss or gradient norm is not finite.

    ``given``: the step's input on this rank. ``agreed``: the reduced gradients, and a function that waits for the
    step's result. ``update``: function that changes the parameters; its arguments are the gradients by unit, the
    learning rate and the factor that scales gradients down. Returns the step's result, which says whether the step
    was skipped. The gradients are cleared in any case. ``context``: the model, state and mesh of the run.
    """
    with record_function("weft:optimizer"):
        result = agreed.result()
        if context.inspect is not None:
            context.inspect(agreed.grads)
        if not result.skipped:
            scale = clip_scale(result.grad_norm, given.clip)
            update(lambda unit: agreed.grads, given.lr, scale)
            context.model.learn_loads(result.loads)
        clear_gradients(context.model, context.state)
    return result


def reduced_and_sums(
    context: StepContext,
    given: StepInput,
    loss: torch.Tensor,
    before_sums: Callable[[], None],
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Reduce the gradients after all passes of a step; return them by name, and the step's sums.

    The gradients are those that this rank holds. The sums are numbers such as loss, gradient norm and tokens, added up
    over all ranks as :func:`shares_of_sums` lists them.

    ``context``: the model, state and mesh of the run. ``given``: the step's input on this rank. ``loss``: this rank's
    share of the mean loss. ``before_sums``: function that is called before the all-reduce of the sums.
    """
    state, mesh = context.state, context.mesh
    with record_function("weft:optimizer"):
        grads = reduced(state, mesh, looked_at=context.inspect is not None)
        square = square_norm(grads, state, mesh)
        before_sums()
        return grads, step_sum(shares_of_sums(context, given, loss, square), mesh)


def shares_of_sums(
    context: StepContext, given: StepInput, loss: torch.Tensor, square: torch.Tensor
) -> torch.Tensor:
    """Return this rank's shares of a step's sums, from which :func:`step_result` reads the result once they are
    summed.

    The shares are a float64 vector ``[6]``: the mean loss, the squared gradient norm, the number of ranks that ask to
    stop, real tokens, samples, and the sum of the samples' hashes. With experts the vector is ``[9 + experts]``: after
    the six numbers come three counts of bytes sent for experts (by kind, :data:`weft.models.router.SENT`), and then the
    number of tokens routed to each expert.

    ``given``: the step's input on this rank. ``loss``, ``square``: this rank's shares of the mean loss and of the
    squared gradient norm. ``context``: the model, state and mesh of the run.
    """
    mesh, loads = context.mesh, context.model.loads
    shares = (
        share_of_sum(loss, mesh, **dict.fromkeys(MODEL_AXES, I)),
        square,
        own_share(given.stop, mesh, **OWN),
        share_of_tokens(given.batches, mesh),
    )
    plain = torch.cat((torch.stack(shares), share_of_samples(given.batches, mesh)))
    if loads is None:
        return plain
    return torch.cat((plain, loads.share_of_bytes(), loads.share()))


@dataclass
class Step:
    """A training step: phases, each filled by one object, that turn batches into an update of the state.

    Every step has one result, which may become final only while later steps run. If loss or gradient norm is not
    finite, all ranks skip the update.

    Attributes:
        ``state``: this rank's shard of parameters and optimizer state.
        ``gradients``: the object that runs forward and backward.
        ``agree``: the object that sums gradients over ranks.
        ``update``: the object that updates the parameters.
        ``after``: the object that works between steps; None if there is none.
        ``fillers``: the objects among these that belong to techniques, each once even if it fills several phases.
        ``clip``: largest global gradient norm, above which gradients are scaled down; 0: no limit.
    """

    state: State
    gradients: GradientPhase
    agree: AgreePhase
    update: UpdatePhase
    after: AfterPhase | None
    fillers: Sequence[PhaseFiller]
    clip: float = 0.0

    def take(
        self, batches: Sequence[Batch], lr: float, stop: bool = False
    ) -> list[StepResult]:
        """Take a step. Returns the results, of this step or earlier ones, that have become final, oldest first.

        ``batches``: this rank's microbatches. ``lr``: the learning rate. ``stop``: whether this rank asks to end the
        run; the step's result says whether any rank does.
        """
        given = StepInput(batches, lr, self.clip, stop)
        shares = self.gradients.gradients(given, self.agree)
        agreed = self.agree.agree(given, shares)
        results = self.update.update(given, agreed)
        return results if self.after is None else self.after.after(results, self.settle)

    def settle(self) -> list[StepResult]:
        """Complete the last step's update. Returns the results that were not yet final, oldest first."""
        self.state.settle()
        return [r for filler in self.fillers for r in filler.finish()]

    def finish(self) -> list[StepResult]:
        """Complete the last step's update and all work of the phase after it, because the run may end here.

        Returns the results that were not yet final, oldest first.
        """
        results = self.settle()
        return results if self.after is None else self.after.end(results)

    def conclude(self) -> None:
        """Do the last work of a run that ends as a complete one, such as taking the mean over islands."""
        for filler in self.fillers:
            filler.conclude()

    def summary(self) -> str:
        """Return a line about all steps that is printed at the end of a run; empty if there is nothing to say."""
        said = [filler.summary() for filler in self.fillers]
        return "; ".join(filter(None, [*said, self.state.tiers.summary()]))

    def news(self) -> list[str]:
        """Return the lines to print that are new since the last call."""
        return [line for filler in self.fillers for line in filler.news()]


def plain_step(context: StepContext, clip: float) -> Step:
    """Return a training step without techniques. ``clip``: largest global gradient norm; 0: no limit.

    ``context``: the model, state and mesh of the run.
    """
    plain = PlainStep(context)
    return Step(context.state, plain, plain, plain, None, [], clip)


def train_step(
    model: Transformer,
    state: State,
    batches: Sequence[Batch],
    mesh: Mesh,
    lr: float,
    clip: float,
    stop: bool = False,
) -> StepResult:
    """Take one step without techniques (:class:`PlainStep`), and return its result.

    ``batches``: this rank's microbatches. ``lr``: the learning rate. ``clip``: largest global gradient norm; 0: no
    limit. ``stop``: whether this rank asks to end the run.
    """
    plain = plain_step(StepContext(model, state, mesh), clip)
    return plain.take(batches, lr, stop)[0]


def reduced_gradients(
    model: Transformer, state: State, batches: Sequence[Batch], mesh: Mesh
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Run the passes of a plain step and sum their gradients; the state is not updated.

    Returns this rank's reduced gradients by name, and the step's sums (:func:`shares_of_sums`) over all ranks.
    """
    context = StepContext(model, state, mesh, inspect=lambda grads: None)
    loss = accumulate(model, state, batches, mesh)
    return reduced_and_sums(context, StepInput(batches, 0.0), loss, lambda: None)


@torch.no_grad()
def loss_sum(
    model: Transformer, batches: Sequence[Batch], mesh: Mesh, hooks: Hooks | None = None
) -> torch.Tensor:
    """Return the sum of the losses of this rank's ``batches``, without gradients. All ranks of ``tp`` get the same
    sum.

    In a pipeline the result is this rank's share of the sum. ``hooks``: the loss to compute, and other functions
    that the forward passes call; None: those of the model.
    """
    if model.pipeline is not None:
        return model.pipeline.evaluate(batches, hooks)
    losses = []
    for batch in batches:
        batch = batch.to(mesh.device)
        ids = batch.tokens, batch.positions, batch.cu_seqlens
        losses.append(model(*ids, batch, hooks=hooks))
    return torch.stack(losses).sum()


def share_of_passes(numbers: torch.Tensor, state: State, mesh: Mesh) -> torch.Tensor:
    """Return this rank's share of ``numbers``, which are sums over its forward passes.

    The shares of all ranks add up to the sums over all data. Several ranks may have computed the same passes; the
    numbers of one of them are then its share, and the others' shares are 0. In a pipeline the numbers of the rank with
    the last stage count, because losses are computed there.
    """
    # gathered copies are kept for a backward that did not come, and parameters may change
    if mesh.size("near"):
        state.release(drop=True)
    by_stage = BY_DATA | {"pp": V}  # losses are where the last stage is
    return share_of_sum(numbers, mesh, **by_stage)


def sum_over_passes(numbers: torch.Tensor, state: State, mesh: Mesh) -> torch.Tensor:
    """Return the sum of ``numbers`` over all ranks; each rank has added them up over its own forward passes.

    Passes that several ranks compute count once (:func:`share_of_passes`).
    """
    return step_sum(share_of_passes(numbers, state, mesh), mesh)


@torch.no_grad()
def loss_shares(
    model: Transformer, state: State, steps: Iterable[Sequence[Batch]], mesh: Mesh, hooks: Hooks | None = None
) -> torch.Tensor:  # fmt: skip
    """Return this rank's shares of the summed loss and of the total label weight of ``steps``. Float64 ``[2]``.

    ``steps``: the batches of each step. ``hooks``: functions for the passes to call, whose losses replace the model's.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batches in steps:
        loss = loss_sum(model, batches, mesh, hooks)
        sums += torch.stack((loss, own_weight(batches, mesh)))
    return share_of_passes(sums, state, mesh)


def own_weight(batches: Sequence[Batch], mesh: Mesh) -> torch.Tensor:
    """Return this rank's share of the total weight of the labels in ``batches``, so that each label counts once.

    The share is 0 on all pipeline stages but the first.
    """
    return own_number(
        (mesh.rank("pp") == 0) * sum(b.label_weight for b in batches), mesh
    )


@torch.no_grad()
def evaluate(
    model: Transformer, state: State, steps: Iterable[Sequence[Batch]], mesh: Mesh
) -> float:
    """Return the mean loss, weighted by label, over the batches of ``steps``; equal on all ranks. Collective.

    ``steps``: the batches of each step.
    """
    if compares_with_a_point(model.hooks.objective):
        shares = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        for batches in steps:
            set_reference_point(model, state, batches, mesh)
            shares += loss_shares(model, state, [batches], mesh)
    else:
        shares = loss_shares(model, state, steps, mesh)
    loss, weight = step_sum(shares, mesh).tolist()
    return loss / (weight or 1.0)
