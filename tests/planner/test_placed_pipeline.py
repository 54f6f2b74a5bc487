"""Pipelines with places: network cards that ranks share, rings over unlike nodes, tables that two stages hold."""

from dataclasses import replace
from typing import Any

import pytest

from weft.planner.cost import Plan, Roofline, schedule_number
from weft.planner.engine_constants import ENGINES
from weft.planner.group_speed import TCP, group_speeds, nodes_by_group
from weft.planner.machine import Cluster, find_device, machine_of, validated_cluster
from weft.planner.placed_pipeline import BUFFER, PlacedPipeline
from weft.schedule.build import build
from weft.schedule.stages import Stage
from weft.shapes.shape import shape_of_sizes

SHAPE = shape_of_sizes(8, embed=1024, heads=16, ffn=4096, vocab=50304, gated=0, tied=1)
ENGINE = replace(ENGINES["megatron-2021"], network=1.0, jitter=0.0, gradient=4.0)


def cluster_of(**words: Any) -> Cluster:
    groups = [
        {"device": device, "count": count, "network": 0.25, "link": 20, **words}
        for device, count in (("V100", 8), ("T4", 4))
    ]
    tree = {"per_node": 4, "across": 0.25, "network_latency": 1e-6, "groups": groups}
    return validated_cluster(tree | {"link_latency": 1e-6}, "test")


def placed(plan: Plan, nodes: list[list[int]], **words: Any) -> PlacedPipeline:
    pp = len(nodes)
    each = 8 // pp
    stages = [
        Stage(range(i * each, (i + 1) * each), i == 0, i == pp - 1) for i in range(pp)
    ]
    return PlacedPipeline(
        SHAPE, ENGINE, cluster_of(**words), plan, nodes, stages, range(pp)
    )


def plan_of(**sizes: int) -> Plan:
    usual = {"zero": 0, "batch": 16, "seq": 1024, "schedule": schedule_number("1f1b")}
    return Plan(**(usual | sizes))


def test_ranks_of_a_node_share_its_card() -> None:
    alone = placed(plan_of(pp=2), [[0], [1]])
    shared = placed(plan_of(pp=2, dp=4), [[0] * 4, [1] * 4])
    speeds = group_speeds(SHAPE, ENGINE, alone.cluster, alone.plan)
    assert nodes_by_group(alone.cluster) == [0, 0, 1]
    places = [speeds[0], speeds[0]]
    sent = 2 * 1024 * 1024
    assert alone.hops(places, 0)[0, 1] == pytest.approx(sent / 1e9, rel=1e-6)
    assert shared.hops(places, 0)[0, 1] == pytest.approx(4 * sent / 1e9, rel=1e-6)
    inside = placed(plan_of(pp=2, tp=2), [[0], [0]])
    assert inside.hops(places, 0)[1, 0] == pytest.approx(sent / 40e9, rel=1e-6)


def test_cards_of_two_kinds_and_ethernet_talk_tcp() -> None:
    one = placed(plan_of(pp=2), [[0], [2]])
    engine = replace(ENGINE, network=0.5)
    seconds = {}
    for card in (None, "roce", "ethernet"):
        pipeline = replace(
            one, engine=engine, cluster=cluster_of(**({"card": card} if card else {}))
        )
        speeds = group_speeds(SHAPE, engine, pipeline.cluster, pipeline.plan)
        seconds[card] = pipeline.hops([speeds[0], speeds[1]], 0)[0, 1]
    assert seconds[None] == seconds["roce"]
    assert seconds["ethernet"] / seconds[None] == pytest.approx(0.5 / TCP, rel=1e-6)
    groups = [
        group.model_copy(update={"card": card})
        for group, card in zip(one.cluster.groups, ("infiniband", "roce"), strict=True)
    ]
    mixed = one.cluster.model_copy(update={"groups": tuple(groups)})
    pipeline = replace(one, engine=engine, cluster=mixed)
    speeds = group_speeds(SHAPE, engine, mixed, pipeline.plan)
    assert pipeline.hops([speeds[0], speeds[1]], 0)[0, 1] == seconds["ethernet"]


