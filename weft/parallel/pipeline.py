"""A model over pipeline stages: which rank holds what, and the operations that a schedule's actions run."""

import sys
import weakref
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from weft.data.batch import Batch
from weft.layout.mesh import Mesh
from weft.memory.on_device import OnDevice
from weft.models.fused import ImmediateTape, Tape, deferred, run_tape
from weft.models.rope import angles
from weft.models.router import RouterPass
from weft.models.transformer import Block, Transformer
from weft.net.groups import new_group
from weft.parallel.overlap import LayerPass, layer_ops, layer_stages, with_turns
from weft.parallel.state import Held, State, Unit
from weft.parallel.units import Full, TableUnit, sum_over_replicas
from weft.parallel.vocabulary import OutputShard
from weft.recipe import ModelShape
from weft.schedule.actions import Action, Table, Value, forward_half
from weft.schedule.execute import Executed, Op, execute
from weft.schedule.kinds import Duty, kind_of
from weft.schedule.lower import FETCH, GATHER, REDUCE, RELEASE, links
from weft.schedule.stages import assign_stages, make_table
from weft.schedule.validate import validate
from weft.schedule.vocab import share_stage
from weft.schedule.wire import Wire

T = torch.Tensor

#: What stands in the place of a parameter's rows.
Point = Callable[[Held], T]

#: So many stages' weights stay between a step's end and the next one's begin, and one less where forward ends.
KEPT = 2


class EarlyUpdates(NamedTuple):
    """Units to be updated during backward, and what does it when the gradient of one is complete."""

    units: Container[Unit]
    update: Callable[[TableUnit], None]


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


