"""Dispatch by session: requests of the same conversation or user go to the same engine."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from weft.cluster.dispatch_policy import DispatchRequest, EngineView, freest
from weft.registry import register


@register(
    "dispatch-policy",
    "session",
    title="Requests of a session go to the same engine",
    paper="Thaler and Ravishankar 1998 (rendezvous hashing)",
    recipe="weft serve --checkpoint RUN --engines 2 --dispatch session",
    proof="tests/cluster/test_dispatch.py, tests/cluster/test_engine_router.py",
    figure="an engine that leaves moves its own sessions alone",
)
class BySession:
    """Dispatch policy of a server, called with the engines' states and a request: chooses always the same engine for a
    session (conversation or user; rendezvous hashing, Thaler and Ravishankar 1998).

    It is the engine for which a hash of the session's name and the engine's name is largest. An engine that joins or
    leaves therefore moves no sessions between the other engines. Requests without a session go to the engine with the
    most free cache blocks per answer.
    """

    def __call__(self, engines: Sequence[EngineView], request: DispatchRequest) -> str:
        if not request.session:
            return freest(engines, request)

        def weight(engine: EngineView) -> bytes:
            names = f"{request.session}\0{engine.name}"
            return blake2b(names.encode(), digest_size=8).digest()

        return max(engines, key=weight).name
