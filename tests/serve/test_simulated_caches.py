"""Cache engines in the simulated cluster: a hit saves computing and costs the link, by the formulas."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.serve.test_cluster_simulation import SIZE, engine
from tests.serve.test_placement_search import ONE, curve, load
from weft.cli.serving_plan import ServingQuestion, serving_requests, start_lines
from weft.cluster.dispatch_policy import DispatchPolicy, dispatch_policy
from weft.generate.block_channel import NEWS_S
from weft.serve.block_link import BlockLink
from weft.serve.cluster_simulation import (
    ClusterRequest,
    ClusterSimulation,
    SimulatedRequest,
)
from weft.serve.load_simulation import TimedRequest
from weft.serve.placement_search import (
    ENOUGH,
    EngineGroup,
    EnginePlacement,
    PlacementSearch,
    ServiceLimits,
    shared_tokens,
)
from weft.serve.simulated_caches import CacheStocks, SimulatedCaches

#: 61 tokens are 15 full blocks; 16 tokens are computed in a step.
PROMPT = list(range(61))
#: Of the prompt at an engine that has 60 tokens of it, and without.
LAST, ALL = 1.2, 3 * 2.7 + 2.4


def link(rate: float) -> BlockLink:
    return BlockLink(latency=0.5, rate=rate, token_bytes=10.0)


def turns(names: Sequence[str]) -> DispatchPolicy:
    """A policy that takes these engines one after the other."""
    rest = iter(names)
    return lambda views, request: next(rest)


def played(
    rate: float, prompts: Sequence[Sequence[int]], names: str, caches: int = 1, blocks: int = 99, pause: float = 100.0,
    fails: Sequence[float] = (),
) -> list[SimulatedRequest]:  # fmt: skip
    times = [0.0] + [100.0 + pause * i for i in range(len(prompts) - 1)]
    requests = [ClusterRequest(at, each, 1) for at, each in zip(times, prompts, strict=True)]  # fmt: skip
    return ClusterSimulation(
        [engine(name) for name in "abc"], requests, turns(names),
        caches=SimulatedCaches(caches, blocks, link(rate), fails),
    ).run()  # fmt: skip


def seconds(request: SimulatedRequest) -> float:
    return request.outcome.times[0] - request.outcome.began


def test_what_one_engine_computed_another_fetches_over_the_link() -> None:
    first, second, again = played(1000, [PROMPT] * 3, "abb")
    assert (first.fetched, second.fetched, again.fetched) == (0, 15, 0)
    assert seconds(first) == pytest.approx(ALL)
    # latency, 600 bytes, and the last token
    assert seconds(second) == pytest.approx(0.5 + 0.6 + LAST)
    assert seconds(again) == pytest.approx(LAST)  # from the engine's own cache


@pytest.mark.parametrize(("rate", "fetched"), [(70, 15), (60, 0)])
def test_a_slow_link_is_not_used(rate: float, fetched: int) -> None:
    """Three steps and most of a fourth are spared, 9.2 s; 600 bytes take 0.5 s and 8.6 s, or 10 s."""
    _, second = played(rate, [PROMPT] * 2, "ab")
    assert second.fetched == fetched
    assert seconds(second) == pytest.approx(0.5 + 600 / rate + LAST if fetched else ALL)


def test_fetches_at_a_time_share_a_link_and_several_cache_engines_add_up() -> None:
    second, third = played(1000, [PROMPT] * 3, "abc", pause=0.0)[1:]
    assert third.fetched == second.fetched == 15
    assert seconds(third) == pytest.approx(seconds(second) + 0.6)
    divided = played(1000, [PROMPT] * 2, "ab", caches=3)[1]
    assert divided.fetched == 15 and 0.5 + 0.2 + LAST <= seconds(divided) < seconds(second)  # fmt: skip


def test_texts_compute_what_a_failed_cache_engine_had() -> None:
    """Also those whose blocks are on their way; the cache engines that are left get its share of new blocks."""
    second = played(1000, [PROMPT] * 2, "ab", fails=[100.7])[1]
    assert second.fetched == 0 and seconds(second) == pytest.approx(0.7 + ALL)
    second = played(1000, [PROMPT] * 2, "ab", fails=[50.0])[1]
    assert second.fetched == 0 and seconds(second) == pytest.approx(ALL)
    prompts = [PROMPT] * 3
    second, third = played(1000, prompts, "abc", caches=2, fails=[50.0])[1:]
    assert second.fetched < third.fetched == 15


def test_the_least_recently_used_blocks_go_and_news_takes_its_time() -> None:
    other = [9] * 61
    # there is room for one of both texts
    assert [each.fetched for each in played(1000, [PROMPT, other, PROMPT], "aab", blocks=15)] == [0, 0, 0]  # fmt: skip
    assert [each.fetched for each in played(1000, [PROMPT, other, PROMPT], "aab", blocks=30)] == [0, 0, 15]  # fmt: skip
    stocks = CacheStocks(SimulatedCaches(1, 9, link(1000)), SIZE)
    stocks.store(b"k", 2.0)
    there = 2.0 + SIZE * 10 / 1000 + 0.5 + NEWS_S
    assert [stocks.find([b"k", b"?"], at) for at in (there - 1e-9, there)] == [0, 1]


def test_the_router_counts_what_every_engine_can_fetch() -> None:
    """The engine that has a prompt's beginning has ten blocks more to hold than another, which can fetch it."""
    requests = [
        ClusterRequest(0.0, PROMPT, 1),
        ClusterRequest(100.0, [9] * 40, 90),
        ClusterRequest(105.0, [*PROMPT[:60], 7], 1),
    ]

    def engines(caches: SimulatedCaches | None) -> list[str]:
        simulation = ClusterSimulation(
            [engine(name) for name in "ab"], requests, dispatch_policy("cached-prefix"), caches=caches
        )  # fmt: skip
        return [each.engines[0] for each in simulation.run()]

    assert engines(None) == ["a", "a", "a"]
    assert engines(SimulatedCaches(1, 99, link(1000))) == ["a", "a", "b"]
    assert engines(SimulatedCaches(1, 99, link(1000), [60.0])) == ["a", "a", "a"]
    # with some blocks of the beginning lost the rest is of no use, though one cache engine is left
    assert engines(SimulatedCaches(2, 99, link(1000), [60.0])) == ["a", "a", "a"]


