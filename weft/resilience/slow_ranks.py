"""Slow ranks of a run, and the recipe's reaction to them: less work for them, or none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from weft.data.loader import shares_of
from weft.layout.axes import BATCH_AXES
from weft.layout.layout import Layout
from weft.layout.placement import Place
from weft.observe.rank_delays import DelayWatch
from weft.resilience.views import Member
from weft.train.setup import Job

#: A rank that computes so many times as long as others is left out, if the recipe wants that; and the work is shared
#: out anew if that factor has changed by such a share.
LEAVE_OUT, UNLIKE = 1.7, 0.3


@dataclass
class SlowRanks:
    """Slowness of slow members by number: ``factors``, their compute time over that of others. All ranks decide alike.

    ``actions``: that setting of the recipe. ``rebalance``: the work must be divided anew.
    """

    actions: str
    factors: dict[int, float] = field(default_factory=dict)
    rebalance: bool = False
    _judged: dict[int, float] = field(default_factory=dict)  # by the last judgement
    _digests: object = None  # what was judged last

    def speeds(self, members: Sequence[Member]) -> tuple[float, ...]:
        """Return the relative speeds of these members."""
        return tuple(1 / self.factors.get(member.number, 1.0) for member in members)

    def shares(
        self, job: Job, members: Sequence[Member], layout: Layout
    ) -> dict[int, float]:
        """Return each rank's share of the work, relative to the mean; {} if all have equal shares."""
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

    def begin(self, watch: DelayWatch) -> None:
        """Judge only what ``watch`` measures from now on."""
        self._digests = watch.digests

    def act(
        self,
        watch: DelayWatch,
        members: Sequence[Member],
        remove: Callable[[int], None],
    ) -> None:
        """Apply the recipe's action if ``watch`` has news and two judgements name the same members of the view.

        ``remove(number)`` asks a member to leave.
        """
        if watch.digests is self._digests:
            return
        self._digests = watch.digests
        slow = {
            members[verdict.ranks[0]].number: verdict.factor
            for verdict in watch.verdicts
            if verdict.kind == "computer"
        }
        before, self._judged = self._judged, slow
        if self.actions == "say" or slow.keys() != before.keys():
            return
        for number, factor in slow.items():
            if self.actions == "leave-out" and factor >= LEAVE_OUT:
                remove(number)
        present = {member.number for member in members}
        known = {
            number: factor
            for number, factor in self.factors.items()
            if number in present
        }
        if slow.keys() != known.keys() or any(
            abs(slow[n] / known[n] - 1) > UNLIKE for n in known
        ):
            self.factors, self.rebalance = slow, True
