"""Experts that rest in files, of which a pass gathers those that its tokens choose (SE-MoE, Shen et al. 2022).

A layer's experts are a unit of their own. Its gather reads nothing by itself: when the router has chosen, the ranks
that share the experts' state agree on the experts that any of them needs, each rank reads those that it holds from its
own file, and one exchange brings gate, up and down of all of them to every rank. Experts of the last step are probable:
they are read while the layer before computes, and exchanged before the router is asked, so that only wrong guesses are
waited for. Backward knows what forward has used. Experts that no token chooses have no gradient and need no weights, so
every number is as if all had been gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from weft.layout.flights import StartedCollective, all_gather
from weft.memory.resting import ComingRow, RestingGroup, Tiers
from weft.memory.tier_file import PIECE, whole_pages
from weft.parallel.state import Held
from weft.parallel.units import OWN, Full, TableUnit

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.memory.on_device import OnDevice
    from weft.models.transformer import Transformer

T = torch.Tensor


class ChosenExperts(TableUnit):
    """Unit with the experts of one layer, which gathers only the experts that tokens are routed to.

    The arguments are those of :class:`weft.parallel.units.TableUnit`; each parameter is a stack with a row per expert.

    Attributes:
        ``counts``: three numbers of experts. "used": experts that passes have used. "hits": those of them that were in
            memory already when the router chose them. "idle": experts that were read but not used.
        ``waited``: seconds for which computation has waited for reads and exchanges.
    """

    def __init__(
        self, named: Sequence[Full], mesh: Mesh, compute: torch.dtype, tiers: OnDevice
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.waited = 0.0
        self.probable: list[int] = []
        self.here: set[int] = set()
        self.guessed: set[int] = set()  # brought before the router was asked
        # used by forward passes of the step, whose backward needs them again
        self.used: dict[int, int] = {}
        self.before: dict[int, int] = {}  # in the last step, with their tokens
        self.arriving: dict[int, list[ComingRow]] = {}
        self.exchange: tuple[list[int], StartedCollective] | None = None
        self.whole = ExitStack()  # holds rows that are in memory anyway
        # whether rows of the next gather, and of the present one, stay in memory until the gather after it
        self.will_keep = self.keeps = False
        self.every = False  # whether the next gather brings all experts
        super().__init__(named, mesh, compute, tiers)
        self.experts = self.shapes[0][0]
        # experts of a rank, and this rank's first
        self.per_rank = -(-self.experts // self.size)
        self.first = self.held[0].box[0][0] - self.held[0].logical.box[0][0]
        self.pool = cast(Tiers, tiers).pool
        self.pool.announce(self.piece)

    @property
    def piece(self) -> int:
        row = self.held[0].local[:1].nbytes or whole_pages(1)
        return whole_pages(-(-row // max(1, -(-row // PIECE))))

    def keep(self, updated: bool) -> None:
        """Keep experts in memory between their next two uses, so that the second use need not fetch them again.

        ``updated``: whether the second use is the update. If so, all experts are kept; otherwise only the experts that
        the next gather brings.
        """
        self.every = updated
        if updated or (self.group is not None and self.group.whole):
            super().keep(updated)
        else:
            self.will_keep = True

    def begin_step(self) -> None:
        """Remember which experts the last step has used, because this step will probably use them."""
        if self.used:
            self.before = self.used
        self.used = {}

    @property
    def group(self) -> RestingGroup | None:
        """Group of tensors, in the host's memory or in a file, that holds this rank's rows; None if the rank has no
        rows.
        """
        group = self.tiers.groups.get(self, {}).get("weights")
        return cast("RestingGroup | None", group)

    def prefetched(self) -> Sequence[str]:
        """Start to read this rank's rows of the experts that the next gather will probably need, the most used first.

        These are the experts that this step has used, or, if there are none, those of the last step. Returns an empty
        sequence: no tensors are fetched whole.
        """
        known = self.used or self.before
        self.probable = sorted(known, key=lambda e: (-known[e], e))
        group = self.group
        if group is not None and not group.whole:
            self._read(self.probable)
        return ()

    def gather(self, values: Callable[[Held], T] = OWN) -> None:
        """Gather all experts, whether tokens choose them or not. Collective.

        ``values``: function from a parameter to the values of this rank's rows, as in :meth:`TableUnit.gather`.
        """
        if not self.live:
            self._let_go()
            self.guessed = set()
            super().gather(values)
            self.here = set(range(self.experts))

    @torch.no_grad()
    def gather_for_pass(self) -> None:
        """Make room for the whole parameters, and start to exchange the experts that are probably needed.
        Collective.

        The call waits for the experts that forward has used in this step, as backward needs the same ones.
        """
        if self.live:
            return
        at_hand = self.group is not None and self.group.whole
        # A lone rank sends to nobody; others must decide alike, also those without rows.
        if self.every or (at_hand and self.size == 1):
            self.every = False
            self.gather()
            return
        self.live, self.here, self.guessed = True, set(), {*self.probable}
        self.keeps, self.will_keep = self.will_keep, False
        for full, shape in zip(self.full, self.shapes, strict=True):
            size = shape.numel() * full.element_size()
            full.untyped_storage().resize_(size)
        if at_hand:
            self.whole.enter_context(self.tiers.at_hand(self, "weights"))
        self._start(self.probable)
        if self.used:
            self.bring(self.used)

    @torch.no_grad()
    def choose(self, counts: T) -> None:
        """Gather the weights of the experts that tokens have chosen, and remember which ones they are. Collective.

        ``counts``: the number of this rank's rows for each expert, ``[experts]``.
        """
        counts = counts[: self.experts]
        if self.size > 1:
            counts = counts.to(torch.int64, copy=True)
            dist.all_reduce(counts, group=self.mesh.group(self.sharing))
        rows = counts.tolist()
        chosen = {e: n for e, n in enumerate(rows) if n}
        self.counts["used"] += len(chosen)
        self.counts["hits"] += len(chosen.keys() & (self.here | {*self.probable}))
        for e, n in chosen.items():
            self.used[e] = self.used.get(e, 0) + n
        self.bring(chosen)

    def bring(self, experts: Iterable[int]) -> None:
        """Gather those of ``experts`` (indices) that are not in memory yet, and wait until all of them are.
        Collective.
        """
        begun = perf_counter()
        self._land()
        if missing := sorted({*experts} - self.here):
            self._start(missing)
            self._land()
        self.waited += perf_counter() - begun

    def release(self, drop: bool) -> None:
        """Free the gathered experts, and count those that were read but not used.

        ``drop``: whether the memory of the whole parameters is freed too, as in :meth:`TableUnit.release`.
        """
        if self.live and self.here:
            self._land()
            self.counts["idle"] += len(self.guessed - self.used.keys())
        self._let_go()
        super().release(drop)

    def _let_go(self) -> None:
        """Wait for what is on its way, and forget it."""
        if self.exchange is not None:
            self.exchange[1].land()
            self.exchange = None
        for expert in [] if self.keeps else list(self.arriving):
            for row in self.arriving[expert]:
                row.coming.wait()
            self._given_back(expert)
        self.whole.close()
        self.here = set()

    def _own(self, experts: Iterable[int]) -> list[int]:
        """Those of ``experts`` whose state this rank holds."""
        rows = range(self.first, self.first + len(self.held[0].local))
        return [e for e in experts if e in rows]

    def _read(self, experts: Iterable[int]) -> None:
        """Begin to read this rank's rows of ``experts`` that are not in memory."""
        group = self.group
        if group is None or group.in_use:
            return
        for e in self._own(experts):
            if e not in self.arriving and e not in self.here:
                rows = [group.read_row(i, e - self.first) for i in range(len(self.held))]  # fmt: skip
                self.arriving[e] = rows

    def _rows(self, expert: int) -> list[T]:
        """This rank's rows of ``expert``, once they are in memory. What they were read into may then be given back."""
        if self.group is not None and self.group.in_use:
            return [h.local[expert - self.first] for h in self.held]
        self._read([expert])
        for row in self.arriving[expert]:
            row.coming.wait()
        return [row.values for row in self.arriving[expert]]

    def _given_back(self, expert: int) -> None:
        if self.keeps:
            return
        for row in self.arriving.pop(expert, ()):
            self.pool.give(row.buffer)

    def _start(self, experts: Sequence[int]) -> None:
        """Start to bring ``experts`` to all ranks, in one exchange: every rank sends gate, up and down of its own."""
        self._read(experts)
        if self.size == 1:
            for e in experts:
                for full, rows in zip(self.full, self._rows(e), strict=True):
                    full.data[e].copy_(rows)
                self._given_back(e)
            self.here.update(experts)
            return
        if not experts:
            return
        by_rank = Counter(e // self.per_rank for e in experts)
        each = sum(shape[1:].numel() for shape in self.shapes)
        device = self.mesh.device
        sent = torch.zeros(max(by_rank.values()), each, dtype=self.compute, device=device)  # fmt: skip
        for place, e in enumerate(self._own(experts)):
            parts = sent[place].split([shape[1:].numel() for shape in self.shapes])
            for part, rows in zip(parts, self._rows(e), strict=True):
                part.copy_(rows.flatten())
            self._given_back(e)
        whole = sent.new_empty(self.size, *sent.shape)
        work = all_gather(whole.flatten(0, 1), sent, group=self.mesh.group(self.sharing), async_op=True)  # fmt: skip
        self.exchange = [*experts], StartedCollective(whole, work)

    def _land(self) -> None:
        """Wait for the exchange under way, and put what it has brought into the whole parameters."""
        if self.exchange is None:
            return
        experts, started = self.exchange
        self.exchange = None
        whole, places = started.land(), Counter[int]()
        for e in experts:
            rank = e // self.per_rank
            row = whole[rank, places[rank]]
            places[rank] += 1
            parts = row.split([shape[1:].numel() for shape in self.shapes])
            for full, part in zip(self.full, parts, strict=True):
                full.data[e].copy_(part.view(full.shape[1:]))
        self.here.update(experts)


def listen_to_routers(
    model: Transformer, tiers: OnDevice, units: Sequence[TableUnit]
) -> None:
    """Connect each layer's router to the layer's unit of experts, so that the unit gathers the chosen experts before
    they compute.

    ``units``: the units of the model's parameters, of which only those of experts (:class:`ChosenExperts`) are
    connected. ``tiers``: the places where the experts rest. The summary that ``tiers`` prints then also says how many
    experts were used, foreseen and waited for.
    """
    chosen = [unit for unit in units if isinstance(unit, ChosenExperts)]
    for unit in chosen:
        experts = model.get_submodule(unit.held[0].name.rpartition(".")[0])
        experts.register_forward_pre_hook(partial(_choose, unit))
    if isinstance(tiers, Tiers):
        tiers.reports.append(partial(prefetch_report, chosen))


def _choose(unit: ChosenExperts, module: object, given: tuple[T, ...]) -> None:
    unit.choose(given[1])


def prefetch_report(units: Sequence[ChosenExperts]) -> str:
    """Return a line for the user about the experts of ``units``: how many were used, were read
    early, and were read without use, and the seconds for which computation has waited.

    The line is empty if no expert was used.
    """
    counts = sum((unit.counts for unit in units), Counter[str]())
    if not counts["used"]:
        return ""
    waited = sum(unit.waited for unit in units)
    return (
        f"passes used {counts['used']:,} experts, of which {counts['hits']:,} were foreseen, and waited {waited:.2f} s "
        f"for experts; {counts['idle']:,} were read and not used"
    )
