"""Engines of a cluster that lend each other blocks: longer texts than one cache holds, whatever engines come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cluster.inprocess import Cluster, InThread, alone, asked, until, written_by
from weft.cluster.cluster_messages import EngineBeat
from weft.cluster.engine_notices import order_loans
from weft.errors import UsageError
from weft.generate.backend import EngineLoad, TokenEvent

#: A text of 190 tokens, where a cache holds 120.
LONG = asked([(7 * i) % 97 for i in range(150)], 40)


def test_a_text_longer_than_any_cache_is_written() -> None:
    (expected,) = alone(LONG)
    with Cluster(3, tokens=120, lend=True) as cluster:
        router = cluster.router
        # what an engine has, and nine tenths of the two others
        assert router.facts.cache == 120 + 2 * 108
        assert asyncio.run(written_by(router, [LONG])) == [expected.written]
        loads = router.loads().values()
        assert max(load.used for load in loads) <= 30
        until(
            lambda: (
                not any(
                    each.loans.office.loans for each in cluster.engines if each.loans
                )
            )
        )
        with pytest.raises(UsageError, match=r"340 tokens .* cache of 336"):
            asyncio.run(written_by(router, [asked([1] * 300, 41)]))
    with Cluster(3, tokens=120) as apart, pytest.raises(UsageError, match="of 120"):
        asyncio.run(written_by(apart.router, [LONG]))


@pytest.mark.slow(3)
@pytest.mark.parametrize("how", ["killed", "drained"])
def test_a_lender_that_is_lost_or_drains_costs_no_token(how: str) -> None:
    """A text with blocks at another engine is computed again when that engine is gone, and a new one lends then."""
    (expected,) = alone(LONG)
    with Cluster(2, tokens=120, lend=True, slow=0.005) as cluster:
        events = 0

        def seen(event: TokenEvent) -> None:
            nonlocal events
            events += 1
            if events == 5:
                (lender,) = lenders(cluster)
                cluster.engines.append(cluster.add("new"))
                if how == "killed":
                    lender.kill()
                else:
                    lender.member.drain()

        written = asyncio.run(written_by(cluster.router, [LONG], seen))
        assert written == [expected.written]
        until(lambda: len(cluster.router.links) == 2)


def lenders(cluster: Cluster) -> list[InThread]:
    """The engines that hold blocks of others."""
    return [e for e in cluster.engines if e.loans and e.loans.office.loans]


def test_without_lenders_a_long_text_waits_and_is_refused_in_the_end() -> None:
    with Cluster(2, tokens=120, lend=True, slow=0.005, patience=0.5) as cluster:
        killed = []

        def seen(event: TokenEvent) -> None:
            for engine in cluster.engines:
                if not killed and engine.loans and engine.loans.office.loans:
                    killed.append(engine)
                    engine.kill()

        with pytest.raises(UsageError, match=r"189 tokens .* cache of 120"):
            asyncio.run(written_by(cluster.router, [LONG], seen))
        assert killed


def test_texts_that_wait_begin_when_another_engine_joins() -> None:
    """A long text fills an engine; part of it is lent, and nobody is preempted."""
    requests = [asked([(7 * i) % 97 for i in range(88)], 30)]
    requests += [asked([i, 5, 9] * 6, 12) for i in range(6)]
    expected = [g.written for r in requests for g in alone(r)]
    with Cluster(1, tokens=120, lend=True, slow=0.01) as cluster:
        router = cluster.router

        def seen(event: TokenEvent) -> None:
            if len(cluster.engines) == 1:  # all requests are at the first engine
                cluster.engines.append(cluster.add("e1"))

        assert asyncio.run(written_by(router, requests, seen)) == expected
        assert router.loads()["e0"].preemptions == 0


def test_the_ledger_is_what_engines_say() -> None:
    with Cluster(2, tokens=120, lend=True) as cluster:
        router = cluster.router
        link = router.links["e0"]
        load = EngineLoad(3, 2, 0, 20, 30, lent=4)
        beat = EngineBeat(
            load, 12, 0, keys=70, longest=15, seconds=(0.02, 0.001, 1e-6, 0.001)
        )
        link.note_beat(beat)
        ledger = link.ledger()
        assert (ledger.free, ledger.texts, ledger.waiting) == (3, 3, 2)
        assert (ledger.blocks, ledger.longest, ledger.asked) == (6, 15, 16)
        messages: list[Any] = []
        link.outbox.put = lambda head, payload=None: messages.append(head)  # type: ignore[method-assign]
        with router._lock:
            link.note_beat(beat)
            order_loans(router._able())
        assert [m["to"] for m in messages if m["kind"] == "lend"] == ["e1"]
