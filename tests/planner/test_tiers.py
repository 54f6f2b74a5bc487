"""Secondary partitions and offloading in the planner: by formula, chosen where they must be, and not elsewhere."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Command
from weft.errors import UsageError
from weft.planner.cost import (
    AWAY,
    FILE,
    HOST,
    Plan,
    axis_link,
    gather,
    passes,
    step_time,
)
from weft.planner.engine_constants import ENGINES, EngineConstants
from weft.planner.explain import layout_verdict
from weft.planner.finalists import finalists
from weft.planner.layout_search import USABLE, WORTH, Pin, SearchResult, search
from weft.planner.machine import CLUSTERS, DEVICES, Cluster, load_cluster, machine_of
from weft.planner.memory import (
    in_flight,
    layer_bytes,
    logit_bytes,
    peak_memory,
    rank_memory,
)
from weft.planner.planned_model import SHAPES
from weft.planner.planned_recipe import layout_tree
from weft.planner.tiers import UPDATE, planned_time, room_away, with_tiers
from weft.recipe import Memory, load_recipe

LLAMA = SHAPES["llama3-8b"]
WEFT = ENGINES["weft"]


def find(model: str, batch: int, seq: int, *pins: str, **cluster: Any) -> SearchResult:
    demands = [Pin.parse(pin) for pin in pins]
    return search(SHAPES[model], Cluster(**cluster), WEFT, batch, seq, pins=demands)


# --- secondary partitions


def test_backward_gathers_among_the_nearest() -> None:
    machine, engine = (
        machine_of(DEVICES["A100-40GB"], network=3),
        replace(EngineConstants(), exposed_dp=1.0),
    )
    plan = Plan(shard=64, zero=3, batch=256, micro_batch=1, seq=4096)
    far, near = (
        step_time(LLAMA, machine, p, engine) for p in (plan, replace(plan, secondary=8))
    )
    own, units, passes_ = 2 * (32 * LLAMA.dense_weights + LLAMA.table), 32, 4
    gathers = [gather(n, own, axis_link(machine, engine, 1, n), units) for n in (64, 8)]
    assert far.dp - near.dp == pytest.approx(passes_ * (gathers[0] - gathers[1]))
    assert far.dp - near.dp > 0.2 * far.dp
    assert step_time(
        LLAMA, machine, replace(plan, secondary=64), engine
    ).dp == pytest.approx(float(far.dp))


def test_a_secondary_partition_keeps_half_width_parameters() -> None:
    plan = Plan(shard=64, zero=3, batch=64, micro_batch=1, seq=4096)
    whole, near = (
        peak_memory(LLAMA, p, WEFT) for p in (plan, replace(plan, secondary=8))
    )
    assert near.total - whole.total == pytest.approx(2 * 32 * LLAMA.dense_weights / 8)


#: Four devices with fast links, a slow network. A whole copy in every four would take 52 GB of a device.
SLOW = {"device": "RTX 4090", "memory": 32, "count": 64, "per_node": 4, "network": 3}
PINS = ("tp=1", "pp=1", "micro_batch=1", "moments=device", "activations=device")


def test_it_is_chosen_where_links_are_few_and_memory_is_too_small_for_copies() -> None:
    found = find("llama2-13b", 256, 4096, *PINS, **SLOW)
    first = finalists(found, 6)[0]
    assert first.plan.secondary == 4 and first.plan.shard == 64 and first.plan.zero == 3
    without = finalists(find("llama2-13b", 256, 4096, *PINS, "secondary=0", **SLOW), 6)[
        0
    ]
    assert first.seconds < 0.9 * without.seconds
    assert (
        "across the border of the fast links (4 devices) instead of among 4 neighbours"
        in layout_verdict(first, without)
    )


@pytest.mark.parametrize("other", [
    {"network": 300},  # as fast as the links
    {"count": 4, "memory": 96},  # nothing crosses the border
    # enough for whole copies, which reduce gradients over the network once a step
    {"memory": 96},
], ids=str)  # fmt: skip
def test_it_is_not_chosen_elsewhere(other: dict[str, Any]) -> None:
    found = find("llama2-13b", 256, 4096, *PINS, **SLOW | other)
    assert finalists(found, 6)[0].plan.secondary == 0


def test_secondary_partitions_can_be_pinned() -> None:
    found = find("llama3-8b", 256, 4096, "secondary=2", **SLOW)
    assert (found.plans.secondary == 2).all() and (found.plans.zero == 3).all()
    assert (found.plans.state_ranks % 2 == 0).all() and (
        found.plans.state_ranks > 2
    ).all()
    with pytest.raises(
        UsageError, match="pin secondary = 7 rules out every layout that is left"
    ):
        find("llama3-8b", 256, 4096, "secondary=7", **SLOW)


# --- offloading


def test_devices_have_a_host() -> None:
    machines = {name: load_cluster(name, 8).machine() for name in CLUSTERS}
    assert (
        machines["gb200"].host == 450e9
        and machines["a100"].host == 25e9
        and machines["h100"].host == 55e9
    )
    assert machines["cpu"].host_memory == 0
    assert (
        Cluster(device="H100-80GB", count=8, host=28, host_memory=64)
        .machine()
        .host_memory
        == 64e9
    )


@pytest.mark.parametrize(
    ("zero", "micro", "fetched", "reduced"), [(1, 1, 1, 1), (2, 1, 1, 4), (3, 1, 8, 4)]
)
def test_transfers_of_state_follow_their_formula(
    monkeypatch: pytest.MonkeyPatch, zero: int, micro: int, fetched: int, reduced: int
) -> None:
    monkeypatch.setattr("weft.planner.tiers.EXPOSED", 1.0)
    machine, engine = machine_of(DEVICES["H100-80GB"], host=1.0), WEFT
    plan = Plan(
        shard=8,
        zero=zero,
        batch=32,
        micro_batch=micro,
        seq=4096,
        weights=HOST,
        moments=HOST,
    )
    one = passes(LLAMA, machine, plan, engine)
    plain = step_time(LLAMA, machine, plan, engine)
    cost = with_tiers(plain, LLAMA, machine, plan, engine, one, LLAMA.layers)
    own = (32 * LLAMA.dense_weights + 2 * LLAMA.table) / 8
    assert cost.host == pytest.approx((fetched + reduced) * 4 * own / 1e9)
    assert cost.optimizer == pytest.approx(UPDATE * own / machine.host_bandwidth)
    assert cost.total - cost.host - cost.optimizer == pytest.approx(
        plain.total - plain.optimizer
    )
    near = replace(plan, secondary=4)
    assert zero < 3 or with_tiers(
        plain, LLAMA, machine, near, engine, one, 32
    ).host == pytest.approx(8 * 4 * own / 1e9)
    hidden = with_tiers(
        plain,
        LLAMA,
        replace(machine, host=1e15, host_bandwidth=1e15),
        plan,
        engine,
        one,
        32,
    )
    assert hidden.host < 1e-3


def test_activations_travel_both_ways_behind_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Plan(shard=8, zero=3, batch=32, micro_batch=1, seq=4096, activations=HOST)
    machine = machine_of(DEVICES["H100-80GB"], host=10)
    kept = float(layer_bytes(LLAMA, plan, WEFT)[0])
    for share in (1.0, 0.25):
        monkeypatch.setattr("weft.planner.tiers.EXPOSED", share)
        one = passes(LLAMA, machine, plan, WEFT)
        cost = with_tiers(
            step_time(LLAMA, machine, plan, WEFT), LLAMA, machine, plan, WEFT, one, 32
        )
        spent = 4 * 32 * kept / 10e9
        seen = [
            share * spent + max(0.0, (1 - share) * spent - 4 * 32 * float(t))
            for t in (one.forward, one.backward)
        ]
        assert cost.host == pytest.approx(sum(seen))


@pytest.mark.parametrize("micro", [1, 4])
def test_files_are_read_and_written_as_the_formula_says(micro: int) -> None:
    """What the disk does in a phase hides behind what is computed in it, but for a unit of it."""
    machine = machine_of(DEVICES["CPU"], disk_read=2.0, disk_write=1.0)
    plan = Plan(shard=8, zero=3, batch=32, micro_batch=micro, seq=4096)
    plain = step_time(LLAMA, machine, plan, WEFT)
    own = (32 * LLAMA.dense_weights + 2 * LLAMA.table) / 8

    def waits(**places: int) -> float:
        away = replace(plan, **places)
        one = passes(LLAMA, machine, away, WEFT)
        found = with_tiers(plain, LLAMA, machine, away, WEFT, one, 32)
        # no link to cross: it is updated where it would be
        assert found.optimizer == plain.optimizer
        assert found.compute == plain.compute
        return float(found.host)

    def phase(read: float, written: float, compute: float) -> float:
        moved = own * (read / 2e9 + written / 1e9)
        return max(0.0, moved - compute) + moved / 32

    one = passes(LLAMA, machine, plan, WEFT)
    m = 32 / 8 / micro
    forward, backward = (
        m * 32 * float(one.forward),
        m * 32 * float(one.backward + one.again),
    )
    update = float(plain.optimizer)
    assert waits(moments=FILE) == pytest.approx(phase(8, 8, update))
    # Master weights are read for forward and backward, whatever the microbatches, and again with what else is updated.
    expected = phase(4, 0, forward) + phase(4, 4, backward) + phase(16, 12, update)
    assert waits(weights=FILE, moments=FILE) == pytest.approx(expected)
    kept = m * 32 * float(layer_bytes(LLAMA, plan, WEFT)[0]) / own
    assert waits(activations=FILE) == pytest.approx(
        phase(0, kept, forward) + phase(kept, 0, backward)
    )


def test_what_is_offloaded_leaves_the_device() -> None:
    plan = Plan(shard=4, zero=1, pp=2, batch=64, micro_batch=1, seq=4096)
    base = peak_memory(LLAMA, plan, WEFT)
    state, saved = (
        replace(plan, weights=HOST, moments=HOST),
        replace(plan, activations=HOST),
    )
    both = replace(state, activations=HOST)
    memory = peak_memory(LLAMA, state, WEFT)
    assert (
        memory.optimizer == 0
        and memory.activations == base.activations
        and memory.parameters == base.parameters
    )
    assert peak_memory(LLAMA, replace(state, zero=3), WEFT).parameters == 0
    assert peak_memory(LLAMA, replace(state, zero=2), WEFT).gradients == 0
    gone = peak_memory(LLAMA, saved, WEFT)
    # logits are left
    assert gone.activations < 0.2 * base.activations and gone.total < base.total
    kept = float(layer_bytes(LLAMA, plan, WEFT)[0])
    stays, leaves = (rank_memory(LLAMA, p, WEFT, 16, 1, 0.0) for p in (plan, saved))
    # of two layers that are on their way
    assert leaves.buffers - stays.buffers == pytest.approx(2 * kept)
    held = (16 * LLAMA.dense_weights + LLAMA.table) / 4
    of_state, of_saved = (
        float(WEFT.master + 4) * held,
        float(in_flight(plan, 0)) * 16 * kept,
    )
    for away, sizes in (
        (state, (of_state, 0)),
        (saved, (of_saved, 0)),
        (both, (of_state + of_saved, 0)),
    ):
        assert [float(n) for n in room_away(LLAMA, away, WEFT)] == pytest.approx(sizes)
    part = replace(plan, moments=FILE)
    assert [float(n) for n in room_away(LLAMA, part, WEFT)] == pytest.approx(
        (0, 8 * held)
    )
    assert base.total - peak_memory(LLAMA, part, WEFT).total == pytest.approx(8 * held)
    one = Plan(
        batch=16, micro_batch=2, seq=4096, recompute=2, weights=FILE, moments=FILE
    )
    memory = peak_memory(LLAMA, one, WEFT)
    assert memory.parameters == memory.gradients == memory.optimizer == 0
    # of every layer and microbatch: they wait for the next layer
    inputs = float(layer_bytes(LLAMA, one, WEFT)[0])
    assert memory.activations == pytest.approx(
        8 * 32 * inputs + float(logit_bytes(LLAMA, one, WEFT))
    )


# --- weights in tiles, rows of the embedding, sums beside products


def test_tiles_come_again_for_each_microbatch_and_need_less_room() -> None:
    machine = machine_of(DEVICES["H100-80GB"], disk_read=0.2, disk_write=0.1)
    whole = Plan(zero=3, batch=4, micro_batch=1, seq=512, weights=FILE, moments=FILE)
    tiled, engine = replace(whole, tiles=16), EngineConstants()
    own = 32 * LLAMA.dense_weights + 2 * LLAMA.table
    seconds = [float(planned_time(LLAMA, machine, p, WEFT).host) for p in (whole, tiled)]  # fmt: skip
    # three more forwards; three more backwards, with the gradients so far
    moved = 4 * own * (3 / 0.2e9 + 2 * 3 / 0.2e9 + 3 / 0.1e9)
    assert seconds[1] - seconds[0] == pytest.approx(moved * (1 + 1 / 32))
    room = [rank_memory(LLAMA, p, engine, 32, 2, 0.0).buffers for p in (whole, tiled)]
    spared = 2 * LLAMA.dense_weights * (1 - 1 / 16)
    assert room[0] - room[1] == pytest.approx((2 + engine.gradient) * spared)
    rows = rank_memory(LLAMA, replace(whole, embedding=1), engine, 32, 2, 0.0).buffers
    assert room[0] - rows == pytest.approx((2 + engine.gradient) * LLAMA.table)


def test_tiles_and_rows_are_written_into_the_recipe() -> None:
    cluster = {"device": "H100-80GB", "count": 1, "host_memory": 60}
    cluster |= {"disk_read": 2.0, "disk_write": 1.0}
    pins = ("tiles=8", "embedding=rows", "weights=file")
    first = finalists(find("llama3-8b", 8, 2048, *pins, **cluster), 3)[0]
    memory = Memory.model_validate(first.plan.memory)
    assert memory.tiles == 8 and memory.embedding == "rows" and first.plan.pp == 1
    tied = find("llama3.2-1b", 8, 2048, "tiles=8", "weights=file", **cluster)
    assert not tied.plans.embedding.any() and (tied.plans.tiles == 8).all()


def test_sums_travel_beside_products_where_that_is_a_tenth_faster() -> None:
    slow = {"device": "RTX 4090", "memory": 80, "count": 4}
    found = find("llama3-8b", 8, 2048, "tp=4", **slow)
    first = finalists(found, 3)[0]
    without = finalists(find("llama3-8b", 8, 2048, "tp=4", "overlap=none", **slow), 3)[0]  # fmt: skip
    assert layout_tree(first)["overlap"] == "domino"
    assert first.cost.tp < 0.1 * without.cost.tp
    assert first.seconds < WORTH["overlap"] * without.seconds
    assert "overlap" not in layout_tree(without)
    fast = find("llama3-8b", 256, 4096, "tp=2", device="H100-80GB", count=8)
    assert not finalists(fast, 3)[0].plan.overlap
    other = search(LLAMA, Cluster(**slow), ENGINES["megatron"], 8, 2048)
    assert not other.plans.overlap.any()


def test_offloading_is_chosen_where_nothing_else_fits() -> None:
    found = find("llama3-8b", 8, 8192, device="H100-80GB", count=1)
    first = finalists(found, 5)[0]
    assert first.plan.moments == HOST and first.fits and first.cost.host > 0
    assert (
        np.asarray(room_away(LLAMA, found.plans, WEFT)[0])[found.order]
        <= 256e9 * USABLE
    ).all()
    # a disk is for what the host has no room for
    assert not (found.plans.moments == FILE).any()
    with pytest.raises(UsageError, match="memory rules out all"):
        find(
            "llama3-8b",
            8,
            8192,
            device="H100-80GB",
            count=1,
            host_memory=32,
            disk_bytes=0,
        )
    with pytest.raises(UsageError, match="memory rules out all"):
        find("llama3-8b", 8, 8192, "moments=device", device="H100-80GB", count=1)


def test_files_are_chosen_where_the_host_has_no_room_either() -> None:
    cluster = {
        "device": "H100-80GB",
        "count": 1,
        "host_memory": 80,
        "disk_read": 1.0,
        "disk_write": 0.5,
    }
    found = find("llama3-8b", 8, 8192, **cluster)
    first = finalists(found, 5)[0]
    host, file = room_away(LLAMA, first.plan, WEFT)
    assert (
        first.plan.moments == FILE
        and first.fits
        and host <= 80e9 * USABLE
        and file <= 1000e9 * USABLE
    )
    own = 32 * LLAMA.dense_weights + 2 * LLAMA.table
    # moments are read and written once a step
    assert first.seconds > 8 * own * (1 / 1e9 + 1 / 0.5e9)
    slower = finalists(
        find("llama3-8b", 8, 8192, "weights=file", "moments=file", **cluster), 5
    )[0]
    assert (
        slower.plan.weights == slower.plan.moments == FILE
        and slower.seconds > first.seconds
    )
    assert (
        "weights are read from files at 1.0 GB/s and written at 0.5"
        in layout_verdict(first, slower)
    )
    with pytest.raises(UsageError, match="memory rules out all"):
        find("llama3-8b", 8, 8192, **cluster | {"disk_bytes": 30})


def test_on_a_cpu_there_are_files_and_no_host() -> None:
    found = find(
        "llama3-8b",
        1,
        1024,
        device="CPU",
        count=1,
        memory=112,
        disk_bytes=500,
        disk_read=0.8,
        disk_write=0.8,
    )
    first = finalists(found, 3)[0]
    assert first.plan.moments == FILE and first.fits
    away = np.stack([getattr(found.plans, kind) for kind in AWAY])
    assert (away[:, found.order] != HOST).all() and first.plan.away["moments"] == "file"


@pytest.mark.parametrize(
    ("model", "gpus", "batch"), [("llama3-8b", 16, 64), ("llama3-70b", 64, 256)]
)
def test_elsewhere_it_must_win_clearly(model: str, gpus: int, batch: int) -> None:
    """Its times are not measured: where a layout without it fits, it has to be faster by more than a tenth."""
    found = find(model, batch, 8192, device="H100-80GB", count=gpus)
    away = found.plans.moves[found.order]
    seconds = np.asarray(found.cost.total)[found.order]
    assert (
        not away.any() or seconds[away].max() <= WORTH["weights"] * seconds[~away].min()
    )


def test_offloading_can_be_pinned_and_the_verdict_names_its_price() -> None:
    pinned = find(
        "llama3-70b",
        64,
        8192,
        "weights=host",
        "activations=host",
        device="H100-80GB",
        count=16,
    )
    assert (pinned.plans.weights == HOST).all() and (pinned.plans.moments == HOST).all()
    assert (pinned.plans.activations == HOST).all() and (
        pinned.plans.recompute != 1
    ).all()
    base = finalists(find("llama3-8b", 64, 8192, device="H100-80GB", count=16), 3)[0]
    other = finalists(
        find(
            "llama3-8b",
            64,
            8192,
            "activations=host",
            "moments=device",
            device="A100-80GB",
            count=16,
            host=2,
        ),
        3,
    )[0]
    assert "activations travel to the host at 2 GB/s and back" in layout_verdict(
        base, replace(other, machine=other.machine)
    )
    with pytest.raises(
        UsageError, match="weights cannot be 'hots'; did you mean 'host'"
    ):
        Pin.parse("weights=hots")


def test_a_recipe_says_both(command: Command, tmp_path: Path) -> None:
    weft, path = partial(command, "plan"), tmp_path / "plan.toml"
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('device = "A100-40GB"\ncount = 64\nnetwork = 3\n')
    words = [
        "llama3-8b",
        "--cluster",
        cluster,
        "--batch",
        256,
        "--seq",
        4096,
        "--recipe",
        path,
    ]
    code, out, _ = weft(
        *words, "--pin", "secondary=8", "--pin", "weights=host", "--json"
    )
    layout = json.loads(out)["layouts"][0]["layout"]
    assert (
        code == 0
        and layout["secondary"] == 8
        and layout["weights"] == layout["moments"] == "host"
    )
    recipe = load_recipe(path)
    assert recipe.layout.secondary == 8 and recipe.memory == Memory(weights="host")
    code, out, _ = weft(
        *words, "--pin", "secondary=8", "--html", tmp_path / "plan.html"
    )
    assert code == 0 and "secondary=8" in out and not load_recipe(path).memory.away
