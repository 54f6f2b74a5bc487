"""Dispatch by workload: a request goes where it is fast, unless that engine has too much to do."""

from __future__ import annotations

from collections.abc import Sequence

from weft.cluster.dispatch_policy import DispatchRequest, EngineView
from weft.registry import register

#: Weight of speed against load; `bench/workflows.py` compares others.
WEIGHT = 0.2


@register(
    "dispatch-policy",
    "balanced",
    title="Requests go where they are fast and the engine has little to do",
    paper="HexGen-Text2SQL, 2505.05286",
    recipe="weft serve --checkpoint RUN --engines 2 --dispatch balanced",
    proof="tests/techniques/test_balanced.py, tests/cluster/test_dispatch.py, tests/serve/test_cluster_simulation.py",
    figure=(
        "an engine that is four times as fast gets most requests; work falls when requests end; simulated with "
        "urgency, 0.641 of the deadlines are met, with the least loaded engine 0.666 (`bench/workflows.py`)"
    ),
)
class ByWorkload:
    """Dispatch policy of a server, called with the engines' states and a request: chooses the engine with the largest
    ``weight * t_min / t - (1 - weight) * work / mean`` (HexGen-Text2SQL, 2505.05286).

    ``weight``: a number from 0 to 1; the larger, the more speed counts against workload. ``t``: the estimated time of
    the request on an engine. ``t_min``: the smallest of these times over all engines. ``work``: the estimated seconds
    of all requests that an engine has not ended yet. ``mean``: the mean ``work`` of all engines. Without any work, the
    fastest engine is chosen.
    """

    def __init__(self, weight: float = WEIGHT) -> None:
        self.weight = weight

    def __call__(self, engines: Sequence[EngineView], request: DispatchRequest) -> str:
        fastest = min(engine.seconds for engine in engines)
        mean = sum(engine.work for engine in engines) / len(engines)

        def gain(engine: EngineView) -> float:
            load = engine.work / mean if mean else 0.0
            return self.weight * fastest / engine.seconds - (1 - self.weight) * load

        return min(engines, key=lambda e: (-gain(e), e.answers, e.name)).name