def test_a_cache_engine_saves_devices_where_prompts_begin_alike() -> None:
    """Each of 7 beginnings is computed once, and not once by each engine."""
    asked = ServingQuestion(1.0, 1.0, 8.0, 20, 2, shared=320, beginnings=8)
    requests = serving_requests(asked, 20)
    assert len({tuple(each.prompt[:320]) for each in requests}) == 7
    coming = [
        TimedRequest(i / 4, [*map(int, each.prompt)], each.tokens)
        for i, each in enumerate(requests)
    ]
    assert shared_tokens(coming) == 320 * 13 / 20 and shared_tokens(load(1, 50, 2)) == 0
    caches = SimulatedCaches(1, 10**5, BlockLink(0.001, 1e9, 1000.0))
    small = ONE._replace(cache=1_600, curve=curve(0.25))
    finding = PlacementSearch([small], 6, ServiceLimits(1.25, 1.0), caches=caches)
    best, *others = finding.search(coming)
    assert best.share >= ENOUGH and best.placement.caches == 1
    enough = [each.placement for each in others if each.share >= ENOUGH]
    without = [each.devices for each in enough if not each.caches]
    assert without and min(without) > best.placement.devices
    assert str(best.placement).endswith("whole requests, 1 for cache blocks")


def test_the_lines_that_start_a_cache_engine() -> None:
    mixed = EnginePlacement(EngineGroup(2, ONE), caches=1)
    assert start_lines("m", mixed, 8.0)[2:4] == ["engines = 3", "roles = { cache = 1 }"]
    apart = EnginePlacement(None, EngineGroup(1, ONE._replace(name="tp=2")), EngineGroup(1, ONE), 1)  # fmt: skip
    assert start_lines("m", apart, 8.0)[-1] == (
        "weft engine --checkpoint m --join HOST:8100 --role cache --host-cache 8    # 1 of these"
    )
