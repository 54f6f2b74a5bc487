"""Runs the passes of a pipeline by one table: the operations of its actions on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from weft.data.batch import Batch
from weft.models.fused import ImmediateTape, Tape, deferred, run_tape
from weft.models.hooks import EarlyUpdates, Hooks
from weft.models.router import RouterPass
from weft.models.transformer import Block, Transformer
from weft.parallel.overlap import LayerPass, block_steps, layer_ops
from weft.parallel.state import Held, Unit
from weft.parallel.units import TableUnit, sum_over_replicas
from weft.schedule.actions import Action, Table
from weft.schedule.execute import Executed, Op, execute
from weft.schedule.kinds import Duty, kind_of
from weft.schedule.lower import FETCH, GATHER, REDUCE, RELEASE

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.memory.on_device import OnDevice
    from weft.parallel.vocabulary import OutputShard
    from weft.schedule.pipeline_wire import Wire
    from weft.schedule.stages import Stage

T = torch.Tensor

#: Returns the values that replace a parameter's rows.
Point = Callable[[Held], T]

#: Stages whose weights stay between a step's end and the next step's begin, and one less where forward ends.
KEPT = 2


class Turns(NamedTuple):
    """The gathered weights that stay in memory until their stage runs again, as :func:`turns` chooses them.

    A gather action brings the whole weights of a stage into memory. ``again``: the gather actions whose weights stay
    until the next gather of the same stage in the step; each is given by its Python ``id()``. ``first``: indices of the
    stages that a step gathers first. Their weights stay from the end of a step to the next step.
    """

    again: frozenset[int]
    first: frozenset[int]


def turns(gathers: Sequence[Action], size_of: Callable[[int], int], room: int) -> Turns:
    """Choose which weights stay in memory from one gather to the next gather of the same stage.

    A gather action brings the whole weights of a stage into memory. They stay in three cases. First, if at most one
    other stage is gathered before the same stage is gathered again. Second, if they fit into ``room``, a number of
    bytes set aside for further weights; weights that are needed again soonest are chosen first. Third, if the stage is
    among the first that a step gathers: its weights then stay from the end of a step to the next step.

    ``gathers``: a rank's gather actions in the order of execution; ``size_of``: function from a stage to the bytes of
    its weights.
    """
    last: dict[int, int] = {}
    waits = []  # how many gathers a stage would stay for, and the gather before them
    for i, a in enumerate(gathers):
        if a.stage in last:
            waits.append((i - last[a.stage], last[a.stage]))
        last[a.stage] = i
    again = set()
    for wait, i in sorted(waits):
        room -= size_of(gathers[i].stage) if wait > KEPT else 0
        if room < 0:
            break
        again.add(id(gathers[i]))
    return Turns(frozenset(again), frozenset(a.stage for a in gathers[:KEPT]))


@dataclass(frozen=True)
class PipelineRank:
    """This rank's part of a pipeline: the objects that every :class:`PipelinePass` uses.

    Attributes:
        ``model``, ``mesh``: the model with this rank's layers, and the layout over ranks.
        ``stages``: all stages of the model.
        ``users``: this rank's units (parameters that are gathered together), each with the indices of the stages that
            use it.
        ``tiers``: where weights, gradients and optimizer state rest.
        ``streamed``: whether weights rest in files.
        ``output``: this rank's share of the vocabulary, if the vocabulary is cut; else None.
        ``wire``: transfers to other ranks; None on a single rank.
        ``visit``: function that runs the postponed update of a unit before the unit's weights are used.
        ``fetch``: function that starts to fetch the tensors of a unit from where they rest.
        ``live``: the stages whose weights are gathered at present.
    """

    model: Transformer
    mesh: Mesh
    stages: Sequence[Stage]
    users: Sequence[tuple[frozenset[int], TableUnit]]
    tiers: OnDevice
    streamed: bool
    output: OutputShard | None
    wire: Wire | None
    visit: Callable[[Unit], None]
    fetch: Callable[[Unit], None]
    live: set[int] = field(default_factory=set)

    @property
    def rank(self) -> int:
        return self.mesh.rank("pp")

    @property
    def units(self) -> list[TableUnit]:
        return [unit for _, unit in self.users]

    def units_of(self, stage: int) -> list[TableUnit]:
        """Return this rank's units that have parameters with which ``stage`` computes."""
        return [unit for stages, unit in self.users if stage in stages]

    def weights_of(self, stage: int) -> int:
        """Return the bytes of those weights of ``stage`` that rest in a file."""
        return sum(self.tiers.size(unit, "weights") for unit in self.units_of(stage))


