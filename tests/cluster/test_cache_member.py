"""Cache engines of a cluster: what one engine computes is kept there, and every other one reads it by key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.inprocess import (
    CacheInThread,
    Cluster,
    InThread,
    alone,
    asked,
    until,
    written_by,
)
from weft.cluster.cluster_settings import ClusterRoles, ClusterSettings
from weft.cluster.dispatch_policy import DispatchRequest, EngineView
from weft.errors import UsageError
from weft.generate.cache_role import open_stock
from weft.generate.outside_cache import OutsideCache

PROMPT = [(7 * i) % 97 for i in range(41)]
#: Full blocks of the prompt, and bytes of one: 2 x layers x kv heads x head dim x tokens x width.
BLOCKS, BYTES = 10, 2 * 2 * 2 * 8 * 4 * 4


class Turn:
    """A dispatch policy that takes the engine of this ``name``."""

    name = "e0"
    kept: Sequence[int] = ()  # tokens that cache engines are taken to have, by engine

    def __call__(self, views: Sequence[EngineView], request: DispatchRequest) -> str:
        self.kept = [view.kept for view in views]
        return self.name


@contextmanager
def served(
    turn: Turn, caches: int = 1, folder: Path | None = None, **more: Any
) -> Iterator[tuple[Cluster, list[CacheInThread]]]:
    with Cluster(2, turn, **more) as cluster:
        keepers = [CacheInThread(cluster.endpoint, f"c{i}", folder) for i in range(caches)]  # fmt: skip
        until(lambda: len(cluster.router.links) == 2 + caches)
        members = [engine.member for engine in cluster.engines]
        until(lambda: all(m.caches and len(m.caches.peers) == caches for m in members))
        yield cluster, keepers
        for keeper in keepers:
            if keeper.thread.is_alive():
                keeper.kill()


def ask(cluster: Cluster, request: Any) -> list[list[int]]:
    return asyncio.run(written_by(cluster.router, [request]))


def knows(engine: InThread, blocks: int = BLOCKS) -> bool:
    """Whether the engine knows of so many blocks at the cache engines."""
    caches = engine.member.caches
    return caches is not None and sum(len(p.reader.keys) for p in caches.peers.values()) >= blocks  # fmt: skip


def fetched_by(engine: InThread) -> int:
    outside = engine.engine.outside
    assert isinstance(outside, OutsideCache)
    return outside.fetched


@pytest.mark.parametrize("caches", [1, 3])
def test_blocks_are_kept_for_all_and_bytes_are_those_of_the_formula(caches: int) -> None:  # fmt: skip
    turn, request = Turn(), asked(PROMPT, 4)
    expected = [one.written for one in alone(request)]
    with served(turn, caches) as (cluster, keepers):
        first, second = cluster.engines
        assert ask(cluster, request) == expected and turn.kept == [0, 0]
        until(lambda: knows(second))
        first.kill()
        until(lambda: "e0" not in cluster.router.links)
        turn.name = "e1"
        assert ask(cluster, request) == expected and turn.kept == [len(PROMPT) - 1]
        assert fetched_by(second) == BLOCKS
        cluster.engines.remove(first)
        usages = [keeper.stock.usages()[0] for keeper in keepers]
        stored = sum(usage.stored for usage in usages)
        assert stored >= BLOCKS
        assert sum(usage.stored_bytes for usage in usages) == stored * BYTES
        assert sum(usage.fetched_bytes for usage in usages) == BLOCKS * BYTES
        # by their keys, which are drawn anew for each service: seldom one of three gets none, never one gets all
        assert sum(usage.stored > 0 for usage in usages) >= min(caches, 2)
        loads = cluster.router.loads()
        assert [loads[f"c{i}"].role for i in range(caches)] == [3] * caches
        until(lambda: sum(cluster.router.loads()[f"c{i}"].used for i in range(caches)) == stored)  # fmt: skip


def test_without_its_cache_engine_a_service_computes(tmp_path: Path) -> None:
    turn, request = Turn(), asked(PROMPT, 4)
    expected = [one.written for one in alone(request)]
    with served(turn, folder=tmp_path) as (cluster, (keeper,)):
        second = cluster.engines[1]
        assert ask(cluster, request) == expected
        until(lambda: knows(second))
        # it still answers the router, and stands still in the middle of a question: nobody waits longer than the limit
        outside, fetch = second.engine.outside, keeper.stock.fetch
        assert isinstance(outside, OutsideCache)
        usual, outside.seconds = outside.seconds, 0.1
        keeper.stock.fetch = lambda keys: Future()  # type: ignore[method-assign]
        turn.name = "e1"
        assert ask(cluster, request) == expected
        assert (outside.late, outside.fetched) == (1, 0)
        outside.seconds, keeper.stock.fetch = usual, fetch  # type: ignore[method-assign]
        turn.name, other = "e0", asked(PROMPT[1:], 4)
        assert ask(cluster, other) == [one.written for one in alone(other)]
        until(lambda: knows(second, 2 * BLOCKS - 1))
        # it gives no block any more
        assert keeper.member._channel is not None
        keeper.member._channel.close()
        turn.name = "e1"
        assert ask(cluster, other) == [one.written for one in alone(other)]
        assert fetched_by(second) == 0
        keeper.kill()
        until(lambda: "c0" not in cluster.router.links)
        until(lambda: not any(e.member.caches.peers for e in cluster.engines if e.member.caches))  # fmt: skip
        assert ask(cluster, request) == expected and turn.kept == [0, 0]
        assert ask(cluster, asked(PROMPT[::-1], 4)) == [
            one.written for one in alone(asked(PROMPT[::-1], 4))
        ]
        # what it had written to files is there for the next one
        again = CacheInThread(cluster.endpoint, "c1", tmp_path)
        until(lambda: knows(second))
        third = cluster.add("e2")
        cluster.engines.append(third)
        until(lambda: knows(third))
        turn.name = "e2"
        assert ask(cluster, request) == expected
        assert fetched_by(third) == BLOCKS
        again.member.drain()
        again.thread.join(20)
        assert not again.thread.is_alive()
        again.kill()
        assert "engine c1 has left" in cluster.said


def test_roles_with_cache_engines_need_one_that_computes() -> None:
    roles = ClusterRoles(prefill=1, cache=2)
    assert ClusterSettings(engines=4, roles=roles).parts() == ["prefill", "cache", "cache", ""]  # fmt: skip
    with pytest.raises(UsageError, match="none computes"):
        ClusterSettings(engines=2, roles=ClusterRoles(cache=2)).parts()


def test_a_memory_that_is_smaller_than_a_block_is_one_line() -> None:
    said: list[str] = []
    stock = open_stock(99, None, "m", 0, said.append)
    assert [stock.store(key, bytes(100)) for key in (b"a", b"b")] == [True, True]
    assert not stock.keys() and len(said) == 1
    assert said[0].startswith("a block of 100 bytes does not fit into 99 bytes of memory; give more")  # fmt: skip
    stock.close()
