"""A model over pipeline stages: this rank's parameters in units, and its schedules."""

import sys
import weakref
from collections.abc import Callable, Container, Sequence
from typing import cast

import torch
import torch.distributed as dist

from weft.data.batch import Batch
from weft.layout.mesh import Mesh
from weft.memory.on_device import OnDevice
from weft.models.hooks import EarlyUpdates, Hooks
from weft.models.transformer import Transformer
from weft.net.groups import new_group
from weft.parallel.held_stages import hold_stages
from weft.parallel.pipeline_pass import PipelinePass, Point
from weft.parallel.state import Held, State, Unit
from weft.parallel.units import Full, TableUnit, sum_over_replicas
from weft.parallel.vocabulary import OutputShard
from weft.recipe import ModelShape
from weft.schedule.actions import Table, Value, forward_half
from weft.schedule.execute import Executed
from weft.schedule.lower import links
from weft.schedule.pipeline_wire import Wire
from weft.schedule.validate import validate

T = torch.Tensor


class Pipeline:
    """One rank's part of a pipelined model, and its schedules by number of microbatches."""

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        loss_chunk: int,
        seq_len: int,
        timeout: float,
        hooks: Hooks,
    ) -> None:
        self.mesh, self.rank, self.timeout = mesh, mesh.rank("pp"), timeout
        self.place = hold_stages(shape, mesh, seq_len)
        self.model = Transformer(
            shape, mesh, loss_chunk, self.place.layers, self.place.ends, hooks, self
        )
        self.units: list[TableUnit] = []
        self.tables: dict[tuple[int, bool], Table] = {}
        self.visit: Callable[[Unit], None] = lambda unit: None
        self.fetch: Callable[[Unit], None] = lambda unit: None
        self.live: set[int] = set()  # stages whose weights are gathered
        self.present: PipelinePass | None = None
        self.last: Executed | None = None
        self.wire: Wire | None = None

    def start(
        self, compute: torch.dtype, tiers: OnDevice, make: Callable[..., State]
    ) -> State:
        """Take over the model's parameters, which are on the device by now, and connect to the other ranks.

        ``tiers``: where the state rests. Returns the state, made by ``make``.
        """
        self.tiers, self.streamed = tiers, tiers.places.get("weights") == "file"
        described = dict(self.model.logical_parameters())
        used: dict[
            tuple[frozenset[int], bool, torch.dtype, tuple[str, str], bool], list[Full]
        ] = {}
        shared: dict[tuple[int, ...], list[str]] = {}
        whole = []
        for name, parameter in self.model.named_parameters():
            copies = self.place.copies(name)
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
                frozenset(self.place.users(name)),
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
            OutputShard(self.model, self.mesh)
            if self.mesh.layout.vocab_barriers
            else None
        )
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
        state = make(
            units, {groups[ranks]: sorted(names) for ranks, names in shared.items()}
        )
        self.visit, self.fetch = state.visit, state.fetch
        return state

    def table(self, microbatches: int, forward_only: bool = False) -> Table:
        """The lowered schedule for this many microbatches, validated once."""
        key = (microbatches, forward_only)
        if key not in self.tables:
            # Evaluation is of the whole model: nothing is skipped.
            built = self.place.table(microbatches, skipping=not forward_only)
            # What is not cut needs no gathering.
            zero = self.mesh.layout.zero if self.mesh.size("shard", "cp") > 1 else 1
            self.tables[key] = validate(
                forward_half(built) if forward_only else built,
                zero=zero,
                streamed=self.streamed,
            )
            if self.wire is not None:
                self.wire.connect(links(self.tables[key]))
        return self.tables[key]

    def accumulate(
        self,
        batches: Sequence[Batch],
        total: Callable[[], T],
        early: EarlyUpdates | None = None,
    ) -> T:
        """Forward and backward of every microbatch. Returns this rank's share of the mean loss, equal on ``tp``.

        ``total``: the weight of the step's labels, asked for when the first loss is due. ``early``: units to update
        meanwhile.
        """
        passed = self._run(self.table(len(batches)), batches, total, early=early)
        sum_over_replicas(
            [unit for unit in self.units if unit not in passed.summed], self.mesh
        )
        return self._share(passed)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], hooks: Hooks | None = None) -> T:
        """This rank's share of the sum of the losses of some microbatches; ``hooks`` in the place of the model's."""
        return self._share(self._evaluated(batches, (), hooks))

    @torch.no_grad()
    def evaluate_at(self, points: Sequence[Point], batches: Sequence[Batch]) -> list[T]:
        """The same at several points, for which what rests in a tier is brought in once: the share of each.

        A point is what stands in the place of every parameter's rows.
        """
        passed = self._evaluated([b for _ in points for b in batches], points)
        count = len(batches)
        return [
            self._share(passed, range(i * count, (i + 1) * count))
            for i in range(len(points))
        ]

    def _evaluated(
        self,
        batches: Sequence[Batch],
        points: Sequence[Point],
        hooks: Hooks | None = None,
    ) -> PipelinePass:
        table = self.table(len(batches), forward_only=True)
        ones = torch.ones((), device=self.mesh.device)
        return self._run(table, batches, lambda: ones, points, hooks)

    def _run(
        self, table: Table, batches: Sequence[Batch], total: Callable[[], T],
        points: Sequence[Point] = (), hooks: Hooks | None = None, early: EarlyUpdates | None = None,
    ) -> PipelinePass:  # fmt: skip
        passed = PipelinePass(self, table, batches, total, points, hooks, early)
        self.present = passed
        try:
            self.last = passed.run()
        finally:
            self.present = None
        return passed

    def _share(
        self, passed: PipelinePass, microbatches: Container[int] = range(sys.maxsize)
    ) -> T:
        losses = [loss for m, loss in passed.losses.items() if m in microbatches]
        # Added up as without stages, to the last bit.
        nothing = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        return torch.stack(losses or [nothing]).sum()

    def _spec(self, value: Value) -> list[tuple[tuple[int, ...], torch.dtype]] | None:
        """Activations and their gradients are ``[rows, seq/cp/tp, embed]``, which every rank of the pipeline knows."""
        if value.name not in ("act", "grad"):
            return None
        assert self.present is not None  # values travel while it runs
        rows, length = self.present.batches[value.microbatch].tokens.shape
        embed = self.place.shape.embed
        return [((rows, length // self.mesh.size("tp"), embed), self.compute)]
