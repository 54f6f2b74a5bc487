"""A model over pipeline stages: this rank's parameters in units, and its schedules."""

import sys
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from weft.data.batch import Batch
from weft.layout.mesh import Mesh
from weft.memory.on_device import OnDevice
from weft.models.hooks import EarlyUpdates, Hooks
from weft.models.transformer import Transformer, model_class
from weft.net.groups import new_group
from weft.parallel.held_stages import hold_stages
from weft.parallel.pipeline_pass import PipelinePass, PipelineRank, Point
from weft.parallel.state import Held, State, Unit
from weft.parallel.units import Full, TableUnit, sum_over_replicas
from weft.parallel.vocabulary import OutputShard
from weft.recipe import Memory, ModelShape
from weft.schedule.actions import Table, Value, forward_half
from weft.schedule.execute import Executed
from weft.schedule.lower import links
from weft.schedule.pipeline_wire import Wire
from weft.schedule.validate import validate

T = torch.Tensor


class Pipeline:
    """A rank's part of a pipelined model, and its schedules by number of microbatches.

    Call :meth:`start` before any other method. ``shape``: the model; ``mesh``: the layout over ranks; ``loss_chunk``:
    tokens whose logits are in memory at once; ``seq_len``: tokens of a sequence; ``timeout``: seconds to wait for
    another stage; ``hooks``: functions that are called during forward and backward, such as the loss. ``last``
    (attribute): measurements of the latest pass.
    """

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        loss_chunk: int,
        seq_len: int,
        timeout: float,
        hooks: Hooks,
    ) -> None:
        self.mesh, self.timeout = mesh, timeout
        self.place = hold_stages(shape, mesh, seq_len)
        self.model = model_class(shape)(
            shape, mesh, loss_chunk, self.place.layers, self.place.ends, hooks, self
        )
        self.tables: dict[tuple[int, bool], Table] = {}
        self.present: PipelinePass | None = None
        self.last: Executed | None = None

    def start(
        self, compute: torch.dtype, tiers: OnDevice, make: Callable[..., State],
        memory: Memory,
    ) -> State:  # fmt: skip
        """Take over the model's parameters, connect to the other ranks of the pipeline, and return the state.

        The parameters must be allocated on the device. ``compute``: data type in which parameters compute; ``tiers``:
        where the state rests; ``make``: function that builds the state from units, and from the names of those
        parameters that several ranks of the pipeline hold. ``memory``: which experts and rows a pass brings, and into
        how many tiles the weights of projections are cut.
        """
        experts, tiles = memory.experts, memory.tiles
        if experts == "chosen":
            from weft.parallel.experts.chosen import ChosenExperts, listen_to_routers
        in_tiles = set[str]()
        if tiles > 1:
            from weft.parallel.tiles import TiledWeight, put_tiles_in_place, tiled_names

            in_tiles = tiled_names(self.model)
        table = "embedding.table"
        by_row = memory.embedding == "rows"
        if by_row:
            from weft.parallel.row_lookup import EmbeddingRows, RowLookup

            in_tiles = in_tiles | {table}
        self.streamed = memory.by_table
        self.compute = compute
        described = dict(self.model.logical_parameters())
        used: dict[tuple[frozenset[int], torch.dtype, Any], list[Full]] = {}
        shared: dict[tuple[int, ...], list[str]] = {}
        # where parameters would stand if experts were in the unit of their layer
        firsts: dict[tuple[object, ...], int] = {}
        places: dict[str, tuple[int, ...]] = {}
        whole = []
        for name, parameter in self.model.named_parameters():
            copies, logical = self.place.copies(name), described[name]
            placement = self.mesh.place.hold(logical, copies)
            if logical.everywhere:
                local = parameter.detach()
                whole.append(Held(name, logical, placement, local, parameter))
                continue
            dtype = compute if parameter.is_floating_point() else parameter.dtype
            learns, several = parameter.requires_grad, len(copies) > 1
            # What other stages have, too, is summed over them last of all, and is a unit of its own.
            # a layer's experts, of which passes bring some
            alone = name if name in in_tiles else ""
            if experts == "chosen" and ".ffn.experts." in name:
                alone = name.rpartition(".")[0]
            alike = learns, self.mesh.sharing(logical), several, alone
            stages = frozenset(self.place.users(name))
            first = firsts.setdefault((stages, dtype, alike[:3]), len(firsts))
            places[name] = min(stages), first, len(places)
            full = Full(name, logical, parameter, placement)
            used.setdefault((stages, dtype, alike), []).append(full)
            if several and learns:
                shared.setdefault(copies, []).append(name)
        # of their first use
        in_order = sorted(used.items(), key=lambda item: min(item[0][0]))
        users = []
        for (stages, dtype, (*_, alone)), named in in_order:
            if alone == table:
                rows = EmbeddingRows(named, self.mesh, dtype, tiers)
                self.model.embedding.lookup = RowLookup(rows)
                unit: TableUnit = rows
            elif alone in in_tiles:
                unit = TiledWeight(named, self.mesh, dtype, tiers, tiles)
            else:
                make_unit = ChosenExperts if alone else TableUnit
                unit = make_unit(named, self.mesh, dtype, tiers)
            users.append((stages, unit))
        if experts == "chosen":
            listen_to_routers(self.model, tiers, [unit for _, unit in users])
        # The model holds its pipeline; a circle would keep process groups, and gloo's threads, until it is collected.
        self.model = model = cast(Transformer, weakref.proxy(self.model))
        cut = self.mesh.layout.vocab_barriers
        output = OutputShard(model, self.mesh) if cut else None
        wire, ranks_here = None, [0]
        if self.mesh.size("pp") > 1:
            group = self.mesh.group("pp")
            wire = Wire(group, self.mesh.device, self.timeout, self._spec)
            ranks_here = dist.get_process_group_ranks(group)
        # Parameters on several ranks of the pipeline (tied embedding, DualPipe): their gradients are summed over them.
        sums = {}
        for ranks, names in sorted(shared.items()):
            group = new_group([ranks_here[r] for r in ranks], "copies of a parameter")
            sums[group] = sorted(names)
        units: list[Unit] = [unit for _, unit in users]
        state = make([*units, Unit(whole)] if whole else units, sums)
        if tiles > 1:
            put_tiles_in_place(model, state)
        if experts == "chosen":  # norms are summed in the same order
            state.learning.sort(key=lambda h: places.get(h.name, (sys.maxsize,)))
        self.here = PipelineRank(
            model, self.mesh, self.place.stages, users, tiers, self.streamed, output, wire, state.visit, state.fetch
        )  # fmt: skip
        return state

    def table(self, microbatches: int, forward_only: bool = False) -> Table:
        """Return the schedule for ``microbatches`` microbatches, with transfers and with gathers of parameters.

        With ``forward_only`` it is the schedule of evaluation, in which microbatches pass all stages. The schedule is
        built and validated at the first call.
        """
        key = (microbatches, forward_only)
        if key not in self.tables:
            # Evaluation is of the whole model: nothing is skipped.
            built = self.place.table(microbatches, skipping=not forward_only)
            if forward_only:
                built = forward_half(built)
            # What is not cut needs no gathering.
            zero = self.mesh.layout.zero if self.mesh.size("shard", "cp") > 1 else 1
            self.tables[key] = validate(built, zero=zero, streamed=self.streamed)
            if self.here.wire is not None:
                self.here.wire.connect(links(self.tables[key]))
        return self.tables[key]

    def accumulate(
        self,
        batches: Sequence[Batch],
        total: Callable[[], T],
        early: EarlyUpdates | None = None,
    ) -> T:
        """Run forward and backward of every microbatch; return this rank's share of the step's mean loss.

        Ranks along ``tp`` return the same share. The shares of ranks that differ along any other axis add up to the
        loss. ``batches``: a batch for each microbatch; ``total``: function that returns the sum of the weights of the
        step's labels; it is called when the first loss is computed. ``early``: units to update during backward; None:
        no unit is.
        """
        passed = self._run(self.table(len(batches)), batches, total, early=early)
        rest = [unit for unit in self.here.units if unit not in passed.summed]
        sum_over_replicas(rest, self.mesh)
        return self._share(passed)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch], hooks: Hooks | None = None) -> T:
        """Return this rank's share of the sum of the losses of ``batches``.

        ``hooks``: functions that are called during forward, such as the loss, in place of those of the model.
        """
        return self._share(self._evaluated(batches, (), hooks))

    @torch.no_grad()
    def evaluate_at(self, points: Sequence[Point], batches: Sequence[Batch]) -> list[T]:
        """Return this rank's share of the summed losses of ``batches`` at each of ``points`` in parameter space.

        A point is a function from a parameter to the values of its rows on this rank. Weights that rest in a tier are
        brought in once for all points.
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
        passed = PipelinePass(self.here, table, batches, total, points, hooks, early)
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
        """Return the shape of activations and gradients, ``[rows, seq/cp/tp, embed]``; other values carry theirs."""
        if value.name not in ("act", "grad"):
            return None
        assert self.present is not None  # values travel while it runs
        rows, length = self.present.batches[value.microbatch].tokens.shape
        width = self.place.shape.embed * (1 + self._carries_two(value))
        return [((rows, length // self.mesh.size("tp"), width), self.compute)]

    def _carries_two(self, value: Value) -> bool:
        """Return whether a stage's output, or its gradient, has the late part of a ladder stream beside the stream."""
        if self.place.shape.residual != "ladder":
            return False
        assert self.present is not None
        path = self.present.table.paths[value.microbatch]
        if value.stage not in path:  # a share of the vocabulary
            return False
        behind = path.index(value.stage) + (value.name == "act")
        ran = [i for s in path[:behind] for i in self.place.stages[s].layers]
        return (
            0 < behind < len(path) and bool(ran) and self.place.shape.is_ladder(ran[-1])
        )
