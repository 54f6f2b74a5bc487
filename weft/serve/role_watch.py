"""Whether other roles of a cluster's engines would serve the recent load better: the watch of a router."""

import numpy as np

from weft.cluster.role_counts import RoleCounts, RoleQuestion
from weft.generate.scheduler import ScheduledStep
from weft.generate.step_work import work_of
from weft.serve.block_link import BlockLink
from weft.serve.load_simulation import TimedRequest
from weft.serve.placement_search import (
    EngineGroup,
    EngineLayout,
    EnginePlacement,
    PlacementSearch,
    PlacementWatch,
    ServiceLimits,
)

#: Fewest requests from which a load is judged.
FEWEST = 20


class RoleWatch:
    """Chooses roles for the engines of a router. A call simulates the router's recent requests under different roles,
    and returns the counts of better roles, or None if the present roles stay.

    ``limits``: latencies that the service is to meet. ``margin`` and ``windows``: the same as those of
    :class:`PlacementWatch`, so that roles do not change with every peak.
    """

    def __init__(
        self, limits: ServiceLimits, margin: float = 0.1, windows: int = 2
    ) -> None:
        self.limits, self.margin, self.windows = limits, margin, windows
        self._watch: PlacementWatch | None = None
        self._among: list[EnginePlacement] = []

    def __call__(self, asked: RoleQuestion) -> RoleCounts | None:
        """Return better roles than the present ones of ``asked``, or None."""
        fitting = [
            each
            for each in asked.requests
            if len(each.prompt) + each.tokens <= asked.cache  # others borrow blocks
        ]
        if len(fitting) < FEWEST or asked.engines < 2 or not asked.rates:
            return None
        rates = np.array(asked.rates)

        def curve(step: ScheduledStep) -> float:
            return float(rates @ np.array(work_of(step)))

        layout = EngineLayout("", 1, curve, asked.cache)
        # blocks travel while a prompt is computed: what an answer waits for is the measured stall
        link = BlockLink(asked.stall, 1e12, 1.0)
        search = PlacementSearch([layout], asked.engines, self.limits, link)
        among = role_placements(layout, asked.engines)
        current = placement_of(layout, asked.engines, asked.current)
        if self._watch is None or len(among) != len(self._among):
            self._watch = PlacementWatch(search, current, self.margin, self.windows)
        self._among = self._watch.among = among
        self._watch.search, self._watch.current = search, current
        begun = fitting[0].time
        window = [
            TimedRequest(each.time - begun, each.prompt, each.tokens)
            for each in fitting
        ]
        better = self._watch.look(window)
        return None if better is None else counts_of(better)


def role_placements(layout: EngineLayout, engines: int) -> list[EnginePlacement]:
    """Return all ways to give ``engines`` engines of one layout their roles: all answer whole requests, or some only
    read prompts and the others only write, with every possible number of each.
    """
    apart = [
        placement_of(layout, engines, RoleCounts(prefill, engines - prefill))
        for prefill in range(1, engines)
    ]
    return [placement_of(layout, engines, RoleCounts(0, 0)), *apart]


def placement_of(
    layout: EngineLayout, engines: int, counts: RoleCounts
) -> EnginePlacement:
    """Return the placement of ``engines`` engines of one layout. ``counts``: how many engines only read prompts or only
    write. If some only read prompts, all others count as engines that only write.
    """
    if not counts.prefill:
        return EnginePlacement(EngineGroup(engines, layout))
    prefill = min(counts.prefill, engines - 1)
    return EnginePlacement(
        None, EngineGroup(prefill, layout), EngineGroup(engines - prefill, layout)
    )


def counts_of(placement: EnginePlacement) -> RoleCounts:
    """Return how many engines of ``placement`` only read prompts, and how many only write."""
    prefill, decode = placement.prefill, placement.decode
    return RoleCounts(
        prefill.engines if prefill else 0, decode.engines if decode else 0
    )
