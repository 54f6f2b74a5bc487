"""Simulate when requests would get their tokens: the engine's own scheduler, with step times from a fitted linear
function.

The model is not run, so that policies, cache sizes and loads are compared within seconds. The function is fitted to
steps of a real engine. It is linear in a step's work: its tokens, its texts, the rows of logits, the keys that are
read, and the products of queries and keys.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

from weft.generate.engine import Engine
from weft.generate.policies import Policy
from weft.generate.request import Request
from weft.generate.sampling import GREEDY
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.generate.step_work import work_of
from weft.serve.load_requests import RequestOutcome


class TimedRequest(NamedTuple):
    """A request of a load. ``time``: when it arrives, in seconds from the load's beginning; ``prompt``: its token ids;
    ``tokens``: number of tokens to generate.
    """

    time: float
    prompt: Sequence[int]
    tokens: int


def play_load(
    load: Sequence[TimedRequest],
    add: Callable[[int], None],
    step: Callable[[], tuple[float, list[int]]],
) -> list[RequestOutcome]:
    """Add the requests of ``load`` at their arrival times, and run steps until all are done. Return a list of the
    outcome of each request.

    ``add(i)`` submits request ``i``. ``step()`` runs one step, and returns its seconds and the indices of the requests
    that got a token.
    """
    outcomes = [RequestOutcome(each.time, prompt=len(each.prompt)) for each in load]
    order, clock, open_ = (
        sorted(range(len(load)), key=lambda i: load[i].time),
        0.0,
        set[int](),
    )
    while order or open_:
        if not open_:
            clock = max(clock, load[order[0]].time)  # there is nothing to do until then
        while order and load[order[0]].time <= clock:
            open_.add(order[0])
            add(order.pop(0))
        seconds, numbers = step()
        clock += seconds
        for i in numbers:
            outcome = outcomes[i]
            outcome.times.append(clock)
            outcome.written, outcome.end = outcome.written + 1, clock
            if outcome.written == load[i].tokens:
                open_.remove(i)
    return outcomes


def simulate_load(
    scheduler: Scheduler,
    load: Sequence[TimedRequest],
    curve: Callable[[ScheduledStep], float],
) -> list[RequestOutcome]:
    """Simulate ``load`` on an engine with this ``scheduler``, without a model. Return a list of the outcome of each
    request, in simulated seconds. ``curve``: returns the seconds of a step.
    """
    numbers: dict[Request, int] = {}

    def add(i: int) -> None:
        request = Request(
            list(load[i].prompt), len(load[i].prompt) + load[i].tokens - 1
        )
        numbers[request] = i
        scheduler.add(request)

    def step() -> tuple[float, list[int]]:
        planned = scheduler.plan()
        seconds = curve(planned)
        scheduler.advance(planned)
        ended = [request for request in planned.work if not request.wanted]
        for request in ended:
            request.ids.append(0)
            if len(request.ids) > request.most:
                scheduler.remove(request)
        return seconds, [numbers[request] for request in ended]

    return play_load(load, add, step)


def measure_load(
    engine: Engine,
    load: Sequence[TimedRequest],
    clock: Callable[[], float] = perf_counter,
) -> tuple[list[RequestOutcome], list[tuple[list[float], float]]]:
    """Run ``load`` on ``engine``, a real engine with a model. Returns the outcome of each request, and the measured
    time of each step.

    The first result is a list of outcomes. The second is a list with a pair for each step: numbers that describe the
    step's work, and its seconds. A :class:`Curve` can be fitted to the second list.

    ``clock``: function that returns seconds, by which steps are timed; with ``time.thread_time``, other programs and
    threads do not count.
    """
    numbers: dict[Request, int] = {}
    samples: list[tuple[list[float], float]] = []

    def add(i: int) -> None:
        (generation,) = engine.submit(load[i].prompt, load[i].tokens, GREEDY)
        numbers[generation] = i

    def step() -> tuple[float, list[int]]:
        begun = clock()
        written = engine.step()
        samples.append((work[-1], clock() - begun))
        return samples[-1][1], [numbers[generation.request] for generation in written]

    with noting_work(engine) as work:
        return play_load(load, add, step), samples


@contextmanager
def noting_work(engine: Engine) -> Iterator[list[list[float]]]:
    """Return a context in which the work of each step that ``engine`` plans is recorded. It yields a list that gets one
    entry per step: six numbers that describe the work (:func:`work_of`).
    """
    work: list[list[float]] = []
    plan = engine.scheduler.plan

    def planning(depth: int = 1, policy: Policy | None = None) -> ScheduledStep:
        planned = plan(depth, policy)
        work.append(work_of(planned))  # before it is done
        return planned

    engine.scheduler.plan = planning  # type: ignore[method-assign]
    try:
        yield work
    finally:
        engine.scheduler.plan = plan  # type: ignore[method-assign]
