"""The passes of a pipeline through one table: the operations that its actions run on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from weft.data.batch import Batch
from weft.models.fused import ImmediateTape, Tape, deferred, run_tape
from weft.models.hooks import EarlyUpdates, Hooks
from weft.models.rope import angles
from weft.models.router import RouterPass
from weft.models.transformer import Block
from weft.parallel.overlap import LayerPass, layer_ops
from weft.parallel.state import Held, Unit
from weft.parallel.units import TableUnit, sum_over_replicas
from weft.schedule.actions import Action, Table
from weft.schedule.execute import Executed, Op, execute
from weft.schedule.kinds import Duty, kind_of
from weft.schedule.lower import FETCH, GATHER, REDUCE, RELEASE

if TYPE_CHECKING:
    from weft.parallel.pipeline import Pipeline

T = torch.Tensor

#: What stands in the place of a parameter's rows.
Point = Callable[[Held], T]

#: So many stages' weights stay between a step's end and the next one's begin, and one less where forward ends.
KEPT = 2


class Turns(NamedTuple):
    """Where a stage's weights need not leave: they are gathered ``again`` soon, by the gather's id, or ``first``."""

    again: frozenset[int]
    first: frozenset[int]


def turns(gathers: Sequence[Action], size_of: Callable[[int], int], room: int) -> Turns:
    """Of a rank's gathers in their order: those of a stage that is the next but one, and the first stages.

    Of those that come again later, the soonest stay as well, as many as have ``room``; ``size_of`` a stage, in bytes.
    """
    last: dict[int, int] = {}
    waits = []  # how many gathers a stage would stay for, and the one before them
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


class PipelinePass:
    """One execution of a table by this rank's part of a ``pipeline``: what it computes with, and how far it is.

    ``total``: the weight of the step's labels, asked for when the first loss is due. With ``points``, microbatches are
    computed at each of them in turn, with gradients of none. ``hooks``: in the place of the model's own.
    """

    def __init__(
        self, pipeline: Pipeline, table: Table, batches: Sequence[Batch], total: Callable[[], T],
        points: Sequence[Point], hooks: Hooks | None, early: EarlyUpdates | None,
    ) -> None:  # fmt: skip
        self.pipeline, self.table = pipeline, table
        self.total, self.points = total, points
        self.model, self.mesh = pipeline.model, pipeline.mesh
        self.tiers = pipeline.tiers
        self.early, self.output = early, pipeline.output
        self.hooks = hooks or self.model.hooks
        self.batches = [batch.to(self.mesh.device) for batch in batches]
        self.actions = table.ranks[pipeline.rank]
        self.losses: dict[int, T] = {}  # by microbatch
        self.ropes: dict[int, tuple[T, ...]] = {}
        self.seen: dict[int, RouterPass] = {}
        # the last of a kind for each unit that is updated early
        self.lasts = self._last_uses()
        self.summed: set[TableUnit] = set()  # over the replicas, by now
        gathers = [a for a in self.actions if a.kind == GATHER]
        self.turns = turns(gathers, self._weights_of, self.tiers.room)
        # how many actions of this rank give an input's gradient, and how many of them are done
        self.backwards = sum(
            Duty.INPUT_GRADIENT in a.declared.duty for a in self.actions
        )
        self.behind = 0
        # Where weight gradients are an action of their own, what they need goes on a tape.
        self.split = {
            (a.stage, a.microbatch)
            for a in self.actions
            if a.declared.duty is Duty.WEIGHT_GRADIENT
        }

    def run(self) -> Executed:
        self.tiers.restart()
        executed = execute(
            self.table, self.pipeline.rank, self._ops(), self.pipeline.wire
        )
        for unit in self.pipeline.units:
            unit.forget_near()
        return executed

    def _ops(self) -> dict[str, Op]:
        ops: dict[str, Op] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward,
            "W": self._weights,
        }
        if self.mesh.layout.overlap:
            ops = {"W": self._weights} | layer_ops(
                self._pass_of, self.table, self.pipeline.rank
            )
        if self.output is not None:
            ops |= self.output.ops(
                self.batches, self.total, self.losses, self.hooks.objective
            )
        ops = {
            kind: op if kind_of(kind).forward else self._then_fold(op)
            for kind, op in ops.items()
        }
        if self.points:
            ops = {kind: self._at_point(op) for kind, op in ops.items()}
        return ops | {
            GATHER: self._gather,
            RELEASE: self._release,
            REDUCE: self._reduce,
            FETCH: self._fetch,
        }

    def _forward(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        batch, tape = self.batches[a.microbatch], self._tape(a)
        with deferred(tape):
            x, leaf, rope, seen = self._entered(a, reads)
            for i in self.pipeline.place.stages[a.stage].layers:
                x = self.model.run_block(i, x, rope, batch.cu_seqlens, seen)
            x = self._ended(a, x)
        made = {"act": x.detach(), "saved": (leaf, x, tape)}
        return [made[value.name] for value in a.writes]

    def _pass_of(self, a: Action, reads: Sequence[T]) -> LayerPass:
        """A microbatch's pass through the one layer of a stage, of which nothing has been run."""
        x, leaf, rope, seen = self._entered(a, reads)
        (layer,) = self.pipeline.place.stages[a.stage].layers
        block = cast(Block, self.model.blocks[str(layer)])
        steps = block.steps(x, rope, self.batches[a.microbatch].cu_seqlens, seen)
        return LayerPass(steps, leaf, self._tape(a), partial(self._ended, a))

    def _tape(self, a: Action) -> Tape | None:
        """What a stage's projections leave weights' gradients on; None without gradients."""
        # A lone rank adds weight gradients up as one does without stages, so that tiers change no bit.
        whole = ImmediateTape() if self.pipeline.wire else None
        return (
            ([] if (a.stage, a.microbatch) in self.split else whole)
            if torch.is_grad_enabled()
            else None
        )

    def _entered(
        self, a: Action, reads: Sequence[Any]
    ) -> tuple[T, T | None, tuple[T, ...], RouterPass | None]:
        """What a stage computes with: its input, also as the leaf that this is, angles, and what routers count in."""
        batch, training = self.batches[a.microbatch], torch.is_grad_enabled()
        if not reads:
            x, leaf = self.model.embedding(batch.tokens), None
        else:  # one tensor from the stage before, or the vocabulary shards' parts of the embedding
            x = reads[0] if len(reads) == 1 else torch.stack(list(reads)).sum(0)
            leaf = x = x.detach().requires_grad_(training)
        seen = self._seen(a.microbatch, batch) if training else None
        return x, leaf, self._rope(a.microbatch, batch, x.dtype), seen

    def _ended(self, a: Action, x: T) -> T:
        """A stage's output, given that of its layers: of the last one the loss."""
        if a.stage != self.table.paths[a.microbatch][-1]:
            return x
        x = self.model.norm(x)
        if self.output is None:
            x = self.model.loss(x, self.batches[a.microbatch], self.hooks)
            x = x / self.total()
            self.losses[a.microbatch] = x.detach()
        return x

    def _rope(self, microbatch: int, batch: Batch, dtype: torch.dtype) -> tuple[T, ...]:
        if microbatch not in self.ropes:
            self.ropes[microbatch] = angles(
                batch.positions, self.model.freq, dtype, batch.draws
            )
        return self.ropes[microbatch]

    def _seen(self, microbatch: int, batch: Batch) -> RouterPass | None:
        if microbatch not in self.seen and self.model.loads is not None:
            self.seen[microbatch] = self.model.loads.seen(batch)
        return self.seen.get(microbatch)

    def _backward(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        *grads, (leaf, y, tape) = reads
        if y.requires_grad:  # not so of a first stage in which nothing learns
            torch.autograd.backward(y, grads[0] if grads else None)
        made = {"grad": leaf.grad if leaf is not None else None, "tape": tape}
        return [made[value.name] for value in a.writes]

    def _weights(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        run_tape(reads[0])
        return []

    def _then_fold(self, op: Op) -> Op:
        """``op``, after which the gradients that it leaves behind are added up in the wide type.

        What is done of the step is passed on as passes: the share of this rank's actions that is behind it.
        """

        def folded(a: Action, reads: Sequence[Any]) -> Sequence[Any]:
            made = op(a, reads)
            for unit in self._units_of(a.stage):
                unit.fold()
            self.behind += Duty.INPUT_GRADIENT in a.declared.duty
            if self.hooks.passed is not None and self.backwards:
                self.hooks.passed(
                    self.behind * len(self.batches) // self.backwards, len(self.batches)
                )
            return made

        return folded

    def _at_point(self, op: Op) -> Op:
        """``op`` with the parameters of the point that the microbatch is for."""

        def shown(a: Action, reads: Sequence[Any]) -> Sequence[Any]:
            for unit in self._units_of(a.stage):
                unit.show(a.microbatch * len(self.points) // len(self.batches))
            return op(a, reads)

        return shown

    def _units_of(self, stage: int) -> list[TableUnit]:
        """The units whose parameters ``stage`` computes with."""
        return [unit for stages, unit in self.pipeline.users if stage in stages]

    def _weights_of(self, stage: int) -> int:
        """Bytes of a stage's weights that rest in a file."""
        return sum(self.tiers.size(unit, "weights") for unit in self._units_of(stage))

    def _last_uses(self) -> dict[tuple[str, Unit], Action]:
        """The last action of each inserted kind for every unit that is updated early."""
        if self.early is None:
            return {}
        found: dict[tuple[str, Unit], Action] = {}
        for a in self.actions:
            if a.kind in (FETCH, GATHER, REDUCE):
                found |= {
                    (a.kind, unit): a
                    for unit in self._units_of(a.stage)
                    if unit in self.early.units
                }
        return found

    def _gather(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        self.pipeline.live.add(a.stage)
        for unit in self._units_of(a.stage):
            self.pipeline.visit(unit)
            if not unit.live and (
                self.lasts.get((GATHER, unit)) is a or id(a) in self.turns.again
            ):
                self.tiers.keep(unit, "weights")  # for the update, or for backward
            if self.points and not unit.live:
                unit.gather_at(self.points)
            unit.gather()
        return []

    def _fetch(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        for unit in self._units_of(a.stage):
            if not unit.live:
                self.pipeline.fetch(unit)
            if self.lasts.get((FETCH, unit)) is a:
                self.tiers.fetch(unit, "moments")
        return []

    def _release(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        self.pipeline.live.discard(a.stage)
        still_used = {
            unit for stage in self.pipeline.live for unit in self._units_of(stage)
        }
        for unit in self._units_of(a.stage):
            if unit not in still_used:
                unit.release(drop=self.mesh.layout.zero == 3 or self.pipeline.streamed)
        return []

    def _reduce(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        for unit in self._units_of(a.stage):
            unit.reduce()
            if self.early is not None and self.lasts.get((REDUCE, unit)) is a:
                sum_over_replicas([unit], self.mesh)
                self.summed.add(unit)
                if a.stage in self.turns.first:
                    self.tiers.keep(unit, "weights")  # for the next step
                self.early.update(unit)
        return []
