"""Engines of a cluster read cache blocks from each other's host memory, wherever their requests go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.cluster.inprocess import Cluster, alone, asked, until, written_by
from weft.cluster.dispatch_policy import DispatchRequest, EngineView

PROMPT = [(7 * i) % 97 for i in range(41)]


def test_what_one_engine_computed_another_reads() -> None:
    turn = {"name": "e0"}

    def chosen(views: Sequence[EngineView], request: DispatchRequest) -> str:
        return turn["name"]

    def ask(cluster: Cluster, *requests: Any) -> list[list[int]]:
        return asyncio.run(written_by(cluster.router, requests))

    with Cluster(3, chosen, memory=1 << 24) as cluster:
        first, second, third = cluster.engines
        request = asked(PROMPT)
        expected = [one.written for one in alone(request)]
        assert ask(cluster, request) == expected
        assert second.memories is not None and third.memories is not None
        peers = second.memories.peers
        until(
            lambda: len(peers) == 2 and any(len(p.keys) >= 10 for p in peers.values())
        )
        turn["name"] = "e1"
        assert ask(cluster, request) == expected
        assert second.engine.outside.fetched == 10  # type: ignore[union-attr]

        def given() -> dict[str, int]:
            sources = cluster.router.loads()["e1"].sources
            return {name: fetched for name, fetched, *_ in sources}

        until(lambda: given() == {"host": 0, "engines": 10})
        # the first one is lost; what the second has read from it, the third reads there
        first.kill()
        until(lambda: len(third.memories.peers) == 1)  # type: ignore[union-attr]
        (peer,) = third.memories.peers.values()
        until(lambda: len(peer.keys) >= 10)
        turn["name"] = "e2"
        assert ask(cluster, request) == expected
        assert third.engine.outside.fetched == 10  # type: ignore[union-attr]
        cluster.engines.remove(first)
