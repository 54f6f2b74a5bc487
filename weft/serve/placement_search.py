"""Search for a placement: how many engines read prompts, write, or do both, and with which layout each.

Every placement plays the same load in the simulated cluster, and is judged by the requests per second that meet the
limits of the time to the first token and of the time per token (goodput, as in DistServe, Zhong et al. 2024,
2401.09670). The simulated engines and dispatch policies are the real ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from weft.cluster.dispatch_policy import DispatchPolicy, freest
from weft.generate.block_pool import BlockPool
from weft.generate.keys import chained_keys
from weft.generate.policies import Policy, exact_fill
from weft.generate.request import Request
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.serve.block_link import BlockLink
from weft.serve.cluster_simulation import (
    ClusterRequest,
    SimulatedEngine,
    simulate_cluster,
)
from weft.serve.load_requests import latency_statistics
from weft.serve.load_simulation import TimedRequest
from weft.serve.simulated_caches import SimulatedCaches

#: Tokens of a cache block, and of a step.
BLOCK, BUDGET = 16, 2048
#: The share of the requests that must meet the limits.
ENOUGH = 0.9


class EngineLayout(NamedTuple):
    """A way to run an engine, for which the step times are known.

    Attributes:
        ``name``: the layout, such as ``tp=2``; empty for a single rank.
        ``devices``: number of devices of an engine.
        ``curve``: returns the seconds of a step.
        ``cache``: tokens that the cache holds; 0 if the weights do not fit.
    """

    name: str
    devices: int
    curve: Callable[[ScheduledStep], float]
    cache: int


class EngineGroup(NamedTuple):
    """Engines of a placement that have the same role and layout. ``engines``: number of these engines. ``layout``:
    layout of each of them.
    """

    engines: int
    layout: EngineLayout

    def __str__(self) -> str:
        return f"{self.engines} x {self.layout.name or 'one rank'}"


@dataclass(frozen=True)
class EnginePlacement:
    """The engines that serve a model: either ``mixed`` engines, which answer whole requests, or ``prefill`` engines for
    prompts and ``decode`` engines for the tokens after the first one. Beside them, ``caches`` engines only keep cache
    blocks for the others; they need no device.
    """

    mixed: EngineGroup | None = None
    prefill: EngineGroup | None = None
    decode: EngineGroup | None = None
    caches: int = 0

    @property
    def groups(self) -> dict[str, EngineGroup]:
        """The groups of engines by their role: "any" (whole requests), "prefill" (prompts) or "decode" (all tokens
        after the first).
        """
        every = {"any": self.mixed, "prefill": self.prefill, "decode": self.decode}
        return {role: group for role, group in every.items() if group is not None}

    @property
    def devices(self) -> int:
        return sum(
            group.engines * group.layout.devices for group in self.groups.values()
        )

    def __str__(self) -> str:
        beside = f", {self.caches} for cache blocks" if self.caches else ""
        if self.mixed is not None:
            return f"{self.mixed}, whole requests{beside}"
        return f"{self.prefill} for prompts, {self.decode} for writing{beside}"


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of latency that a service is to meet.

    ``ttft``: largest number of seconds from a request's arrival to its first token. ``tpot``: largest mean number of
    seconds per further token of a request.
    """

    ttft: float
    tpot: float

    @property
    def milliseconds(self) -> dict[str, float]:
        """The limits in milliseconds, under the keys "ttft" and "tpot"."""
        return {"ttft": 1000 * self.ttft, "tpot": 1000 * self.tpot}