class Pipeline:
    """One rank's part of a pipelined model, and its schedules by number of microbatches."""

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        loss_chunk: int,
        seq_len: int,
        timeout: float,
    ) -> None:
        self.mesh, self.layout, self.shape = mesh, mesh.layout, shape
        self.rank, self.seq_len = mesh.rank("pp"), seq_len
        table = make_table(self.layout, 2 * mesh.size("pp"), shape, seq_len)
        self.cut = self.stages = assign_stages(
            shape, mesh.layout, table.stages, seq_len
        )
        if self.layout.overlap:
            table, self.stages = (
                with_turns(table, self.cut, self.layout),
                layer_stages(self.cut),
            )
        self.held = table.held(self.rank)
        self.holders = [table.holders(s) for s in range(table.stages)]
        layers = {i for s in self.held for i in self.stages[s].layers}
        self.model = Transformer(shape, mesh, loss_chunk, layers, self._ends(self.held))
        self.timeout = timeout
        self.units: list[TableUnit] = []
        self.tables: dict[tuple[int, bool], Table] = {}
        self.batches: Sequence[Batch] = ()
        self.total: Callable[[], T] = lambda: torch.ones(())
        self.ropes: dict[int, tuple[T, ...]] = {}
        self.seen: dict[int, RouterPass] = {}
        self.losses: dict[int, T] = {}  # by microbatch
        # of this rank in the present table, and how many of them are done
        self.backward: list[Action] = []
        self.behind = 0
        self.points: Sequence[Point] = ()
        self.visit: Callable[[Unit], None] = lambda unit: None
        self.fetch: Callable[[Unit], None] = lambda unit: None
        self.early: EarlyUpdates | None = None
        # the last of a kind for each unit that is updated early
        self.lasts: dict[tuple[str, Unit], Action] = {}
        self.turns = Turns(frozenset(), frozenset())
        self.summed: set[TableUnit] = set()  # over the replicas, by now
        self.last: Executed | None = None
        self.wire: Wire | None = None

    def _ends(self, held: Sequence[int]) -> set[str]:
        """The model's ends that a rank with these stages has."""
        ends = {"embedding"} if any(self.stages[s].embedding for s in held) else set()
        if any(self.stages[s].head for s in held):
            ends |= {"norm", "head"}
        if self.layout.vocab_barriers:
            ends |= {"embedding", "head"} | (
                {"norm"} if len(self.stages) - 1 in held else set()
            )
        return ends

    def start(self, compute: torch.dtype, tiers: OnDevice) -> State:
        """Take over the model's parameters, which are on the device by now, and connect to the other ranks.

        ``tiers``: where the state rests. Returns the state.
        """
        self.tiers, self.streamed = tiers, tiers.places.get("weights") == "file"
        described = dict(self.model.logical_parameters())
        used: dict[
            tuple[frozenset[int], bool, torch.dtype, tuple[str, str], bool], list[Full]
        ] = {}
        shared: dict[tuple[int, ...], list[str]] = {}
        whole = []
        for name, parameter in self.model.named_parameters():
            copies = self._copies(name)
            placement = self.mesh.place.hold(described[name], copies)
            if described[name].everywhere:
                whole.append(
                    Held(
                        name, described[name], placement, parameter.detach(), parameter
                    )
                )
                continue
            dtype = compute if parameter.is_floating_point() else parameter.dtype
            sharing = self.mesh.sharing(described[name])
            # What other stages have, too, is summed over them last of all, and is a unit of its own.
            alike = (
                frozenset(self._users(name)),
                parameter.requires_grad,
                dtype,
                sharing,
                len(copies) > 1,
            )
            used.setdefault(alike, []).append(
                Full(name, described[name], parameter, placement)
            )
            if len(copies) > 1 and parameter.requires_grad:
                shared.setdefault(copies, []).append(name)
        # of their first use
        in_order = sorted(used.items(), key=lambda item: min(item[0][0]))
        self.users = [
            (stages, TableUnit(named, self.mesh, dtype, tiers))
            for (stages, _, dtype, *_), named in in_order
        ]
        self.units = [unit for _, unit in self.users]
        self.compute = compute
        # The model holds its pipeline; a circle would keep process groups, and gloo's threads, until it is collected.
        self.model = cast(Transformer, weakref.proxy(self.model))
        self.output = (
            OutputShard(self.model, self.mesh) if self.layout.vocab_barriers else None
        )
        self.live: set[int] = set()
        if self.mesh.size("pp") > 1:
            self.wire = Wire(
                self.mesh.group("pp"), self.mesh.device, self.timeout, self._spec
            )
        # Parameters on several ranks of the pipeline (tied embedding, DualPipe): their gradients are summed over them.
        mine = dist.get_process_group_ranks(self.mesh.group("pp")) if self.wire else [0]
        groups = {
            ranks: new_group([mine[r] for r in ranks], "copies of a parameter")
            for ranks in sorted(shared)
        }
        units: list[Unit] = [*self.units, *([Unit(whole)] if whole else [])]
        state = State(
            units, {groups[ranks]: sorted(names) for ranks, names in shared.items()}
        )
        state.tiers = tiers
        self.visit, self.fetch = state.visit, state.fetch
        return state

    def _stages_with(self, name: str) -> list[int]:
        """The stages, on any rank, that compute with parameter ``name`` (not one of the vocabulary shares')."""
        kind, _, rest = name.partition(".")
        if kind == "blocks":
            return [
                s
                for s, stage in enumerate(self.stages)
                if int(rest.partition(".")[0]) in stage.layers
            ]
        if kind == "norm":
            return [len(self.stages) - 1]
        table, head = (
            kind == "embedding",
            kind in ("head", "outputs") or self.shape.tied,
        )
        return [
            s
            for s, stage in enumerate(self.stages)
            if (table and stage.embedding) or (head and stage.head)
        ]

    def _of_vocabulary(self, name: str) -> bool:
        return bool(self.layout.vocab_barriers) and name.startswith(
            ("embedding", "head")
        )

    def _users(self, name: str) -> list[int]:
        """The stages on this rank that compute with parameter ``name``: of a share of the vocabulary, a virtual one."""
        if self._of_vocabulary(name):
            return [share_stage(len(self.stages), self.rank)]
        return [s for s in self._stages_with(name) if s in self.held]

    def _copies(self, name: str) -> tuple[int, ...]:
        """The ranks along ``pp`` that hold parameter ``name``."""
        if self._of_vocabulary(name):
            return (self.rank,)
        return tuple(
            sorted({r for s in self._stages_with(name) for r in self.holders[s]})
        )

    def built(self, microbatches: int) -> Table:
        table = make_table(self.layout, microbatches, self.shape, self.seq_len)
        return (
            with_turns(table, self.cut, self.layout) if self.layout.overlap else table
        )

    def whole(self, microbatches: int) -> Table:
        """As :meth:`built`, with no stage skipped."""
        return make_table(
            self.layout.model_copy(update={"skip": 0.0}),
            microbatches,
            self.shape,
            self.seq_len,
        )

    def table(self, microbatches: int, forward_only: bool = False) -> Table:
        """The lowered schedule for this many microbatches, validated once."""
        key = (microbatches, forward_only)
        if key not in self.tables:
            # Evaluation is of the whole model: nothing is skipped.
            whole = self.built if self.layout.overlap else self.whole
            built = (
                self.built(microbatches)
                if not forward_only
                else forward_half(whole(microbatches))
            )
            # What is not cut needs no gathering.
            zero = self.layout.zero if self.mesh.size("shard", "cp") > 1 else 1
            self.tables[key] = validate(built, zero=zero, streamed=self.streamed)
            if self.wire is not None:
                self.wire.connect(links(self.tables[key]))
        return self.tables[key]

    def accumulate(self, batches: Sequence[Batch], total: Callable[[], T]) -> T:
        """Forward and backward of every microbatch. Returns this rank's share of the mean loss, equal on ``tp``.

        ``total``: the weight of the step's labels, asked for when the first loss is due.
        """
        self._run(self.table(len(batches)), batches, total)
        sum_over_replicas(
            [unit for unit in self.units if unit not in self.summed], self.mesh
        )
        return self._share()

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> T:
        """This rank's share of the sum of the losses of some microbatches."""
        self._run(
            self.table(len(batches), forward_only=True),
            batches,
            lambda: torch.ones((), device=self.mesh.device),
        )
        return self._share()

    @torch.no_grad()
    def evaluate_at(self, points: Sequence[Point], batches: Sequence[Batch]) -> list[T]:
        """The same at several points, for which what rests in a tier is brought in once: the share of each.

        A point is what stands in the place of every parameter's rows.
        """
        self.points = points
        try:
            self.evaluate([batch for _ in points for batch in batches])
        finally:
            self.points = ()
        return [
            self._share(range(i * len(batches), (i + 1) * len(batches)))
            for i in range(len(points))
        ]

    def _share(self, microbatches: Container[int] = range(sys.maxsize)) -> T:
        found = [loss for m, loss in self.losses.items() if m in microbatches]
        # Added up as without stages, to the last bit.
        return torch.stack(
            found or [torch.zeros((), dtype=torch.float64, device=self.mesh.device)]
        ).sum()

    def _run(
        self, table: Table, batches: Sequence[Batch], total: Callable[[], T]
    ) -> None:
        self.batches, self.total = [b.to(self.mesh.device) for b in batches], total
        self.losses, self.ropes, self.seen = {}, {}, {}
        self.lasts, self.summed = self._last_uses(table), set()
        gathers = [a for a in table.ranks[self.rank] if a.kind == GATHER]
        self.turns = turns(gathers, self._weights_of, self.tiers.room)
        self.tiers.restart()
        self.backward = [
            a for a in table.ranks[self.rank] if Duty.INPUT_GRADIENT in a.declared.duty
        ]
        self.behind = 0
        ops = self._ops(table)
        self.last = execute(table, self.rank, ops, self.wire)
        for unit in self.units:
            unit.forget_near()

    def _ops(self, table: Table) -> dict[str, Op]:
        # Where weight gradients are an action of their own, what they need goes on a tape.
        split = {
            (a.stage, a.microbatch)
            for a in table.ranks[self.rank]
            if a.declared.duty is Duty.WEIGHT_GRADIENT
        }
        ops: dict[str, Op] = {
            "F": partial(self._forward, table, split),
            "B": self._backward,
            "I": self._backward,
            "W": self._weights,
        }
        if self.layout.overlap:
            ops = {"W": self._weights} | layer_ops(
                partial(self._pass_of, table, split), table, self.rank
            )
        if self.output is not None:
            ops |= self.output.ops(self.batches, self.total, self.losses)
        ops = {
            kind: op if kind_of(kind).forward else self._then_fold(op)
            for kind, op in ops.items()
        }
        ops = (
            {kind: self._at_point(op) for kind, op in ops.items()}
            if self.points
            else ops
        )
        return ops | {
            GATHER: self._gather,
            RELEASE: self._release,
            REDUCE: self._reduce,
            FETCH: self._fetch,
        }

    def _forward(
        self, table: Table, split: set[tuple[int, int]], a: Action, reads: Sequence[Any]
    ) -> list[Any]:
        batch, tape = self.batches[a.microbatch], self._tape(split, a)
        with deferred(tape):
            x, leaf, rope, seen = self._entered(a, reads)
            for i in self.stages[a.stage].layers:
                x = self.model.run_block(i, x, rope, batch.cu_seqlens, seen)
            x = self._ended(table, a, x)
        made = {"act": x.detach(), "saved": (leaf, x, tape)}
        return [made[value.name] for value in a.writes]

    def _pass_of(
        self, table: Table, split: set[tuple[int, int]], a: Action, reads: Sequence[T]
    ) -> LayerPass:
        """A microbatch's pass through the one layer of a stage, of which nothing has been run."""
        x, leaf, rope, seen = self._entered(a, reads)
        (layer,) = self.stages[a.stage].layers
        block = cast(Block, self.model.blocks[str(layer)])
        steps = block.steps(x, rope, self.batches[a.microbatch].cu_seqlens, seen)
        return LayerPass(
            steps, leaf, self._tape(split, a), partial(self._ended, table, a)
        )

    def _tape(self, split: set[tuple[int, int]], a: Action) -> Tape | None:
        """What a stage's projections leave weights' gradients on; None without gradients."""
        # A lone rank adds weight gradients up as one does without stages, so that tiers change no bit.
        whole = ImmediateTape() if self.wire else None
        return (
            ([] if (a.stage, a.microbatch) in split else whole)
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

    def _ended(self, table: Table, a: Action, x: T) -> T:
        """A stage's output, given that of its layers: of the last one the loss."""
        if a.stage != table.paths[a.microbatch][-1]:
            return x
        x = self.model.norm(x)
        if self.output is None:
            x = self.model.loss(x, self.batches[a.microbatch]) / self.total()
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
            if self.model.passed is not None and self.backward:
                self.model.passed(
                    self.behind * len(self.batches) // len(self.backward),
                    len(self.batches),
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
        return [unit for stages, unit in self.users if stage in stages]

    def _weights_of(self, stage: int) -> int:
        """Bytes of a stage's weights that rest in a file."""
        return sum(self.tiers.size(unit, "weights") for unit in self._units_of(stage))

    def _last_uses(self, table: Table) -> dict[tuple[str, Unit], Action]:
        """The last action of each inserted kind for every unit that is updated early."""
        if self.early is None:
            return {}
        found: dict[tuple[str, Unit], Action] = {}
        for a in table.ranks[self.rank]:
            if a.kind in (FETCH, GATHER, REDUCE):
                found |= {
                    (a.kind, unit): a
                    for unit in self._units_of(a.stage)
                    if unit in self.early.units
                }
        return found

    def _gather(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        self.live.add(a.stage)
        for unit in self._units_of(a.stage):
            self.visit(unit)
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
                self.fetch(unit)
            if self.lasts.get((FETCH, unit)) is a:
                self.tiers.fetch(unit, "moments")
        return []

    def _release(self, a: Action, reads: Sequence[Any]) -> list[Any]:
        self.live.discard(a.stage)
        still_used = {unit for stage in self.live for unit in self._units_of(stage)}
        for unit in self._units_of(a.stage):
            if unit not in still_used:
                unit.release(drop=self.layout.zero == 3 or self.streamed)
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

    def _spec(self, value: Value) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
        """Activations and their gradients are ``[rows, seq/cp/tp, embed]``, which every rank of the pipeline knows."""
        if value.name not in ("act", "grad"):
            return None
        rows, length = self.batches[value.microbatch].tokens.shape
        return [
            ((rows, length // self.mesh.size("tp"), self.shape.embed), self.compute)
        ]
