"""Slow ranks of a run, and the recipe's reaction to them: less work for them, or none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.data.loader import shares_of
from weft.layout.axes import BATCH_AXES
from weft.layout.layout import Layout
from weft.layout.placement import Place
from weft.observe.rank_delays import DelayWatch
from weft.resilience.traffic import planned_order
from weft.resilience.views import Member
from weft.train.setup import Job

#: A rank that computes so many times as long as others is left out, if the recipe wants that; and the work is shared
#: out anew if that factor has changed by such a share.
LEAVE_OUT, UNLIKE = 1.7, 0.3
#: A rank that takes so many times as long as others is not worth the little work that it can have.
HOPELESS = 4.0
#: Verdicts on the network of one rank, which no other division of work helps.
OF_NETWORK = ("sender", "receiver", "network")


@dataclass
class SlowRanks:
    """Ranks that compute slowly, and the reaction to them. All ranks of the run hold the same values.

    Attributes:
        ``actions``: the setting ``resilience.actions``, which says how the run reacts to slow ranks: "say" only reports
            them, "rebalance" gives them less work, and "leave-out" goes on without them. "ladder" gives them less work,
            and goes on without a rank if that did not help or cannot help.
        ``factors``: for each slow member, by number, its compute time divided by that of the others.
        ``rebalance``: whether the batch must be divided anew among the ranks, or the ranks must be numbered anew.
        ``order``: numbers of members in the order in which they form a ring; empty: that of the views.
    """

    actions: str
    factors: dict[int, float] = field(default_factory=dict)
    rebalance: bool = False
    order: list[int] = field(default_factory=list)
    # by the last judgement: factors of computers, and the ranks of slow networks and links
    _judged: dict[int, float] = field(default_factory=dict)
    _network: set[tuple[int, ...]] = field(default_factory=set)
    _digests: object = None  # what was judged last

    def speeds(self, members: Sequence[Member]) -> tuple[float, ...]:
        """Return the compute speed of each member in ``members``, in their order; a member that is not slow has speed
        1.
        """
        return tuple(1 / self.factors.get(member.number, 1.0) for member in members)

    def shares(
        self, job: Job, members: Sequence[Member], layout: Layout
    ) -> dict[int, float]:
        """Return each rank's share of the batch, relative to the mean share. The result is {} if all shares are equal.

        ``job``: the checked recipe; ``members``: members of the run, by rank; ``layout``: the present layout.
        """
        if layout.stage_speeds:
            return _shares_of_layers(job, layout)
        speeds = replace(job, speeds=self.speeds(members)).batch_speeds(layout)
        if not speeds:
            return {}
        counts = shares_of(job.recipe.train.batch, speeds)
        places = [
            Place.of(layout, rank).along(*BATCH_AXES) for rank in range(layout.world)
        ]
        return {
            rank: counts[place] * len(counts) / sum(counts)
            for rank, place in enumerate(places)
        }

    def layout_for(self, layout: Layout, members: Sequence[Member]) -> Layout:
        """Return ``layout`` with settings that suit ranks of unequal speeds, and that do not change what is computed.

        In a pipeline that is the only replica, ``layout.stage_speeds`` gets the speed of the slowest rank of each
        stage, so that slow ranks get fewer layers. Otherwise slow ranks get fewer samples. With ``ep``,
        ``layout.pieces`` and ``layout.overlap`` are set so that all ranks exchange tokens equally often. ``members``:
        members of the run, by rank.
        """
        if layout.pp > 1 and layout.size(*BATCH_AXES) == 1:
            return layout.model_copy(
                update={"stage_speeds": self._stage_speeds(layout, members)}
            )
        if layout.ep == 1 or len(set(self.speeds(members))) < 2:
            return layout
        equal: dict[str, object] = {"pieces": layout.pieces or 1}
        if layout.weaves:
            equal |= {"overlap": "", "parts": 0}
        return layout.model_copy(update=equal)

    def _stage_speeds(
        self, layout: Layout, members: Sequence[Member]
    ) -> tuple[float, ...]:
        """Return the speed of each rank of the pipeline, times that in the recipe; () if all are alike."""
        given = layout.stage_speeds or (1.0,) * layout.pp
        speeds = [*given]
        for rank, speed in enumerate(self.speeds(members[: layout.world])):
            stage = Place.of(layout, rank).rank("pp")
            speeds[stage] = min(speeds[stage], given[stage] * speed)
        return tuple(speeds) if len(set(speeds)) > 1 else ()

    def begin(self, watch: DelayWatch) -> None:
        """Ignore the measurements that ``watch`` has made so far. Only later measurements lead to an action."""
        self._digests = watch.digests

    def act(
        self,
        watch: DelayWatch,
        members: Sequence[Member],
        layout: Layout,
        remove: Callable[[int], None],
    ) -> None:
        """Apply the recipe's action to slow members, if two successive judgements of ``watch`` name the same ones.

        ``watch``: judges which ranks are slow; without a new judgement nothing is done. ``members``: members of the
        present view, by rank; ``layout``: the present layout; ``remove(number)``: asks a member to leave.
        """
        if watch.digests is self._digests:
            return
        self._digests = watch.digests
        slow = {
            members[verdict.ranks[0]].number: verdict.factor
            for verdict in watch.verdicts
            if verdict.kind == "computer"
        }
        # a rank that was too slow for a single sample shows nothing, and is as it was
        idle = {
            members[rank].number for rank, share in watch.shares.items() if not share
        }
        slow |= {number: self.factors[number] for number in idle & self.factors.keys()}
        before, self._judged = self._judged, slow
        if self.actions != "say":
            self._act_on_network(watch, members, layout, remove)
            if slow.keys() == before.keys():
                self._act_on_computers(slow, members, remove)

    def _act_on_computers(
        self,
        slow: Mapping[int, float],
        members: Sequence[Member],
        remove: Callable[[int], None],
    ) -> None:
        """Ask members that compute too slowly to leave, and let the work be divided anew for the others."""
        present = {member.number for member in members}
        known = {
            number: factor
            for number, factor in self.factors.items()
            if number in present
        }
        for number, factor in slow.items():
            helped = number not in known or factor < HOPELESS
            leaves = factor >= LEAVE_OUT if self.actions == "leave-out" else not helped
            if leaves and self.actions != "rebalance":
                remove(number)
        if slow.keys() != known.keys() or any(
            abs(slow[n] / known[n] - 1) > UNLIKE for n in known
        ):
            self.factors, self.rebalance = {**slow}, True

    def _act_on_network(
        self,
        watch: DelayWatch,
        members: Sequence[Member],
        layout: Layout,
        remove: Callable[[int], None],
    ) -> None:
        """Ask a member with a slow network to leave, and number ranks anew if a slow link is between neighbours."""
        slow = {
            verdict.ranks: verdict
            for verdict in watch.verdicts
            if verdict.kind == "link" or verdict.kind in OF_NETWORK
        }
        again = [slow[ranks] for ranks in slow.keys() & self._network]
        self._network = {*slow}
        for verdict in again:
            if verdict.kind == "link" and self.actions != "leave-out":
                order = (
                    planned_order(watch.matrix, layout)
                    if watch.matrix is not None
                    else None
                )
                if order is not None:
                    self.order = [members[rank].number for rank in order]
                    self.rebalance, self._network = True, set()
            elif (
                verdict.kind in OF_NETWORK
                and len(verdict.ranks) == 1
                and verdict.factor >= LEAVE_OUT
                and self.actions in ("leave-out", "ladder")
            ):
                remove(members[verdict.ranks[0]].number)


def _shares_of_layers(job: Job, layout: Layout) -> dict[int, float]:
    """Return each rank's work, relative to the mean, in a layout whose stages are cut by the speeds of their ranks."""
    from weft.schedule.stages import assign_stages, make_table
    from weft.shapes.shape import shape_of

    length = job.recipe.data.seq_len
    table = make_table(layout, 2 * layout.pp, job.shape, length)
    first, layer, last = shape_of(job.shape).forward_flops(length)
    work = [0.0] * layout.pp
    for number, stage in enumerate(assign_stages(job.shape, layout, table, length)):
        ends = first * stage.embedding + last * stage.head
        for rank in table.holders(number):
            work[rank] += len(stage.layers) * layer + ends
    mean = sum(work) / len(work)
    places = [Place.of(layout, rank).rank("pp") for rank in range(layout.world)]
    return {rank: work[place] / mean for rank, place in enumerate(places)}