@dataclass(frozen=True)
class PlacedLoad:
    """How well one placement (a set of engines) answers a load, as a simulation shows.

    Attributes:
        ``placement``: the engines.
        ``share``: share of the requests that are answered within all limits of latency; 0 if the placement was not
            simulated.
        ``goodput``: number of such requests per second.
        ``figures``: latency statistics, as of :func:`latency_statistics`; empty if the placement was not simulated.
        ``reason``: why the placement is good or bad.
    """

    placement: EnginePlacement
    share: float
    goodput: float
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacementSearch:
    """A search for the placement (set of engines) that serves a load best.

    Attributes:
        ``layouts``: ways to run an engine, among which the search chooses.
        ``devices``: largest number of devices of all engines together.
        ``limits``: latencies that the service is to meet.
        ``link``: speed of transfers from engines that process prompts (prefill) to engines that continue (decode);
            None: there are no such pairs, and every engine answers whole requests.
        ``most``: largest number of answers that an engine writes at a time.
        ``policy``: schedules the steps of an engine.
        ``dispatch``: chooses the engine of each request.
        ``caches``: cache engines with which placements are tried, too; None: with none.
    """

    layouts: Sequence[EngineLayout]
    devices: int
    limits: ServiceLimits
    link: BlockLink | None = None
    most: int = 64
    policy: Policy = exact_fill
    dispatch: DispatchPolicy = freest
    caches: SimulatedCaches | None = None

    def engines(self, placement: EnginePlacement) -> list[SimulatedEngine]:
        """Return new simulated engines for ``placement``, one for each of its engines."""
        engines = []
        for role, group in placement.groups.items():
            for number in range(group.engines):
                pool = BlockPool(max(1, group.layout.cache // BLOCK), BLOCK)
                scheduler = Scheduler(pool, BUDGET, self.most, self.policy)
                engines.append(
                    SimulatedEngine(f"{role} {number}", scheduler, group.layout.curve, role)  # type: ignore[arg-type]
                )  # fmt: skip
        return engines

    def play(
        self, placement: EnginePlacement, load: Sequence[TimedRequest]
    ) -> PlacedLoad:
        """Simulate ``load`` on the engines of ``placement``; return how well they answer it."""
        requests = [ClusterRequest(*each) for each in load]
        caches = self.caches if placement.caches else None
        outcomes = simulate_cluster(
            self.engines(placement), requests, self.dispatch, self.link, caches=caches
        )
        seconds = max(outcome.end for outcome in outcomes) - load[0].time
        figures = latency_statistics(
            outcomes, seconds, (90, 99), self.limits.milliseconds
        )
        share = figures["request_goodput"] * seconds / len(load)
        offered = len(load) / max(load[-1].time - load[0].time, 1e-9)
        late = [
            f"{figures[f'p90_{name}_ms'] / 1000:.3g} s {what}"
            for name, what in (("ttft", "to the first token"), ("tpot", "per token"))
            if f"p90_{name}_ms" in figures
        ]
        reason = f"90 %: {', '.join(late)}"
        return PlacedLoad(placement, share, share * offered, reason, figures)

    def search(self, load: Sequence[TimedRequest]) -> list[PlacedLoad]:
        """Simulate placements of engines for ``load``, and return a list of those that were simulated, best first.
        Placements that answer nine tenths of ``load`` within the limits come first, ordered by their number of devices.
        The others follow, ordered by goodput. The search begins with the least number of engines of each role that the
        load needs. It adds an engine where a limit is missed most, until nine tenths are reached or all devices are
        used.
        """
        every = self._search_beside(load, 0)
        if self.caches is not None:
            every += self._search_beside(load, self.caches.engines)
        return sorted(every, key=_rank)

    def _search_beside(
        self, load: Sequence[TimedRequest], caches: int
    ) -> list[PlacedLoad]:
        """Search the placements beside this number of cache engines."""
        needs = [LayoutNeeds.of(self, layout, load) for layout in self.layouts]
        able = [need for need in needs if not need.reason]
        every = [
            PlacedLoad(
                EnginePlacement(EngineGroup(1, need.layout)), 0.0, 0.0, need.reason
            )
            for need in needs
            if need.reason and not caches
        ]
        for need in able:
            mixed = EngineGroup(_whole(need.both), need.layout)
            every += self._grow(load, EnginePlacement(mixed, caches=caches))
        pairs = product(able, able) if self.link else ()
        for reading, writing in pairs:
            prefill = EngineGroup(_whole(reading.prefill), reading.layout)
            decode = EngineGroup(_whole(writing.decode), writing.layout)
            every += self._grow(load, EnginePlacement(None, prefill, decode, caches))
        return every

    def _grow(
        self, load: Sequence[TimedRequest], placement: EnginePlacement
    ) -> Iterator[PlacedLoad]:
        if placement.devices > self.devices:
            why = (
                f"the load keeps so many engines busy; there are {self.devices} devices"
            )
            yield PlacedLoad(placement, 0.0, 0.0, why)
        while placement.devices <= self.devices:
            placed = self.play(placement, load)
            yield placed
            if placed.share >= ENOUGH:
                break
            placement = self._grown(placed)

    def _grown(self, placed: PlacedLoad) -> EnginePlacement:
        """Return the placement with an engine more, where a limit is missed most."""
        placement = placed.placement
        missed = [
            placed.figures.get(f"p90_{name}_ms", 0.0) / limit
            for name, limit in self.limits.milliseconds.items()
        ]
        role = "mixed" if placement.mixed else ("prefill", "decode")[missed[1] > missed[0]]  # fmt: skip
        more = _with_engine(placement, role)
        if more.devices > self.devices and placement.mixed is None:
            other = "prefill" if role == "decode" else "decode"
            return _with_engine(placement, other)
        return more


@dataclass(frozen=True)
class LayoutNeeds:
    """Number of engines of one layout that a load would keep fully busy, as a fraction. A placement needs at least so
    many engines: with 1.5, one engine does not suffice. The numbers are infinite if engines of this layout cannot serve
    the load.

    Attributes:
        ``layout``: the layout.
        ``prefill``: number of engines if they only process prompts.
        ``decode``: number of engines if they only compute the tokens after the first.
        ``both``: number of engines if they do both.
        ``reason``: why engines of this layout cannot serve the load; "": they can.
    """

    layout: EngineLayout
    prefill: float = math.inf
    decode: float = math.inf
    both: float = math.inf
    reason: str = ""

    @classmethod
    def of(
        cls, search: PlacementSearch, layout: EngineLayout, load: Sequence[TimedRequest]
    ) -> "LayoutNeeds":
        """Return how many engines of ``layout`` the ``load`` keeps busy. The numbers follow from the time of a step
        with one prompt, and of a step with as many texts as the limits of ``search`` allow.
        """
        prompt = round(sum(len(each.prompt) for each in load) / len(load))
        shared = shared_tokens(load)  # which need not be computed again
        longest = max(len(each.prompt) + each.tokens for each in load)
        if layout.cache < longest:
            why = f"its cache holds {layout.cache:,} tokens; a request has {longest:,}"
            return cls(layout, reason=why)
        tokens = sum(each.tokens - 1 for each in load) / len(load)
        rate = len(load) / max(load[-1].time - load[0].time, 1e-9)
        first = layout.curve(_step(1, shared, prompt - shared))
        limits = search.limits
        if first > limits.ttft:
            why = f"a prompt of {prompt:,} tokens takes {first:.3g} s, more than --ttft"
            return cls(layout, reason=why)
        context = prompt + round(tokens / 2)
        alone = layout.curve(_step(1, context, 1))
        if tokens and alone > limits.tpot:
            why = f"a token takes {alone:.3g} s without others, more than --tpot"
            return cls(layout, reason=why)
        most = min(search.most, max(1, layout.cache // (prompt + round(tokens))))
        fitting = max(
            n for n in range(1, most + 1)
            if n == 1 or layout.curve(_step(n, context, 1)) <= limits.tpot
        )  # fmt: skip
        each = layout.curve(_step(fitting, context, 1)) / fitting
        prefill, decode = rate * first, rate * tokens * each
        return cls(layout, prefill, decode, prefill + decode)


def shared_tokens(load: Sequence[TimedRequest]) -> int:
    """Return the mean number of tokens with which the prompts of ``load`` begin as an earlier one does, in whole cache
    blocks.
    """
    seen, shared = set[bytes](), 0
    for each in load:
        keys = [*chained_keys(b"", each.prompt[:-1], BLOCK)]
        shared += BLOCK * sum(key in seen for key in keys)
        seen.update(keys)
    return round(shared / len(load))


def _step(texts: int, before: int, tokens: int) -> ScheduledStep:
    """A step that computes ``tokens`` tokens of each of ``texts`` texts, behind ``before`` computed ones."""
    requests = [
        Request([0] * (before + tokens), before + tokens, computed=before)
        for _ in range(texts)
    ]
    return ScheduledStep(dict.fromkeys(requests, tokens), [])


def _whole(engines: float) -> int:
    return max(1, math.ceil(engines))


def _with_engine(placement: EnginePlacement, role: str) -> EnginePlacement:
    """Return ``placement`` with an engine more of the group that the field ``role`` holds."""
    group: EngineGroup = getattr(placement, role)
    more: Any = {role: group._replace(engines=group.engines + 1)}
    return replace(placement, **more)


def _rank(placed: PlacedLoad) -> tuple[float, float]:
    """Return what orders placements: the smallest rank is the best."""
    # a cache engine needs no device, but a host's memory
    needed = placed.placement.devices + placed.placement.caches / 2
    if placed.share >= ENOUGH:
        return -math.inf, needed - placed.share
    return -placed.goodput, needed


class PlacementWatch:
    """Watches whether another placement (set of engines) serves the recent load better than the one in use.

    The load changes with time. A placement is better if its goodput, the requests per second within all limits, is
    clearly higher.

    ``search``: finds and simulates other placements. ``current``: the placement in use. ``margin``: fraction by which
    the goodput of another placement must exceed the goodput of the present one. ``windows``: how many calls of
    :meth:`look` in a row must find this, so that a short peak changes nothing.
    """

    def __init__(
        self,
        search: PlacementSearch,
        current: EnginePlacement,
        margin: float = 0.1,
        windows: int = 2,
    ) -> None:
        self.search, self.current = search, current
        self.margin, self.windows = margin, windows
        #: Placements to choose from; none: those to which the search grows.
        self.among: Sequence[EnginePlacement] = ()
        self._better: list[EnginePlacement] = []

    def look(self, window: Sequence[TimedRequest]) -> EnginePlacement | None:
        """Return a better placement, which from then on counts as the current one. Return None if the current one
        stays.

        ``window``: the recent requests in the order of their arrival.
        """
        now = self.search.play(self.current, window)
        placed = [self.search.play(each, window) for each in self.among]
        best = min(placed or self.search.search(window), key=_rank)
        if best.goodput <= now.goodput * (1 + self.margin):
            self._better = []
            return None
        self._better.append(best.placement)
        if len(self._better) < self.windows:
            return None
        # the last window counts: earlier ones only say that the current placement has been the wrong one
        self._better, self.current = [], best.placement
        return self.current
