"""The engine over several ranks, each of which has a part of the model, of the cache and of every step.

The first rank schedules and samples as a single process would. It describes every step in a numbered ticket, which the
others read from a channel of its endpoint. Each rank then computes its part: along ``tp`` its heads of all tokens,
along ``cp`` its tokens (:mod:`weft.parallel.striped`), with ``ep`` its experts, along ``pp`` its layers. As many steps
as there are stages are under way at once, so that no stage waits for a later one (EnergonAI, Du et al. 2022,
2209.02341). The first rank receives the logits. The model is cut and loaded as in training, except that along ``cp``
only experts are cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from weft.errors import UsageError
from weft.generate.block_contents import (
    LayerPart,
    bytes_of,
    cut_parts,
    gather_parts,
    layer_parts,
    read_pages,
    whole_parts,
    write_pages,
)
from weft.generate.cache_policy import NONE, cache_policy_of
from weft.generate.early_exit import EarlyExit
from weft.generate.packed_row import PackedRow, pack, parts_of
from weft.generate.part_readings import PartReadings, can_be_cut
from weft.generate.reader import pooled, select_blocks
from weft.generate.scheduler import ScheduledStep
from weft.generate.tickets import TicketReader, TicketWriter, open_tickets
from weft.layout.axis_groups import numbers_within
from weft.layout.boundary import gather_tokens
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.placement import rank_table
from weft.models.adapter_shelf import AdapterShelf
from weft.models.paged import Reading, StatePages, attending, layer_pages
from weft.models.rope import angles
from weft.models.row_adapters import HostAdapter, own_part
from weft.models.token_parts import Enter
from weft.models.transformer import Transformer
from weft.net.groups import limit
from weft.net.lost import peer_lost
from weft.parallel.build import check_fits
from weft.parallel.striped import SplitStates, StripedKeys, Stripes, striped
from weft.recipe import ModelShape
from weft.registry import declared, find
from weft.run.failure import is_secondary
from weft.run.signals import noted_signals, stop_signals
from weft.schedule.actions import Value
from weft.schedule.pipeline_wire import Wire

if TYPE_CHECKING:
    from weft.parallel.experts.dispatch_way import DecodePass

T = torch.Tensor

#: The fields of a layout that generation uses; all others are for training.
READ = (
    "tp", "cp", "pp", "ep", "dispatch", "order", "tp_shares", "sum", "overlap", "parts", "overlap_least",
)  # fmt: skip

#: Tokens of the sums that are measured: of a text that is written, of many, and of a long prompt.
MEASURED_TOKENS = (1, 32, 512)

#: What the first rank says when the others are to return, as no step follows for a while.
REST = "rest"


def check_layout(layout: Layout, shape: ModelShape | None = None) -> None:
    """Raise :class:`UsageError` if a model cannot generate under ``layout``. ``shape``: shape of the model; None: it is
    not known yet, and only the layout is checked.
    """
    for name, usual in Layout():
        if name not in READ and getattr(layout, name) != usual:
            raise UsageError(
                f"generation goes over tp, cp, pp and ep, and has no use for {name}; leave it out"
            )
    if layout.overlap and (layout.takes_turns or layout.cp > 1):
        raise UsageError(
            f"overlap = {layout.overlap!r} has nothing to cut here: 'passes' and 'pairs' are about training, and cp "
            f"cuts rows by itself; leave overlap or cp out"
        )
    if layout.ep > 1:
        check_dispatch(layout, shape)
    if layout.sum and layout.ep > 1:
        raise UsageError(
            "layout.sum adds up whole tokens on all ranks of tp, and ep sends each rank's own to experts; leave out one"
        )
    if shape is not None and layout.world > 1:
        if shape.kind:
            raise UsageError(
                f"a plugin's model ({shape.kind}) reads on one rank; leave out --layout"
            )
        check_fits(shape, of_parameters(layout))


def check_dispatch(layout: Layout, shape: ModelShape | None) -> None:
    """Raise :class:`UsageError` if a model cannot generate with the dispatcher ``layout.dispatch``, which carries
    tokens to experts. ``shape``: shape of the model; None: it is not known yet.
    """
    way = find("dispatch", layout.dispatch).implementation()
    if not way.unequal:
        able = [
            each.name for each in declared("dispatch") if each.implementation().unequal
        ]
        raise UsageError(f"ranks that generate have unequally many tokens, which dispatch = {layout.dispatch!r} does "
                         f"not send; use {' or '.join(able)}")  # fmt: skip
    if not way.whole_context:
        return
    if layout.world > layout.cp or layout.ep != layout.cp:
        raise UsageError(
            f"dispatch = {layout.dispatch!r} lets every rank along cp cache all of a text and hold a share of the "
            f"experts; use cp={layout.ep},ep={layout.ep} alone, or dispatch = 'per-rank'"
        )
    if shape is not None and (
        shape.residual == "ladder"
        or any(shape.mixer_of(i) != "softmax" for i in range(shape.layers))
    ):
        raise UsageError(
            f"dispatch = {layout.dispatch!r} moves tokens between layers of softmax attention, and this model has "
            "linear or ladder layers; use dispatch = 'per-rank'"
        )


def of_parameters(layout: Layout) -> Layout:
    """Return the layout by which the model's parameters are cut for generation under ``layout``. It has the ranks of
    ``cp`` as ranks of ``dp`` instead: they hold the same parameters, apart from experts.
    """
    order = layout.order.replace("cp", "dp")
    return Layout(
        dp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        dispatch=layout.dispatch,
        order=order,
        tp_shares=layout.tp_shares,
        sum=layout.sum,
        overlap=layout.overlap,
        parts=layout.parts,
        overlap_least=layout.overlap_least,
    )


def mesh_of_rank(layout: Layout, device: str, needed: float = 0) -> Mesh:
    """Build the mesh of this rank, whose device is ``device``. Raises :class:`UsageError` if the ranks of ``layout``
    were not started together.

    ``needed``: bytes of the model's weights, for ``layout.tp_shares = "auto"``; 0: memory does not matter.
    """
    if layout.world > 1 and (
        not dist.is_initialized() or dist.get_world_size() != layout.world
    ):
        raise UsageError(
            f"generation under {layout} needs {layout.world} ranks that are started together"
        )
    if layout.world == 1:
        return Mesh.single(device)
    mesh = Mesh.create(of_parameters(layout), device, needed)
    if not layout.sum:
        return mesh
    from weft.layout.sums import TokenSums

    return replace(mesh, sums=TokenSums(mesh.group("tp"), layout.sum))


class RankReader:
    """Computes this rank's part of every step of ``model``, which is cut over several ranks. ``size``: tokens of a
    cache block, rounded up to a multiple of the size of ``cp``. ``policy``: value of ``--cache-policy``, which cannot
    be used with ranks of ``cp``.

    Attributes:
        ``notes``: lines about the ranks, for the user.
    """

    def __init__(self, model: Transformer, size: int, policy: str = NONE) -> None:
        self.model, self.mesh, patience = model, model.mesh, limit()
        self.all = group_of(model)
        self.rank = self.all.rank()
        ranks = self.mesh.size("dp")
        self.group = self.mesh.group("dp") if ranks > 1 else None
        self.size = size + -size % ranks
        pages = layer_pages(model, self.size)
        self.decode: DecodePass | None = None
        if self.mesh.layout.ep > 1:
            way = find("dispatch", self.mesh.layout.dispatch).implementation()
            self.decode = way.decode_pass(model, pages)
        selecting = cache_policy_of(policy)
        if selecting is not None:
            select_blocks(pages, selecting, model, self.size)
        self.pages = (
            pages
            if self.group is None or self.decode is not None
            else [striped(each, self.group) for each in pages]
        )
        stages, stage = (
            numbers_within(self.mesh.group("pp"), self.all),
            self.mesh.rank("pp"),
        )
        self.before, self.after = ([None, *stages][stage], [*stages, None][stage + 1])
        self.depth = len(stages)
        self.shelf = AdapterShelf(model, self.pages)
        # who has logits, by the place along cp
        self.ends = rank_table(self.mesh.layout)[0, -1, :, 0, 0, 0].tolist()
        self.wire = Wire(
            self.all, self.mesh.device, patience.total_seconds() if patience else 600
        )
        links = [
            (self.before, self.rank),
            (self.rank, self.after),
            *((rank, 0) for rank in range(1, self.all.size())),
            *((0, rank) for rank in range(1, self.all.size())),
        ]
        self.wire.connect({(a, b) for a, b in links if a is not None and b is not None})
        self.notes = start_notes(model)

    @torch.inference_mode()
    def run(
        self,
        number: int,
        row: PackedRow,
        copies: Sequence[tuple[int, int]],
        loads: Sequence[tuple[str, list[int]]],
    ) -> tuple[T, T]:
        """Compute this rank's part of step ``number`` over the tokens ``row``. Return for each wanted token the rank
        along ``cp`` that has its logits, and this rank's logits, which are empty before the last pipeline stage.
        ``copies``: pairs of cache blocks (from, to) that are copied before the step. ``loads``: pairs of an adapter's
        name and the blocks into which it is loaded before the step.
        """
        for pages in self.pages:
            pages.copy(copies)
        if self.decode is not None:
            from weft.parallel.whole_context import TokenRuns, share_new_tokens

            if self.decode.takes(row.spans):
                share_new_tokens(self.pages, None)
                return self._decoded(self.decode, row)
            assert self.group is not None
            stripes: Any = TokenRuns(row.spans, self.size, self.group)
            share_new_tokens(self.pages, stripes)
        else:
            stripes = Stripes(row.spans, self.size, self.group)
        mesh = self.mesh
        slots = torch.tensor(stripes.slots, dtype=torch.int64, device=mesh.device)
        own, whole = Reading(stripes.spans, slots), Reading(row.spans, slots)
        for pages in self.pages:
            pages.reading = whole if isinstance(pages, StatePages) else own
            if isinstance(pages, StripedKeys | SplitStates):
                pages.stripes = stripes
        for load in loads:
            self.shelf.load(*load)
        numbers = torch.tensor([row.ids, row.positions])[:, stripes.own]
        with (
            attending(self.model, self.pages),
            self.shelf.adapting(
                row.spans if self.decode else stripes.spans, row.adapters
            ),
        ):
            ends = [0, *(span.last for span in stripes.spans)]
            enter = None
            if self.model.woven is not None and can_be_cut(row):
                enter = PartReadings(self.pages, row.spans, slots)
            x = self.through(number, numbers, ends, enter)
        if self.after is not None:
            return stripes.owner, x[:0]
        wanted = stripes.place[row.wanted] - stripes.first
        wanted = wanted[(wanted >= 0) & (wanted < stripes.count)].to(mesh.device)
        logits = self.model.scores(x, wanted)[0]
        if len(wanted) and self.rank and self.rank in self.ends:
            self.wire.send(Value("logits", 0, number), logits, 0, self.depth)
        return stripes.owner, logits

    def _decoded(self, decode: DecodePass, row: PackedRow) -> tuple[T, T]:
        """Compute a step in which texts get a token each, and return what :meth:`run` does: the first rank has all
        logits.
        """
        given = torch.tensor([row.ids, row.positions], device=self.mesh.device)
        x, model = decode.run(given, row.spans), self.model
        logits = (
            model.scores(model.norm(x), torch.tensor(row.wanted))[0]
            if x.numel()
            else x[0]
        )
        return torch.zeros(len(row.ids), dtype=torch.int64), logits

    def through(
        self, number: int, row: T, ends: Sequence[int], enter: Enter | None = None
    ) -> T:
        """Run ``row``, the ids and positions ``[2, tokens]`` of step ``number``, through this rank's layers.

        The result is sent to the next pipeline stage; on the last stage the final norm is applied instead. ``ends``:
        positions in the row where texts end. ``enter``: prepares the cache for a part of the row, if it is computed in
        parts.
        """
        # norms cut the tokens
        cuts = 1 if self.mesh.sums else self.mesh.size("tp")
        model, row = (
            self.model,
            F.pad(row, (0, -row.shape[1] % cuts)).to(self.mesh.device),
        )
        documents = torch.tensor(sorted({*ends, row.shape[1]}), dtype=torch.int32)
        x = (
            model.embedding(row[:1])
            if self.before is None
            else self.take("act", number, self.before)
        )
        rope = angles(row[1:], model.freq, x.dtype)
        layers = sorted(map(int, model.blocks))
        x = model.run_blocks(layers, x, rope, documents, enter=enter)
        if self.after is None:
            return model.norm(model.settled(x))
        x = model.packed(x)
        self.wire.send(Value("act", 0, number), x, self.after, self.depth)
        return x

    @torch.inference_mode()
    def read_vector(self, number: int, ids: Sequence[int], last: bool) -> T:
        """Return the mean of the final hidden states of the text ``ids``, or with ``last`` the last token's hidden
        state: float32 ``[embed]``.

        The cache is not used, and every rank along ``cp`` computes the whole text. ``number``: number of the step.
        """
        x = self.through(number, torch.tensor([ids, range(len(ids))]), [0, len(ids)])
        vector = torch.empty(self.model.shape.embed, device=x.device)
        if self.after is None:
            vector = pooled(gather_tokens(x, self.mesh)[0, : len(ids)], last)
        dist.broadcast(vector, group=self.all, group_src=self.ends[0])
        return vector

    def measure_sums(self, number: int) -> str:
        """Measure the all-reduces of ``layout.sum = "auto"`` again in step ``number``; return a line about them."""
        return measure_again(self.model)

    def take_adapter(self, number: int, name: str, adapter: HostAdapter | None) -> int:
        """Receive ``adapter`` in step ``number`` from the first rank, and register it under ``name``. On the first rank
        ``adapter`` is given, elsewhere None.

        Return the number of cache blocks that the adapter takes on the rank where it takes most.
        """
        sent = [adapter]
        device = self.mesh.device
        dist.broadcast_object_list(sent, group=self.all, device=device, group_src=0)
        assert sent[0] is not None
        blocks = torch.tensor(
            self.shelf.add(name, own_part(sent[0], self.model)), device=self.mesh.device
        )
        dist.all_reduce(blocks, dist.ReduceOp.MAX, group=self.all)
        return int(blocks)

    def held_parts(self) -> list[LayerPart]:
        """Return a description of the part of every cache block that this rank holds, one :class:`LayerPart` per layer.
        The cache must be allocated already.
        """
        ranks, place = self.mesh.size("dp"), self.mesh.rank("dp")
        whole = self.decode is not None
        return layer_parts(self.model, self.pages, *(() if whole else (ranks, place)))

    def send_form(self, number: int) -> None:
        """Send the first rank a description of the part of each cache block that this rank holds (layers, shapes; not
        the contents), as JSON text. ``number``: number of the step.
        """
        text = json.dumps([each.form for each in self.held_parts()]).encode()
        form = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        value = Value("form", 0, number)
        self.wire.send(value, form.to(self.mesh.device), 0, self.depth)

    def send_blocks(self, number: int, table: Sequence[int], tokens: int) -> None:
        """Send the first rank this rank's part of the cache blocks in ``table``: their first ``tokens`` tokens each.
        ``number``: number of the step.
        """
        rows = read_pages(self.pages, self.held_parts(), table, tokens)
        if rows.numel():
            value = Value("blocks", 0, number)
            self.wire.send(value, rows.to(self.mesh.device), 0, self.depth)

    def take_blocks(self, number: int, table: Sequence[int], tokens: int) -> None:
        """Receive this rank's part of cache blocks from the first rank, and write it to the blocks in ``table``.
        ``number``: number of the step; ``tokens``: leading tokens of each block that are written.
        """
        parts = self.held_parts()
        if bytes_of(parts, tokens):
            rows = self.take("blocks", number, 0).cpu()
            write_pages(self.pages, parts, table, tokens, rows)

    def take(self, what: str, number: int, source: int) -> T:
        """Receive and return the tensor that rank ``source`` sends in step ``number``. ``what``: name under which the
        sender sends the tensor. Raises an error that names ``source`` if it does not come in time.
        """
        self.wire.ask(Value(what, 0, number), source)
        received: T = self.wire.take(Value(what, 0, number), source, f"step {number}")
        return received


class Leader(RankReader):
    """Computes the steps of ``model``, which is cut over several ranks, on the first rank, and launches each step on
    all others. The other ranks run :func:`follow_leader`. ``size``: tokens of a cache block. ``policy``: value of
    ``--cache-policy``.
    """

    def __init__(self, model: Transformer, size: int, policy: str = NONE) -> None:
        tickets = open_tickets(group_of(model))
        assert isinstance(tickets, TicketWriter)
        self.tickets = tickets
        self.tickets.give([size, policy])
        super().__init__(model, size, policy)
        # functions that wait for the logits of steps under way, the oldest step first
        self._under_way: list[Callable[[], T]] = []
        # prints a line
        self.report: Callable[[str], None] = lambda line: None
        # what each rank holds of a block
        self._parts: list[list[LayerPart]] = []

    def start(
        self, step: ScheduledStep, early: EarlyExit | None = None
    ) -> Callable[[], T]:
        """Launch a step on all ranks. Return a function that waits for the logits ``[rows, vocab]``: the wanted rows of
        all texts of the step, one text after the other. ``early``: must be None, because a pass over several ranks
        makes no early exit.
        """
        assert early is None
        if self.mesh.sums and self.mesh.sums.slowed:
            self.measure_all()
        work = row, *_ = pack(parts_of(step)), step.copies, step.loads
        # a thread writes the ticket, perhaps only when tables of requests have changed again
        row.spans[:] = [span._replace(table=[*span.table]) for span in row.spans]
        with naming_lost_rank():
            ranks, own = self.run(number := self.tickets.give(("run", *work)), *work)

        @cache
        def logits() -> T:
            owner, rows = (
                ranks[row.wanted],
                own.new_empty(len(row.wanted), self.model.shape.vocab),
            )
            with naming_lost_rank():
                for place in sorted(set(owner.tolist())):
                    rank = self.ends[place]
                    rows[owner == place] = (
                        own if rank == 0 else self.take("logits", number, rank)
                    )
            self._under_way.remove(logits)
            return rows

        self._under_way.append(logits)
        return logits

    def block_form(self) -> list[LayerPart]:
        """Return, for each layer, the form of a cache block of all ranks together: type, heads and shape of its values.
        The cache must be allocated already.
        """
        if not self._parts:
            self._settle()
            with naming_lost_rank():
                number = self.tickets.give(("send_form",))
                texts = [self.take("form", number, rank) for rank in self._others]
            forms = [json.loads(bytes(text.cpu().tolist())) for text in texts]
            others = [[LayerPart.of(form) for form in each] for each in forms]
            self._parts = [self.held_parts(), *others]
        return whole_parts(each for parts in self._parts for each in parts)

    def read_blocks(self, table: Sequence[int], tokens: int) -> T:
        """Copy the first ``tokens`` tokens of the cache blocks in ``table`` from all ranks to the host. Return uint8
        ``[blocks, bytes]``: for each block the bytes of one layer after the other.
        """
        whole = self.block_form()
        self._settle()
        with naming_lost_rank():
            number = self.tickets.give(("send_blocks", list(table), tokens))
            shares = [
                (self._parts[0], read_pages(self.pages, self._parts[0], table, tokens))
            ]
            for rank in self._others:
                parts = self._parts[rank]
                if len(table) * bytes_of(parts, tokens):
                    shares.append((parts, self.take("blocks", number, rank).cpu()))
        return gather_parts(whole, shares, tokens, len(table))

    def write_blocks(self, table: Sequence[int], tokens: int, rows: T) -> None:
        """Write ``rows``, which :meth:`read_blocks` has returned, to the first ``tokens`` tokens of the cache blocks in
        ``table`` on all ranks.
        """
        whole = self.block_form()
        with naming_lost_rank():
            number = self.tickets.give(("take_blocks", list(table), tokens))
            for rank in self._others:
                if bytes_of(self._parts[rank], tokens):
                    part = cut_parts(whole, rows, tokens, self._parts[rank])
                    value = Value("blocks", 0, number)
                    self.wire.send(value, part.to(self.mesh.device), rank, self.depth)
        own = cut_parts(whole, rows, tokens, self._parts[0])
        write_pages(self.pages, self._parts[0], table, tokens, own)

    @property
    def _others(self) -> range:
        return range(1, self.all.size())

    def _settle(self) -> None:
        """Receive the logits of all steps under way, as what a rank sends arrives in order."""
        for logits in list(self._under_way):
            logits()

    def embed(self, ids: Sequence[int], last: bool) -> T:
        """Return the mean of the final hidden states of the text ``ids``, or with ``last`` the last token's hidden
        state: float32 ``[embed]``.
        """
        with naming_lost_rank():
            return self.read_vector(
                self.tickets.give(("read_vector", ids, last)), ids, last
            )

    def add_adapter(self, name: str, adapter: HostAdapter) -> int:
        """Register ``adapter`` under ``name`` on all ranks. Return the number of cache blocks that it needs."""
        if self.decode is not None:
            raise UsageError(
                f"dispatch = {self.mesh.layout.dispatch!r} writes texts without adapters; use dispatch = 'per-rank'"
            )
        with naming_lost_rank():
            return self.take_adapter(
                self.tickets.give(("take_adapter", name, None)), name, adapter
            )

    def measure_all(self) -> None:
        """Measure on all ranks again which all-reduce is fastest, for ``layout.sum = "auto"``, and print a line about
        it.
        """
        self._settle()
        with naming_lost_rank():
            self.report(self.measure_sums(self.tickets.give(("measure_sums",))))

    def summary(self) -> str:
        """Return a line for the user about experts on several ranks: how many rows of tokens and results each layer has
        sent between ranks. "" if they were not counted.
        """
        return self.decode.summary() if self.decode else ""

    def rest(self) -> None:
        """End the calls of :func:`follow_leader` on the other ranks, so that all ranks can do something else, such as
        train. The other ranks call it again before the next step.
        """
        self.tickets.give((REST,))

    def close(self) -> None:
        """Tell the other ranks that no further step comes, so that they end."""
        self.tickets.close()


@contextmanager
def naming_lost_rank() -> Iterator[None]:
    """Return a context in which a failed wait for another rank is raised as an error that names the lost rank."""
    try:
        yield
    except RuntimeError as error:
        if is_secondary(error) and (lost := peer_lost(error)):
            raise lost from error
        raise


class Follower(RankReader):
    """Computes the steps of ``model``, which is cut over several ranks, on a rank other than the first: in every step
    this rank's part of the pass that the first rank describes. ``tickets``: source of these descriptions.
    """

    def __init__(self, model: Transformer, tickets: TicketReader) -> None:
        self.tickets = tickets
        size, policy = tickets.next()
        super().__init__(model, size, policy)


def start_notes(model: Transformer) -> list[str]:
    """Measure the all-reduces for ``layout.sum`` and the ranks' speeds for ``layout.tp_shares``, if these are chosen
    automatically; return lines for the user. All ranks must call this.
    """
    mesh, notes = model.mesh, list[str]()
    if mesh.sums or mesh.layout.tp_shares:
        from weft.layout.rank_power import measured_line

        notes.append(measured_line(mesh.layout, mesh.device, model.shape.heads))
    notes.append(measure_again(model))
    return [line for line in notes if line]


def measure_again(model: Transformer) -> str:
    """Measure the all-reduces of ``layout.sum = "auto"``, and take the fastest; return a line about them, "" if there
    is nothing to measure. All ranks must call this.
    """
    sums = model.mesh.sums
    if sums is None or sums.word != "auto":
        return ""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    sums.measure(MEASURED_TOKENS, model.shape.embed, dtype)
    return sums.line()


def group_of(model: Transformer) -> dist.ProcessGroup:
    """Return the process group of the ranks over which ``model`` is cut."""
    group = model.mesh.step_group or dist.group.WORLD
    assert group is not None
    return group


def follow_leader(model: Transformer, reader: Follower | None = None) -> Follower:
    """Compute this rank's part of the first rank's steps until the first rank's engine rests or ends; return this
    rank's reader. Called on every other rank.

    ``reader``: the reader that an earlier call returned, when the engine goes on after a rest; None: the engine is new.
    Ctrl-C is left to the first rank, which may have answers to finish.
    """
    with noted_signals(stop_signals()):
        if reader is None:
            tickets = open_tickets(group_of(model))
            assert isinstance(tickets, TicketReader)
            reader = Follower(model, tickets)
        tickets = reader.tickets
        while (ticket := tickets.next()) is not None:
            what, *given = ticket
            if what == REST:
                break
            if what == "run":
                given[0] = PackedRow.of(given[0])
            getattr(reader, what)(tickets.number, *given)
    return reader
