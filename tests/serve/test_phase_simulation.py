"""Two phases on a simulated device: times by the formulas, and no request or token is lost under any controller."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from weft.generate.block_pool import BlockPool
from weft.generate.phase_costs import PhaseCosts
from weft.generate.quotas import FixedQuota, quota_of
from weft.generate.scheduler import Scheduler
from weft.serve.block_link import BlockLink
from weft.serve.cluster_simulation import (
    ClusterRequest,
    ClusterSimulation,
    SimulatedEngine,
    SimulatedPhases,
    simulate_cluster,
)

#: A second of the whole device per token of compute, and per step of memory.
COSTS = PhaseCosts((0, 1, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0))


def engine(
    word: str | float, costs: PhaseCosts = COSTS, blocks: int = 1000, fails: float = float("inf"), name: str = "a",
) -> SimulatedEngine:  # fmt: skip
    scheduler = Scheduler(BlockPool(blocks, 4), 16, 8)
    controller = FixedQuota(word) if isinstance(word, float) else quota_of(word)
    phases = SimulatedPhases(costs, controller)
    return SimulatedEngine(name, scheduler, lambda step: 1 / 0, fails=fails, phases=phases)  # fmt: skip


def test_a_phase_alone_has_the_whole_device() -> None:
    (outcome,) = simulate_cluster(
        [engine(0.2)], [ClusterRequest(0.0, list(range(12)), 3)]
    )
    # 12 tokens and the step, then a token and the step each
    assert outcome.times == pytest.approx([13.0, 15.0, 17.0])


def test_a_prompt_beside_a_text_slows_both_by_quota_and_bandwidth() -> None:
    costs = PhaseCosts((0, 1, 0, 0, 0, 0), (0, 0, 1, 0, 0, 0))
    load = [ClusterRequest(0.0, [1, 2], 40), ClusterRequest(3.0, [5] * 8, 2)]
    first, second = simulate_cluster([engine(0.25, costs)], load)
    # the text's first token comes alone at 2 + 1; from then on its steps run beside the prompt
    assert first.times[0] == pytest.approx(3.0)
    reads = costs.reading(costs.demand([1, 8, 1, 1, 8, 36]), 0.25)
    writes = costs.reading(costs.demand([1, 1, 1, 1, 3, 3]), 0.75)
    assert first.times[1] - first.times[0] == pytest.approx(1 / 0.75 + (1 + reads))
    assert second.times[0] - 3.0 == pytest.approx(8 / 0.25 + (1 + writes) / 0.5)
    assert second.times[0] - 3.0 > 32


def test_blocks_that_lag_by_less_than_a_pass_are_waited_for() -> None:
    """The prompt's pass takes 9 s, and its blocks 4 s: no further token is written before they are sent."""
    reads = replace(engine(0.5), role="prefill")
    writes = SimulatedEngine("b", Scheduler(BlockPool(1000, 4), 16, 8), lambda step: 1.0, "decode")  # fmt: skip
    load = [ClusterRequest(0.0, list(range(8)), 3)]
    (played,) = ClusterSimulation([reads, writes], load, link=BlockLink(0.0, 2.0, 1.0)).run()  # fmt: skip
    assert played.engines == ["a", "b"] and played.moved == 8 and played.stall == 4
    assert played.outcome.times == pytest.approx([9.0, 14.0, 15.0])


def test_a_larger_quota_reads_faster_and_writes_slower() -> None:
    load = [ClusterRequest(0.0, [1, 2, 3], 200)]
    load += [ClusterRequest(10.0 + i, [i] * 12, 1) for i in range(5)]
    firsts, texts = [], []
    for quota in (0.1, 0.3, 0.6, 0.9):
        outcomes = simulate_cluster([engine(quota)], load)
        firsts.append(sum(each.times[0] - each.began for each in outcomes[1:]))
        texts.append(outcomes[0].times[20])
    assert firsts == sorted(firsts, reverse=True) and texts == sorted(texts)
    assert firsts[0] > 2 * firsts[-1] and texts[-1] > 2 * texts[0]


@pytest.mark.parametrize("word", ["0.3", "semi-pd:20,5", "nexus"])
@pytest.mark.parametrize("blocks", [1000, 30])
def test_every_request_ends_whole(word: str, blocks: int) -> None:
    """In a small cache, where requests lose their blocks, and after an engine has failed."""
    draw, load = random.Random(f"{word} {blocks}"), []
    for number in range(60):
        prompt = [draw.randrange(9) for _ in range(draw.choice([1, 9, 60]))]
        load.append(ClusterRequest(3.0 * number, prompt, draw.choice([1, 4, 20])))
    engines = [engine(word, blocks=blocks), engine(word, fails=90.0, name="b")]
    outcomes = simulate_cluster(engines, load)
    assert [each.written for each in outcomes] == [each.tokens for each in load]
    for each in outcomes:
        assert each.times == sorted(each.times)
