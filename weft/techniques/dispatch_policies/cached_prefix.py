"""Dispatch by prefix: a request goes where most of its prompt is in the cache, unless that engine is too busy."""

from __future__ import annotations

from collections.abc import Sequence

from weft.cluster.dispatch_policy import DispatchRequest, EngineView
from weft.registry import register

#: The cost of fetching a block from a cache engine, in blocks that are computed.
FETCHED = 0.25


@register(
    "dispatch-policy",
    "cached-prefix",
    title="Requests go to the engine that has their prefix in its cache",
    paper="Srivatsa et al. 2024 (Preble); NVIDIA Dynamo's KV router",
    recipe="weft serve --checkpoint RUN --engines 2 --dispatch cached-prefix",
    proof="tests/cluster/test_dispatch.py, tests/cluster/test_engine_router.py",
    figure="prompts of a shared prefix are computed by the engine that has it",
)
class ByPrefix:
    """Dispatch policy of a server, called with the engines' states and a request: chooses the engine for which the
    request costs least, in cache blocks (Preble, Srivatsa et al. 2024; NVIDIA Dynamo's KV router). The cost has two
    parts. One is the number of the prompt's blocks that the engine's cache does not hold; those that a cache engine
    holds count a quarter. The other is the engine's virtual usage minus that of the least used engine. Virtual usage is
    the number of blocks that an engine's requests own, plus the number that its waiting requests will need.
    """

    def __call__(self, engines: Sequence[EngineView], request: DispatchRequest) -> str:
        least = min(engine.usage for engine in engines)

        def cost(engine: EngineView) -> float:
            fetched = max(0, engine.kept - engine.known)
            computed = request.tokens - engine.known - fetched
            lacking = (computed + FETCHED * fetched) / engine.size
            return lacking + engine.usage - least

        return min(engines, key=lambda e: (cost(e), e.answers, e.name)).name