class StageInput(NamedTuple):
    """Inputs of a stage's forward.

    Attributes:
        ``x``: the stage's input.
        ``leaf``: the same tensor as a leaf of the autograd graph, in whose ``grad`` backward leaves the input's
            gradient. None where the stage embeds the tokens itself.
        ``rope``: cosines and sines of rotary embedding.
        ``seen``: where routers of experts record how many tokens each expert gets; None if nothing is recorded.
    """

    x: T
    leaf: T | None
    rope: tuple[T, ...]
    seen: RouterPass | None


class PipelinePass:
    """One execution of the schedule ``table`` on this rank: forward and backward of all microbatches in ``batches``.

    Args:
        ``here``: this rank's part of the pipeline.
        ``table``: the schedule.
        ``batches``: a batch for each microbatch.
        ``total``: function that returns the sum of the weights of the step's labels; called when the first loss is due.
        ``points``: empty for ordinary training. Otherwise the microbatches are computed without gradients, at one point
            after another. A point is a function that returns the values to use in place of a parameter's own.
        ``hooks``: functions called during the passes, such as the loss; None: those of the model.
        ``early``: units to update during backward; None: no unit is.
    """

    def __init__(
        self, here: PipelineRank, table: Table, batches: Sequence[Batch], total: Callable[[], T],
        points: Sequence[Point], hooks: Hooks | None, early: EarlyUpdates | None,
    ) -> None:  # fmt: skip
        self.here, self.table = here, table
        self.total, self.points, self.early = total, points, early
        self.model, self.mesh, self.tiers = here.model, here.mesh, here.tiers
        self.hooks = hooks or self.model.hooks
        self.batches = [batch.to(self.mesh.device) for batch in batches]
        self.actions = table.ranks[here.rank]
        self.losses: dict[int, T] = {}  # by microbatch
        self.ropes: dict[int, tuple[T, ...]] = {}
        self.seen: dict[int, RouterPass] = {}
        # the last of a kind for each unit that is updated early
        self.lasts = self._last_uses()
        self.summed: set[TableUnit] = set()  # over the replicas, by now
        gathers = [a for a in self.actions if a.kind == GATHER]
        self.turns = turns(gathers, here.weights_of, self.tiers.room)
        # how many actions of this rank give an input's gradient, and how many of them are done
        self.backwards = sum(a.declared.duties.input_gradient for a in self.actions)
        self.behind = 0
        # Where weight gradients are an action of their own, what they need goes on a tape.
        self.split = {
            (a.stage, a.microbatch)
            for a in self.actions
            if a.declared.duty is Duty.WEIGHT_GRADIENT
        }

    def run(self) -> Executed:
        """Execute the table on this rank; return the times of its actions.

        The attribute ``losses`` then has the loss of each microbatch that this rank computes.
        """
        here = self.here
        self.tiers.restart()
        for unit in here.units:
            unit.begin_step()
        executed = execute(self.table, here.rank, self._ops(), here.wire)
        for unit in here.units:
            unit.near = None  # before the rows change
        return executed

    def _ops(self) -> dict[str, Op]:
        if self.mesh.layout.takes_turns:
            ops = layer_ops(self._pass_of, self.table, self.here.rank)
        else:
            ops = {"F": self._forward, "B": self._backward, "I": self._backward}
        ops["W"] = self._weights
        if output := self.here.output:
            objective = self.hooks.objective
            ops |= output.ops(self.batches, self.total, self.losses, objective)
        for kind, op in ops.items():
            ops[kind] = op if kind_of(kind).forward else self._then_fold(op)
            if self.points:
                ops[kind] = self._at_point(ops[kind])
        return ops | {
            GATHER: self._gather,
            RELEASE: self._release,
            REDUCE: self._reduce,
            FETCH: self._fetch,
        }

    def _forward(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        batch, tape = self.batches[a.microbatch], self._tape(a)
        with deferred(tape):
            x, leaf, rope, seen = self._stage_input(a, reads)
            layers = self.here.stages[a.stage].layers
            stream = self.model.run_blocks(layers, x, rope, batch.cu_seqlens, seen)
            x = self._stage_output(a, stream)
        values = {"act": x.detach(), "saved": (leaf, x, tape)}
        return [values[value.name] for value in a.writes]

    def _pass_of(self, a: Action, reads: Sequence[T]) -> LayerPass:
        """Return a microbatch's pass through the one layer of a stage, before any part of it has run."""
        x, leaf, rope, seen = self._stage_input(a, reads)
        (layer,) = self.here.stages[a.stage].layers
        block = cast(Block, self.model.blocks[str(layer)])
        cu_seqlens = self.batches[a.microbatch].cu_seqlens
        steps = block_steps(block, x, rope, cu_seqlens, seen)
        return LayerPass(steps, leaf, self._tape(a), partial(self._stage_output, a))

    def _tape(self, a: Action) -> Tape | None:
        """Return the tape for the weight gradients of a stage's projections; None without gradients."""
        if not torch.is_grad_enabled():
            return None
        if (a.stage, a.microbatch) in self.split:
            return []
        # A lone rank adds weight gradients up as one does without stages, so that tiers change no bit.
        return ImmediateTape() if self.here.wire else None

    def _stage_input(self, a: Action, reads: Sequence[Any]) -> StageInput:
        m, training = a.microbatch, torch.is_grad_enabled()
        batch = self.batches[m]
        if not reads:
            x, leaf = self.model.embedded_batch(batch), None
        else:
            # one tensor from the stage before, or the vocabulary shards' parts of the embedding
            x = reads[0] if len(reads) == 1 else torch.stack(list(reads)).sum(0)
            leaf = x = x.detach().requires_grad_(training)
        if training and m not in self.seen and self.model.loads is not None:
            self.seen[m] = self.model.loads.seen(batch)
        if m not in self.ropes:
            self.ropes[m] = self.model.shared(batch, x.dtype)
        if a.stage == self.table.paths[m][0]:
            x = self.model.entered(x, self.ropes[m])
        return StageInput(
            x, leaf, self.ropes[m], self.seen.get(m) if training else None
        )

    def _stage_output(self, a: Action, x: Any) -> T:
        """Return the output of a stage, given that of its layers; on the last stage this is the loss."""
        if a.stage != self.table.paths[a.microbatch][-1]:
            return self.model.packed(x)
        x = self.model.norm(self.model.settled(x))
        if self.here.output is None:
            x = self.model.loss(x, self.batches[a.microbatch], self.hooks)
            x = x / self.total()
            self.losses[a.microbatch] = x.detach()
        return x

    def _backward(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        *grads, (leaf, y, tape) = reads
        if y.requires_grad:  # not so of a first stage in which nothing learns
            torch.autograd.backward(y, grads[0] if grads else None)
        values = {"grad": leaf.grad if leaf is not None else None, "tape": tape}
        return [values[value.name] for value in a.writes]

    def _weights(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        run_tape(reads[0])
        return []

    def _then_fold(self, op: Op) -> Op:
        """Return ``op`` followed by adding up its gradients in the wide type.

        The progress of the step is reported as passes: the share of this rank's backward actions that are done.
        """

        def folded(a: Action, reads: Sequence[Any]) -> Sequence[Any]:
            results = op(a, reads)
            for unit in self.here.units_of(a.stage):
                unit.fold()
            self.behind += a.declared.duties.input_gradient
            if self.hooks.passed is not None and self.backwards:
                count = len(self.batches)
                self.hooks.passed(self.behind * count // self.backwards, count)
            return results

        return folded

    def _at_point(self, op: Op) -> Op:
        """Return ``op`` with the parameters of the microbatch's point."""

        def shown(a: Action, reads: Sequence[Any]) -> Sequence[Any]:
            for unit in self.here.units_of(a.stage):
                unit.show(a.microbatch * len(self.points) // len(self.batches))
            return op(a, reads)

        return shown

    def _last_uses(self) -> dict[tuple[str, Unit], Action]:
        """Return the last action of each inserted kind for every unit that is updated early."""
        if self.early is None:
            return {}
        return {
            (a.kind, unit): a
            for a in self.actions
            if a.kind in (FETCH, GATHER, REDUCE)
            for unit in self.here.units_of(a.stage)
            if unit in self.early.units
        }

    def _gather(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        self.here.live.add(a.stage)
        for unit in self.here.units_of(a.stage):
            self.here.visit(unit)
            updated = self.lasts.get((GATHER, unit)) is a
            if not unit.live and (updated or id(a) in self.turns.again):
                unit.keep(updated)  # for the update, or for backward
            if self.points and not unit.live:
                unit.gather_at(self.points)
            unit.gather_for_pass()
        return []

    def _fetch(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        for unit in self.here.units_of(a.stage):
            if not unit.live:
                self.here.fetch(unit)
            if self.lasts.get((FETCH, unit)) is a:
                self.tiers.fetch(unit, "moments")
        return []

    def _release(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        self.here.live.discard(a.stage)
        drop = self.mesh.layout.zero == 3 or self.here.streamed
        for stages, unit in self.here.users:
            if a.stage in stages and not stages & self.here.live:
                unit.release(drop)
        return []

    def _reduce(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        for unit in self.here.units_of(a.stage):
            unit.reduce()
            if self.early is not None and self.lasts.get((REDUCE, unit)) is a:
                sum_over_replicas([unit], self.mesh)
                self.summed.add(unit)
                if a.stage in self.turns.first:
                    self.tiers.keep(unit, "weights")  # for the next step
                self.early.update(unit)
        return []