def test_a_ring_over_unlike_nodes_is_as_fast_as_its_slowest_card() -> None:
    plan = plan_of(dp=12)
    step = placed(plan, [[0] * 4 + [1] * 4 + [2] * 4]).step(
        [build("1f1b", 1, 2, None)], checked=False
    )
    weights = 8 * SHAPE.dense_weights + SHAPE.table
    assert step.gradients == pytest.approx(2 * 11 / 12 * 4 * weights / 1e9, rel=1e-6)
    # the slowest replica is on a T4; all are as fast as it
    fast = placed(replace(plan, dp=8), [[0] * 4 + [1] * 4]).step(
        [build("1f1b", 1, 2, None)], checked=False
    )
    slower = step.seconds - step.gradients - (fast.seconds - fast.gradients)
    assert slower > 0.5 * (step.seconds - step.gradients)


def test_first_and_last_stage_sum_the_table_that_both_hold() -> None:
    tables = [build("1f1b", 2, 8, None)]
    tied = placed(plan_of(pp=2, dp=2), [[0, 0], [1, 1]])
    untied = replace(tied, shape=replace(SHAPE, tied=0))
    more = tied.step(tables).gradients - untied.step(tables).gradients
    assert more == pytest.approx(2 * 2 * SHAPE.table / 1e9, rel=1e-6)


def test_programs_with_paired_calls_wait_for_their_transfers() -> None:
    # eight sequences are four times what NCCL's buffer takes at once, one is half of it
    for size, hop_count in ((8, 2 + 2 * (1 - BUFFER / 2**24)), (1, 2)):
        plan = plan_of(pp=2, micro_batch=size, batch=16 * size)
        waits = placed(plan, [[0], [1]])
        hop = size * 2 * 1024 * 1024 / 1e9
        freely = replace(waits, engine=replace(ENGINE, blocks=0.0))
        tables = [build("1f1b", 2, 16, None)]
        more = waits.step(tables, checked=False).seconds
        more -= freely.step(tables, checked=False).seconds
        each = hop_count / 2 * hop
        assert 14 * each < more < 18 * each


def test_masks_and_whole_gradients_are_sent_by_every_tp_rank() -> None:
    plain = placed(plan_of(pp=2, tp=4, micro_batch=2), [[0], [1]])
    sent = 2 * 2 * 1024 * 1024
    assert (plain.sent(0, 1), plain.sent(1, 0)) == (sent, sent)
    old = replace(plain, engine=replace(ENGINE, masks=1.0, whole_gradients=1.0))
    assert (old.sent(0, 1), old.sent(1, 0)) == (sent + 4 * 2 * 1024**2, 4 * sent)


def test_layers_that_were_timed_take_the_place_of_presets() -> None:
    pipeline = placed(plan_of(pp=2), [[0], [1]])
    engine = replace(ENGINE, blocks=1.0)
    speeds = group_speeds(SHAPE, engine, pipeline.cluster, pipeline.plan)
    table = build("1f1b", 2, 16, None)
    same = replace(pipeline, engine=engine, measured=speeds)
    assert same.step([table]) == replace(pipeline, engine=engine).step([table])
    slow = [replace(s, times=replace(s.times, forward=1.0)) for s in speeds]
    # 16 microbatches of 4 layers in each rank, and one more pass of the other rank
    step = replace(pipeline, measured=slow).step([table])
    assert 4 * 17 < step.seconds < 4 * 17 + 1


def test_float32_has_wider_elements_and_its_own_rate() -> None:
    device = find_device("T4")
    short, wide = (machine_of(device, bits) for bits in (16, 32))
    assert (short.peak, wide.peak) == (65e12, 8.1e12)
    assert machine_of(find_device("A100-80GB"), 32).peak == 156e12
    parts = [
        Roofline(SHAPE, machine, plan_of(pp=2, tp=2, bits=bits), ENGINE)
        for machine, bits in ((short, 16), (wide, 32))
    ]
    assert parts[1].exchanges().tp == pytest.approx(2 * parts[0].exchanges().tp, rel=0.1)  # fmt: skip
    assert parts[1].pointwise() == 2 * parts[0].pointwise()
    assert parts[1].attention() > 3 * parts[0].attention()
