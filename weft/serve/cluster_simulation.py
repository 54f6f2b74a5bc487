"""Simulate a cluster of engines: each runs its own real scheduler, with step times from a curve.

As in :mod:`weft.serve.load_simulation`, the model is not run. Engines can differ in speed and role. An engine of the
role ``prefill`` hands each request over once it has a first token: its cache blocks travel over a link in rounds while
later parts of the prompt are computed, so that only the last part is waited for (DistServe, Zhong et al. 2024,
2401.09670). If no other engine has room for it, it goes on where it is until one has. As a real router, the simulated
one sees only what engines say with their tokens and signs of life, and what it has sent since. A request may be a stage
of a workflow that begins when earlier stages have ended. Events are played in the order of their times. The dispatch
policies are those of the real router. Cache engines keep the blocks of all engines
(:mod:`weft.serve.simulated_caches`).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import Literal, NamedTuple

from weft.cluster.balance import REST_S
from weft.cluster.cache_knowledge import CacheKnowledge
from weft.cluster.cluster_messages import BEAT_S
from weft.cluster.dispatch_policy import (
    DispatchPolicy,
    DispatchRequest,
    EngineView,
    freest,
    lightest,
)
from weft.cluster.engine_times import ClusterTimes
from weft.errors import WeftError
from weft.generate.keys import chained_keys, root_key
from weft.generate.phase_costs import Demand, PhaseCosts
from weft.generate.policies import Policy, SchedulingPolicy
from weft.generate.quotas import (
    PassTime,
    Phase,
    PhaseOrders,
    QuotaController,
    chosen_quota,
    phase_view,
)
from weft.generate.request import Request
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.generate.step_work import work_of
from weft.generate.workflow import Workflow
from weft.serve.block_link import BlockLink
from weft.serve.load_requests import RequestOutcome
from weft.serve.simulated_caches import (
    NOTICED,
    CacheStocks,
    SimulatedCaches,
    StockedBlocks,
)

Role = Literal["any", "prefill", "decode"]

#: Steps of an engine that end until an answer that it writes leaves on the router's order: that in which the order
#: comes, and that in which its full blocks travel.
ORDERED_STEPS = 2


class ClusterRequest(NamedTuple):
    """A request of a simulated load.

    Attributes:
        ``time``: earliest arrival, in seconds from the load's beginning.
        ``prompt``: token ids of the prompt.
        ``tokens``: number of tokens to generate.
        ``workflow``: the job of which the request is a stage; None: of none.
        ``after``: indices of requests in the load that must have ended before this one arrives.
    """

    time: float
    prompt: Sequence[int]
    tokens: int
    workflow: Workflow | None = None
    after: Sequence[int] = ()


@dataclass(frozen=True)
class SimulatedPhases:
    """How a simulated engine shares its device between two phases, reading prompts and writing texts, each with passes
    of its own (:mod:`weft.generate.split_phases`). ``costs``: predicts the time of a pass, in place of the engine's
    curve. ``controller``: chooses the share of the device for prompts; it must be new.
    """

    costs: PhaseCosts
    controller: QuotaController


@dataclass(frozen=True)
class SimulatedEngine:
    """An engine of a simulated cluster.

    Attributes:
        ``name``: its name, as dispatch policies see it.
        ``scheduler``: its scheduler, which must be new.
        ``curve``: function that returns the seconds of a step.
        ``role``: ``prefill`` for prompts up to their first token, ``decode`` for requests after their first token, or
            ``any`` for whole requests.
        ``fails``: time at which the engine fails for good, in seconds from the load's beginning.
        ``phases``: how prompts are computed in passes of their own beside those of texts; None: prompts and texts share
            steps.
    """

    name: str
    scheduler: Scheduler
    curve: Callable[[ScheduledStep], float]
    role: Role = "any"
    fails: float = float("inf")
    phases: SimulatedPhases | None = None


class ServiceDelays(NamedTuple):
    """Seconds that a service adds to the times of its engines, because of HTTP, its router and its processes.

    ``ask``: time from the sending of a request until its engine has it. ``tell``: time from the end of an engine's step
    until the client has the token. ``step``: time between two steps of an engine.
    """

    ask: float = 0.0
    tell: float = 0.0
    step: float = 0.0


NO_DELAYS = ServiceDelays()


@dataclass
class SimulatedRequest:
    """Result of one request of a simulated load.

    Attributes:
        ``outcome``: times of its tokens.
        ``engines``: names of the engines that computed it, in order.
        ``moved``: bytes that travelled between engines for it.
        ``stall``: seconds from its first token until another engine had all its blocks.
        ``fetched``: number of cache blocks that cache engines gave for it.
    """

    outcome: RequestOutcome
    engines: list[str] = field(default_factory=list)
    moved: float = 0.0
    stall: float = 0.0
    fetched: int = 0


@dataclass
class _Travel:
    """A ``request`` on its way to another engine. ``sent``: tokens whose blocks have been sent; ``there``: when they
    are at the other end of the link; ``computed``: of its tokens, when it has left; ``steps``: of its engine that end
    before it leaves (:data:`ORDERED_STEPS`).
    """

    request: Request
    source: "_Engine"
    to: "_Engine"
    sent: int = 0
    there: float = 0.0
    computed: int = 0
    steps: int = 0


@dataclass
class _Pass:
    """A pass of one of two phases. ``left``: the part that is still to be computed; ``rate``: parts per second since
    the time ``since``; ``changes``: how often the rate has been set.
    """

    step: ScheduledStep
    work: list[float]
    needs: Demand
    begun: float
    since: float
    left: float = 1.0
    rate: float = 0.0
    changes: int = 0
    share: float = 1.0
    beside: bool = False


@dataclass(eq=False)
class _Engine:
    """State of a simulated engine. ``known``: what the router knows of its cache; ``coming``: requests that will be
    handed over to it; ``arriving``: those that have come and are not taken in yet; ``link``: when the engine's link is
    free again; ``passes``: those under way of an engine with two phases; ``quota``: its quota; ``seconds``: of its last
    step.
    """

    setup: SimulatedEngine
    known: CacheKnowledge
    step: ScheduledStep | None = None
    coming: set[Request] = field(default_factory=set)
    arriving: list[_Travel] = field(default_factory=list)
    link: float = 0.0
    failed: bool = False
    passes: dict[Phase, _Pass] = field(default_factory=dict)
    quota: float = 0.5
    seconds: float = 0.0

    @property
    def scheduler(self) -> Scheduler:
        return self.setup.scheduler

    @property
    def requests(self) -> list[Request]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def has_room(self, request: Request) -> bool:
        """Whether ``request`` could run here at once, with its blocks beside those of all others that are here or
        coming, as far as the router knows.
        """
        rows = len(self.requests) + len(self.coming)
        coming = sum(map(self.blocks, self.coming))
        free = self.scheduler.pool.blocks - self.known.usage - coming
        fits = rows < self.scheduler.limit and self.blocks(request) <= free
        return fits and not self.failed

    def blocks(self, request: Request) -> int:
        """The blocks of a request's text."""
        return -(-len(request.ids) // self.scheduler.pool.size)

    def keys(self, request: Request) -> Iterator[bytes]:
        """The keys of the full blocks of a request's text."""
        scheduler = self.scheduler
        root = root_key(scheduler.version, request.adapter, request.tenant)
        return chained_keys(root, request.ids, scheduler.pool.size)


class ClusterSimulation:
    """Simulates how ``engines`` answer ``load``.

    ``dispatch``: chooses the engine for a new request. After an engine of the role ``prefill`` has processed a prompt,
    the engine with the least to do goes on (:func:`lightest`), as in the real router. ``link``: speed at which the
    request's cache blocks are then sent; None if no engine has that role. ``delays``: seconds that HTTP, router and
    processes add to the times at the engines; by default none. ``seed``: seed of the random moments at which engines
    tell the router how full they are. ``caches``: cache engines beside ``engines``; None: there are none.

    Raises :class:`WeftError` if no engine of the cluster can take a request.
    """

    def __init__(
        self,
        engines: Sequence[SimulatedEngine],
        load: Sequence[ClusterRequest],
        dispatch: DispatchPolicy = freest,
        link: BlockLink | None = None,
        delays: ServiceDelays = NO_DELAYS,
        seed: int = 0,
        caches: SimulatedCaches | None = None,
    ) -> None:
        self.now = 0.0
        self.load, self.dispatch, self.link = load, dispatch, link
        self.delays = delays
        self.engines = {
            setup.name: _Engine(setup, CacheKnowledge(setup.scheduler.pool.blocks))
            for setup in engines
        }
        self.times = ClusterTimes(list(self.engines))
        self.requests = [
            SimulatedRequest(RequestOutcome(each.time, prompt=len(each.prompt)))
            for each in load
        ]
        self._numbers: dict[Request, int] = {}
        self._travels: dict[Request, _Travel] = {}
        self._rests: dict[Request, float] = {}  # until when they do not go elsewhere
        self._beats = 0  # among the events
        self._open = [set(each.after) for each in load]
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._followers: list[list[int]] = [[] for _ in load]
        for i, each in enumerate(load):
            for before in set(each.after):
                self._followers[before].append(i)
            if not each.after:
                self._at(each.time, self._send_request, i)
        draw = Random(seed)
        self._kept = CacheKnowledge(0)  # by all cache engines, as the router knows it
        if caches is not None:
            self._attach_caches(caches)
        for engine in self.engines.values():
            self._beats += 1
            self._at(BEAT_S * draw.random(), self._beat, engine)
            if engine.setup.phases is not None:
                engine.scheduler.beside = True
                engine.quota = engine.setup.phases.controller.initial
            if isinstance(engine.scheduler.policy, SchedulingPolicy):
                engine.scheduler.policy.read_time(lambda: self.now)
            if engine.setup.fails < float("inf"):
                self._at(engine.setup.fails, self._fail, engine)

    def _attach_caches(self, setup: SimulatedCaches) -> None:
        """Let all engines keep their blocks at cache engines too, and fetch them there."""
        size = next(iter(self.engines.values())).scheduler.pool.size
        self._kept = CacheKnowledge(setup.engines * setup.blocks)
        stocks = CacheStocks(setup, size)
        for number, at in enumerate(setup.fails[: setup.engines]):
            self._at(at + NOTICED, self._lose_cache, stocks, number)
        for engine in self.engines.values():
            curve = None if engine.setup.phases is not None else engine.setup.curve
            engine.scheduler.outside = StockedBlocks(
                engine.scheduler,
                stocks,
                curve,
                lambda: self.now,
                self._at,
                self._note_fetch,
                partial(self._start, engine),
            )

    def _lose_cache(self, stocks: CacheStocks, number: int) -> None:
        """Let the router know that the cache engine ``number`` has failed, and that its blocks are lost."""
        self._kept.blocks -= stocks.setup.blocks
        self._kept.forget(stocks.keys_of(number))
        if not self._kept.blocks:
            self._kept = CacheKnowledge(0)

    def _note_fetch(self, request: Request, blocks: int) -> None:
        self.requests[self._numbers[request]].fetched += blocks

    def run(self) -> list[SimulatedRequest]:
        """Simulate the whole load. Return a list of the requests' results, in the order of the load."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        if lost := [i for i, each in enumerate(self.requests) if not each.outcome.end]:
            raise WeftError(
                f"{len(lost)} requests of the load, the first of them number {lost[0]}, never ended; "
                f"give engines with room for them"
            )
        return self.requests

    def _at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        event = (time, next(self._order), lambda: action(*arguments))
        heapq.heappush(self._events, event)

    def _beat(self, engine: _Engine) -> None:
        """Let the router hear how full an engine is; again and again, as long as anything else happens."""
        self._beats -= 1
        if engine.failed or len(self._events) == self._beats:
            return
        self._tell_usage(engine)
        self._beats += 1
        self._at(self.now + BEAT_S, self._beat, engine)

    @staticmethod
    def _tell_usage(engine: _Engine) -> None:
        """Let the router hear how full an engine is, as signs of life and the tokens of each step tell."""
        scheduler = engine.scheduler
        waiting = sum(engine.blocks(request) for request in scheduler.waiting)
        used = len(scheduler.pool.owners) + waiting
        engine.known.note_beat(used, engine.known.submitted)

    def _send_request(self, i: int) -> None:
        """Let the client send the request number ``i``."""
        self.requests[i].outcome.began = self.now
        self._at(self.now + self.delays.ask, self._ask, i)

    def _ask(self, i: int) -> None:
        """Submit the request number ``i``, which has come."""
        each = self.load[i]
        request = Request(
            list(each.prompt), len(each.prompt) + each.tokens - 1, workflow=each.workflow, asked_at=self.now
        )  # fmt: skip
        self._numbers[request] = i
        self._submit(request)

    def _submit(self, request: Request) -> None:
        engine = self._choose(request, ("any", "prefill"), self.dispatch)
        engine.scheduler.add(request)
        engine.known.submit(engine.blocks(request))
        engine.known.remember(engine.keys(request))
        stage = request.workflow.stage if request.workflow else ""
        self.times.begin(engine.setup.name, request, stage, len(request.ids), self.now)
        if engine.setup.role == "prefill":
            self._book(engine, request)  # as the real router does
        self._enter(request, engine)

    def _enter(self, request: Request, engine: _Engine) -> None:
        self.requests[self._numbers[request]].engines.append(engine.setup.name)
        self._start(engine)

    def _choose(
        self, request: Request, roles: Sequence[Role], dispatch: DispatchPolicy
    ) -> _Engine:
        """Ask ``dispatch`` for an engine of one of ``roles``; of any role if there is none."""
        alive = [engine for engine in self.engines.values() if not engine.failed]
        able = [engine for engine in alive if engine.setup.role in roles] or alive
        if not able:
            raise WeftError("all engines of the simulated cluster have failed")
        return self._pick(able, request, dispatch)

    def _pick(
        self, able: Sequence[_Engine], request: Request, dispatch: DispatchPolicy
    ) -> _Engine:
        """Ask ``dispatch`` for one of the engines ``able``."""
        job = request.workflow
        session, stage = (job.id, job.stage) if job else ("", "")
        asked = DispatchRequest(len(request.ids), session, 0)
        views = [self._view(engine, request, stage) for engine in able]
        return self.engines[dispatch(views, asked)]

    def _view(self, engine: _Engine, request: Request, stage: str) -> EngineView:
        pool, name = engine.scheduler.pool, engine.setup.name
        return EngineView(
            name,
            pool.blocks,
            engine.known.usage,
            len(engine.requests) + len(engine.coming),
            engine.known.known(engine.keys(request)) * pool.size,
            pool.size,
            self.times.seconds(name, stage),
            self.times.work(name),
            self._kept.known(engine.keys(request)) * pool.size,
        )

    def _start(self, engine: _Engine) -> None:
        """Start the next step of an engine that takes none."""
        if engine.step is not None or engine.failed:
            return
        self._admit(engine)
        if engine.setup.phases is not None:
            self._start_phases(engine, engine.setup.phases)
            return
        step = engine.scheduler.plan()
        if step.work:
            engine.step = step
            engine.seconds = engine.setup.curve(step) + self.delays.step
            self._at(self.now + engine.seconds, self._finish, engine, step)

    def _finish(self, engine: _Engine, step: ScheduledStep) -> None:
        """End a step: its requests get their tokens, blocks are sent, and the next step starts."""
        if engine.step is not step:
            return  # the engine has failed meanwhile
        engine.step = None
        self._count(engine, step)
        self._start(engine)

    def _count(self, engine: _Engine, step: ScheduledStep) -> None:
        """Let the requests of a step that has ended get their tokens, and send blocks."""
        engine.scheduler.advance(step)
        written = list[Request]()
        for request in step.work:
            drawn = not request.wanted
            if engine.setup.role == "prefill":
                self._send(engine, request, drawn)
            if drawn:
                self._write(engine, request)
                written.append(request)
        if written:
            self._tell_usage(engine)
        for request in written:
            travel = self._travels.get(request)
            # what lags by more than a step goes on here for another one
            if (
                travel
                and not travel.steps
                and travel.there - self.now <= engine.seconds
            ):
                self._leave(engine, request)

    # Two phases on one device.

    def _start_phases(self, engine: _Engine, phases: SimulatedPhases) -> None:
        """Start the next pass of each phase that has none, and divide the device anew."""
        scheduler = engine.scheduler
        orders = PhaseOrders(scheduler.policy, phases.controller)
        policies: dict[Phase, Policy] = {
            "prefill": orders.reading,
            "decode": orders.writing,
        }
        for phase, policy in policies.items():
            if phase in engine.passes:
                continue
            step = scheduler.plan(policy=policy)
            if step.work:
                scheduler.due |= step.work.keys()
                work = work_of(step)
                needs = phases.costs.demand(work)
                engine.passes[phase] = _Pass(step, work, needs, self.now, self.now)
        begun = {r for r in engine.requests if self._outcome(r).times}
        view = phase_view(scheduler, self.now, engine.quota, begun)
        engine.quota = chosen_quota(phases.controller, view)
        shares: dict[Phase, float] = {
            "prefill": engine.quota,
            "decode": 1 - engine.quota,
        }
        for phase, under_way in engine.passes.items():
            other = engine.passes.get("decode" if phase == "prefill" else "prefill")
            share, reads = 1.0, 0.0
            if other is not None:
                share = shares[phase]
                reads = phases.costs.reading(other.needs, 1 - share)
            under_way.left -= (self.now - under_way.since) * under_way.rate
            under_way.rate = 1 / phases.costs.seconds(under_way.needs, share, reads)
            under_way.since, under_way.changes = self.now, under_way.changes + 1
            under_way.share = min(share, under_way.share)
            under_way.beside |= other is not None
            ends = self.now + max(0.0, under_way.left) / under_way.rate
            self._at(ends, self._finish_pass, engine, phase, under_way, under_way.changes)  # fmt: skip

    def _finish_pass(
        self, engine: _Engine, phase: Phase, ended: _Pass, changes: int
    ) -> None:
        """End a pass, unless its rate has changed since this end was foreseen or the engine has failed."""
        if engine.passes.get(phase) is not ended or ended.changes != changes:
            return
        del engine.passes[phase]
        assert engine.setup.phases is not None
        seconds = self.now - ended.begun
        time = PassTime(phase, ended.work, seconds, ended.share, ended.beside)
        engine.setup.phases.controller.note_pass(time)
        engine.seconds = seconds
        self._count(engine, ended.step)
        self._start(engine)

    def _outcome(self, request: Request) -> RequestOutcome:
        return self.requests[self._numbers[request]].outcome

    def _tell(self, controller: QuotaController, outcome: RequestOutcome) -> None:
        """Tell ``controller`` of the last token of a request."""
        if len(outcome.times) == 1:
            controller.note_first(self.now, outcome.times[0] - outcome.began)
        else:
            controller.note_gap(self.now, outcome.times[-1] - outcome.times[-2])

    def _write(self, engine: _Engine, request: Request) -> None:
        """Give ``request`` its next token; it may end."""
        number = self._numbers[request]
        outcome = self.requests[number].outcome
        request.ids.append(0)
        heard = self.now + self.delays.tell
        outcome.times.append(heard)
        outcome.written, outcome.end = outcome.written + 1, heard
        if engine.setup.phases is not None:
            self._tell(engine.setup.phases.controller, outcome)
        name = engine.setup.name
        self.times.token(name, request, self.now)
        ended = len(request.ids) > request.most
        if self._kept.blocks and (ended or outcome.written == 1):
            self._kept.remember(engine.keys(request))
        if ended:
            engine.scheduler.remove(request)
            engine.known.free(engine.blocks(request))
            engine.known.remember(engine.keys(request))
            self._stay(request)
            self.times.end(name, request)
            self._end(number)
            self._at(self.now, self._relieve)  # orders come in steps that begin now

    def _end(self, number: int) -> None:
        """Ask for those requests that have waited for the end of request ``number``."""
        for i in self._followers[number]:
            self._open[i].discard(number)
            if not self._open[i]:
                heard = self.now + self.delays.tell
                self._at(max(heard, self.load[i].time), self._send_request, i)

    # Handing over.

    def _book(self, engine: _Engine, request: Request) -> None:
        """Choose where ``request`` will go on once it has a first token; it stays if nobody else has room for it."""
        able = [
            other
            for other in self.engines.values()
            if other is not engine
            and other.setup.role != "prefill"
            and other.has_room(request)
        ]
        if not able or request.most <= len(request.ids):
            return
        to = self._pick(able, request, lightest)
        self._travels[request] = _Travel(request, engine, to)
        to.coming.add(request)

    def _send(self, engine: _Engine, request: Request, whole: bool) -> None:
        """Send the blocks that a step has filled; with the first token the rest of them.

        A request that lost its blocks computes tokens again whose blocks have been sent.
        """
        if request not in self._travels:
            return
        travel, size = self._travels[request], engine.scheduler.pool.size
        travel.steps -= travel.steps > 0
        whole = whole and not travel.steps
        tokens = request.computed if whole else request.computed // size * size
        if tokens > travel.sent:
            if self.link is None:
                raise WeftError(
                    "engines of the role prefill hand requests over; give the simulation a link"
                )
            sent = (tokens - travel.sent) * self.link.token_bytes
            engine.link = max(engine.link, self.now) + sent / self.link.rate
            self.requests[self._numbers[request]].moved += sent
            travel.sent, travel.there = tokens, engine.link

    def _leave(self, engine: _Engine, request: Request) -> None:
        """Let a request that has its first token go to the engine that has its blocks."""
        travel = self._travels.pop(request)
        travel.computed = request.computed
        assert self.link is not None
        engine.scheduler.remove(request)
        comes = max(travel.there, self.now) + self.link.latency
        self.requests[self._numbers[request]].stall += comes - self.now
        self._at(comes, self._arrive, travel)

    def _stay(self, request: Request) -> None:
        """Stop sending a request's blocks."""
        if travel := self._travels.pop(request, None):
            travel.to.coming.discard(request)

    def _arrive(self, travel: _Travel) -> None:
        if travel.to.failed:
            self._go_back(travel)
            return
        travel.to.arriving.append(travel)
        self._start(travel.to)

    def _admit(self, engine: _Engine) -> None:
        """Take in requests that were handed over, as far as there is room; the others go on where they were."""
        arriving, engine.arriving = engine.arriving, []
        for travel in arriving:
            request, source = travel.request, travel.source
            request.computed = travel.computed
            if not _adopt(engine.scheduler, request):
                self._go_back(travel)
                continue
            engine.coming.discard(request)
            self._tell_usage(
                engine
            )  # a real router counts its blocks from its arrival on, too
            source.known.free(source.blocks(request))
            engine.known.remember(engine.keys(request))
            number = self._numbers[request]
            stage = request.workflow.stage if request.workflow else ""
            prompt, name = len(self.load[number].prompt), engine.setup.name
            self.times.end(source.setup.name, request, whole=False)
            self.times.begin(name, request, stage, prompt, self.now, False)
            self.requests[number].engines.append(name)

    def _relieve(self) -> None:
        """Let requests that have stayed where their prompt was read go on elsewhere, now that there may be room."""
        for engine in self.engines.values():
            if engine.setup.role == "prefill" and not engine.failed:
                for request in engine.requests:
                    rested = self._rests.get(request, 0.0) <= self.now
                    if request not in self._travels and rested:
                        self._book(engine, request)
                        if request in self._travels and self._outcome(request).times:
                            self._travels[request].steps = ORDERED_STEPS

    def _go_back(self, travel: _Travel) -> None:
        """Let a request that was not taken in go on where it was; what its cache there lacks is computed again."""
        request, source = travel.request, travel.source
        travel.to.coming.discard(request)
        request.computed = 0
        self._rests[request] = self.now + REST_S
        self._at(self.now + REST_S, self._relieve)
        if source.failed:
            self.times.end(source.setup.name, request, whole=False)
            self._submit(request)
            return
        source.scheduler.add(request)
        self._start(source)

    # Failures.

    def _fail(self, engine: _Engine) -> None:
        engine.failed, engine.step = True, None
        engine.passes.clear()
        self._at(self.now + NOTICED, self._rescue, engine)

    def _rescue(self, engine: _Engine) -> None:
        """Submit the requests of a failed engine again, with the tokens that they have."""
        arriving, engine.arriving = engine.arriving, []
        for travel in arriving:
            self._go_back(travel)
        for request in engine.requests:
            engine.scheduler.remove(request)
            self._stay(request)
            self.times.end(engine.setup.name, request, whole=False)
            self._submit(request)


def _adopt(scheduler: Scheduler, request: Request) -> bool:
    """Start ``request``, whose computed tokens have come from another engine; return False if there is no room."""
    placeholder = Request([], 0)
    scheduler.arriving.append(placeholder)
    blocks = -(-request.computed // scheduler.pool.size)
    if scheduler.expect(placeholder, blocks) and scheduler.adopt(placeholder, request):
        return True
    scheduler.give_up(placeholder)
    return False


def simulate_cluster(
    engines: Sequence[SimulatedEngine],
    load: Sequence[ClusterRequest],
    dispatch: DispatchPolicy = freest,
    link: BlockLink | None = None,
    delays: ServiceDelays = NO_DELAYS,
    seed: int = 0,
    caches: SimulatedCaches | None = None,
) -> list[RequestOutcome]:
    """Simulate how ``engines`` answer ``load``. Returns the outcome of each request, in the order of the load.

    ``dispatch``: chooses the engine for a new request. After an engine of the role ``prefill`` has processed a prompt,
    the engine with the least to do goes on (:func:`lightest`), as in the real router. ``link``: speed at which the
    request's cache blocks are then sent; None if no engine has that role. ``delays``: seconds that HTTP, router and
    processes add to the times at the engines; by default none. ``seed``: seed of the random moments at which engines
    tell the router how full they are. ``caches``: cache engines beside ``engines``; None: there are none.
    """
    played = ClusterSimulation(
        engines, load, dispatch, link, delays, seed, caches
    ).run()
    return [request.outcome for request in played]
