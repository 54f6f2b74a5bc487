"""Engines for the judges of ``weft search``: Weft's own scheduler, with the step times that the planner predicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from weft.generate.block_pool import BlockPool
from weft.generate.policies import exact_fill
from weft.generate.scheduler import Scheduler
from weft.generate.step_work import work_of
from weft.planner.machine import load_cluster
from weft.planner.planned_model import load_model
from weft.planner.serving_price import EnginePrice
from weft.serve.cluster_simulation import (
    ClusterRequest,
    SimulatedEngine,
    simulate_cluster,
)

if TYPE_CHECKING:
    from weft.cluster.dispatch_policy import DispatchPolicy
    from weft.generate.policies import Policy
    from weft.generate.scheduler import ScheduledStep

#: The model and the device whose step times are used.
MODEL, DEVICE = "llama3-8b", "h100"
#: Answers at a time, tokens of a step, and tokens of a block of a simulated engine.
LIMIT, BUDGET, BLOCK = 8, 2048, 16


@cache
def engine_price() -> EnginePrice:
    """Return an object that predicts the time of a step of the simulated engines, from a fixed model and device."""
    machine = load_cluster(DEVICE, 1).machine()
    return EnginePrice(load_model(MODEL).shape, machine)


def new_engines(
    speeds: Sequence[float], policy: Callable[[], Policy] = lambda: exact_fill
) -> list[SimulatedEngine]:
    """Return new simulated engines, one for each of the relative ``speeds``. ``policy``: function that makes the
    scheduling policy of each.
    """
    price = engine_price()

    def curve(speed: float, step: ScheduledStep) -> float:
        return price.step_seconds(*work_of(step)[1:]) / speed

    built = []
    for index, speed in enumerate(speeds):
        pool = BlockPool(price.cache_tokens // BLOCK, BLOCK)
        scheduler = Scheduler(pool, BUDGET, LIMIT, policy())
        built.append(
            SimulatedEngine(f"engine {index}", scheduler, partial(curve, speed))
        )
    return built


def at_load(
    requests: Sequence[ClusterRequest], speeds: Sequence[float], load: float
) -> list[ClusterRequest]:
    """Return ``requests`` with their times stretched, so that engines of these relative ``speeds`` are busy for about
    the fraction ``load`` of the time. The rate at which the engines can complete requests is measured by letting all
    of them come at once.
    """
    together = [request._replace(time=0.0) for request in requests]
    outcomes = simulate_cluster(new_engines(speeds), together)
    busy = max(outcome.end for outcome in outcomes)
    span = max(request.time for request in requests) or 1.0
    stretch = busy / load / span
    return [request._replace(time=request.time * stretch) for request in requests]


def mean_seconds(
    engines: Sequence[SimulatedEngine],
    load: Sequence[ClusterRequest],
    dispatch: DispatchPolicy | None = None,
) -> float:
    """Simulate ``load`` on ``engines``, and return the mean seconds from a request's arrival to the end of its answer.
    ``dispatch``: chooses the engine of each request; None: the one with the most free cache blocks.
    """
    outcomes = (
        simulate_cluster(engines, load)
        if dispatch is None
        else simulate_cluster(engines, load, dispatch)
    )
    waits = [
        outcome.end - each.time for outcome, each in zip(outcomes, load, strict=True)
    ]
    return sum(waits) / len(waits)
