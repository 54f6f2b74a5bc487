"""The probe's curves, the clock on which ranks share cores, and the placement of axes on slow and fast links."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.planner.machine import load_cluster
from weft.rehearse.choose import traffic_of
from weft.rehearse.clock import Do, predict, run
from weft.rehearse.curves import Grid, Local, curve
from weft.rehearse.links import Links
from weft.rehearse.mapping import Traffic, place_axes
from weft.rehearse.probe import attention, operators, products
from weft.rehearse.step import Event, Rehearsal, reference
from weft.toml import write_toml


def test_curves_pass_through_their_points() -> None:
    points = [[10.0, 1.0], [100.0, 2.0], [1000.0, 16.0]]
    assert [curve(points, x) for x in (1, 10, 100, 1000)] == pytest.approx([1, 1, 2, 16])
    assert curve(points, math.sqrt(10 * 100)) == pytest.approx(math.sqrt(2))
    assert curve(points, 4000) == pytest.approx(64)  # beyond: in proportion
    grid = Grid([[m, n, k, m * n * k / (1e9 * m)] for m, n, k in itertools.product((2, 8), (4, 16), (4, 64))])
    assert grid(2, 4, 4) == pytest.approx(32 / 2e9)
    assert grid(4, 8, 20) == pytest.approx(4 * 8 * 20 / 4e9)
    assert grid(80, 8, 8) == pytest.approx(80 * 64 / 8e9)  # beyond: at the rate of the edge


def test_busy_ranks_share_the_cores() -> None:
    assert run([[Do("work", 1.0)]], cores=2) == pytest.approx(1)
    assert run([[Do("work", 1.0)]] * 4, cores=2) == pytest.approx(2)
    assert run([[Do("work", 1.0)], [Do("work", 3.0)]], cores=1) == pytest.approx(4)
    assert run([[Do("work", 1.0)]], cores=2, threads=4) == pytest.approx(2)
    # The first is alone while the second waits for it.
    meet = Do("meet", 0.5, 0.25, ("g", 1), (0, 1))
    assert run([[Do("work", 2.0), meet], [Do("work", 1.0), meet]], cores=2) == pytest.approx(2.75)
    post, take = Do("post", 0.1, 0.4, ("m",)), Do("take", 0.2, key=("m",))
    assert run([[Do("work", 1.0), post], [take, Do("work", 1.0)]], cores=1) == pytest.approx(2.7)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        run([[Do("take", 0.1, key=("a",))], [Do("take", 0.1, key=("b",))]], cores=2)


def calibration() -> dict[str, Any]:
    setting = {
        "ranks": 2, "threads": 1, "ops": {"mul": [[1.0, 1e-6], [1e6, 1e-3]]}, "slow": 1.0,
        "products": {k: [[m, n, k_, m * n * k_ / 1e9] for m, n, k_ in itertools.product((1, 64), repeat=3)]
                     for k in ("linear", "back", "mm")},
        "attention": {k: [[1.0, 1e-6], [1e6, 1e-3]] for k in ("attention", "attention_backward")},
        "collectives": {f"{k}.2": [[1.0, 1e-4, 1e-4], [1e6, 1e-3, 1e-3]] for k in ("reduce", "gather", "scatter")},
        "overhead": {"op": 1e-5, "functional": 1e-4, "sharded": 1e-3, "message": 1e-5, "step": 0.0},
        "memory": {"plain": 1e8, "per_byte": 1.5, "functional": 1e6},
    }  # fmt: skip
    setting["collectives"]["message.2"] = [[1.0, 2e-5, 1e-5], [1e6, 2e-3, 1e-3]]  # type: ignore[index]
    return {"cores": 2, "settings": {"2": setting}}


def test_prediction_adds_up() -> None:
    """One product, one operator and one collective on each of two ranks."""
    events = [
        Event("op", "mm", 3 * 4 * 64 * 64, ((64, 64), (64, 64))),
        Event("op", "mul", 1_000_000),
        Event("collective", "all_reduce", 1_000_000, ranks=(0, 1)),
    ]
    found = predict(Local.of(calibration()), [Rehearsal(events, 0, 10**6)] * 2, Layout(tp=2))
    work = 2e-5 + (64**3 / 1e9 - 1e-6) + (1e-3 - 1e-6)
    assert found.seconds == pytest.approx(work + 1e-3 + 1e-4 + 1e-3)
    assert found.memory[0] == pytest.approx(1e8 + 1.5e6 + 1e6)
    assert found.busy[0] == pytest.approx(work + 1.1e-3)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.parts["tp"] == pytest.approx(2.1e-3) and found.parts["compute"] == pytest.approx(work)


def test_a_rehearsed_step_has_the_collectives_of_its_layout() -> None:
    seen = reference("tp=2", "tiny")
    gathers = [e for e in seen.events if e.name == "all_gather_into_tensor"]
    assert len(gathers) == 4 * 4 + 2 and all(e.ranks == (0, 1) for e in gathers)
    assert {e.bytes for e in gathers} == {4 * 8 * 16 * 4}  # rows x tokens x embed, whole
    assert seen.peak > seen.state > 0
    pipeline = reference("pp=2", "tiny")
    assert sum(e.kind == "send" for e in pipeline.events) == sum(e.kind == "recv" for e in pipeline.events) == 4
    assert not dist.is_initialized()


def test_measured_curves_are_a_cluster_file(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ops = operators(1e-4, (2**12, 2**14))
        grid = products(1e-4, ((16, 32), (16, 32), (16, 32)))
        scores = attention(1e-4, (16, 32))
    finally:
        torch.set_num_threads(before)
    assert all(len(points) == 2 and points[0][1] > 0 for points in ops.values())
    tree = {"device": "CPU", "count": 2, "calibration": calibration()}
    tree["calibration"]["settings"]["2"] |= {"ops": ops, "products": grid, "attention": scores}
    path = tmp_path / "probe.toml"
    path.write_text(write_toml(tree))
    cluster = load_cluster(str(path))
    assert cluster.count == 2
    local = Local.of(cluster.calibration)
    seen = reference("tp=2", "tiny")
    assert 0 < predict(local, [seen, seen], Layout(tp=2)).seconds < 10


def test_axis_with_most_traffic_stays_inside_a_site() -> None:
    links = Links.sites((2, 2), (1e-5, 1e9), (1e-3, 1e7))
    layout = Layout(dp=2, tp=2)
    assert place_axes(links, layout, {"dp": Traffic(1e6), "tp": Traffic(1e8)}).order == "dp tp"
    assert place_axes(links, layout, {"dp": Traffic(1e8), "tp": Traffic(1e6)}).order == "tp dp"
    assert place_axes(links, layout, {}).order == "dp tp"  # nothing to choose: the usual order
    with pytest.raises(ValueError, match="links of 4 workers"):
        place_axes(links, Layout(dp=2), {})


def test_traffic_is_put_down_to_its_axis() -> None:
    seen = reference("dp=2,tp=2", "tiny")
    traffic = traffic_of(seen.events, 0, Layout(dp=2, tp=2))
    assert set(traffic) == {"dp", "tp"}
    hidden = 4 * 8 * 16 * 4 // 2  # rows of this replica
    assert traffic["tp"].bytes == pytest.approx((4 * 8 + 4) * hidden / 2, rel=0.1)


@pytest.mark.parametrize(
    ("order", "message"), [("dp", "leaves out tp"), ("tp tp dp", "twice"), ("tp, dq", "nearest|unknown axis")]
)
def test_orders_that_are_none(order: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(dp=2, tp=2, order=order)


def test_order_in_a_layout_text() -> None:
    assert Layout.parse("dp=2,tp=2,order=tp dp").axis_order[-2:] == ("tp", "dp")
    assert Layout.parse("dp=2", {"tp": 2, "order": "tp"}).order == ""
    with pytest.raises(UsageError, match="leaves out tp"):
        Layout.parse("dp=2,tp=2,order=dp")


def places(order: str) -> tuple[dict[str, int], list[int]]:
    """On every rank: its coordinates, and the ranks along ``tp``."""
    mesh = Mesh.create(Layout(shard=2, tp=2, order=order), "cpu")
    return {axis: mesh.rank(axis) for axis in ("shard", "tp")}, dist.get_process_group_ranks(mesh.group("tp"))


def test_ranks_take_their_places_in_the_order_asked_for(pool: Any) -> None:
    usual, turned = pool.run(4, places, ""), pool.run(4, places, "tp shard")
    assert [group for _, group in usual] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [group for _, group in turned] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [at["shard"] for at, _ in turned] == [0, 1, 0, 1]
