"""The probe's curves, the clock on which ranks share cores, and the placement of axes on slow and fast links."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.conftest import Command
from tests.measured import until_true
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.memory.nameless_file import TierError
from weft.memory.tier_file import TierFile
from weft.planner.machine import load_cluster
from weft.recipe.toml import write_toml
from weft.rehearse.clock import Do, predict_step, run
from weft.rehearse.curves import ProbedMachine, curve
from weft.rehearse.journal import Event, processor_seconds, silent_rank
from weft.rehearse.local_choice import traffic_of
from weft.rehearse.machine_probe import cluster
from weft.rehearse.mapping import Traffic, place_axes
from weft.rehearse.rehearsed_step import Rehearsal, reference
from weft.rehearse.transfers import SIZES, TURNS, disk_curves
from weft.rehearse.worker_links import WorkerLinks


def test_curves_pass_through_their_points() -> None:
    points = [[10.0, 1.0], [100.0, 2.0], [1000.0, 16.0]]
    assert [curve(points, x) for x in (1, 10, 100, 1000)] == pytest.approx(
        [1, 1, 2, 16]
    )
    assert curve(points, math.sqrt(10 * 100)) == pytest.approx(math.sqrt(2))
    assert curve(points, 4000) == pytest.approx(64)  # beyond: in proportion


def test_busy_ranks_share_the_cores() -> None:
    assert run([[Do("work", 1.0)]], cores=2) == pytest.approx(1)
    assert run([[Do("work", 1.0)]] * 4, cores=2) == pytest.approx(2)
    assert run([[Do("work", 1.0)], [Do("work", 3.0)]], cores=1) == pytest.approx(4)
    assert run([[Do("work", 1.0)]], cores=2, threads=4) == pytest.approx(2)
    # The first is alone while the second waits for it.
    meet = Do("meet", 0.5, 0.25, ("g", 1), (0, 1))
    assert run(
        [[Do("work", 2.0), meet], [Do("work", 1.0), meet]], cores=2
    ) == pytest.approx(2.75)
    post, take = Do("post", 0.1, 0.4, ("m",)), Do("take", 0.2, key=("m",))
    assert run(
        [[Do("work", 1.0), post], [take, Do("work", 1.0)]], cores=1
    ) == pytest.approx(2.7)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        run([[Do("take", 0.1, key=("a",))], [Do("take", 0.1, key=("b",))]], cores=2)


def calibration() -> dict[str, Any]:
    setting = {
        "ranks": 2, "threads": 1, "step": 0.3,
        "collectives": {f"{k}.2": [[1.0, 1e-4, 1e-4], [1e6, 1e-3, 1e-3]] for k in ("reduce", "gather", "scatter")},
        "memory": {"plain": 1e8, "per_byte": 1.5, "functional": 1e6, "message": 1e7},
    }  # fmt: skip
    setting["collectives"]["message.2"] = [[1.0, 2e-5, 1e-5], [1e6, 2e-3, 1e-3]]  # type: ignore[index]
    return {"cores": 2, "settings": {"2": setting}}


def test_prediction_adds_up() -> None:
    """Some work and one collective on each of two ranks, which take a quarter from each other."""
    events = [
        Event("work", "compute", 1e-3),
        Event("collective", "reduce", bytes=1_000_000, ranks=(0, 1)),
        Event("work", "optimizer", 2e-4),
    ]
    local = ProbedMachine.of(calibration())
    found = predict_step(
        local, [Rehearsal(events, 0, 10**6).slower(1.25)] * 2, Layout(tp=2)
    )
    work = 1.25 * 1.2e-3
    assert found.seconds == pytest.approx(work + 1e-3 + 1e-3)
    assert found.memory[0] == pytest.approx(1e8 + 1.5e6 + 1e6)
    assert found.busy[0] == pytest.approx(work + 1e-3)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.parts["tp"] == pytest.approx(2e-3) and found.parts[
        "compute"
    ] == pytest.approx(1.25e-3)
    assert found.parts["optimizer"] == pytest.approx(2.5e-4)


def test_a_rehearsed_step_has_the_collectives_of_its_layout() -> None:
    seen = reference("tp=2", "tiny")
    hidden = 4 * 8 * 16 * 4  # rows x tokens x embed, whole
    gathers = [e for e in seen.events if e.name == "gather" and e.bytes == hidden]
    assert len(gathers) == 4 * 4 + 2 and all(e.ranks == (0, 1) for e in gathers)
    assert seen.peak > seen.state > 0
    pipeline = reference("pp=2", "tiny")
    assert (
        sum(e.kind == "send" for e in pipeline.events)
        == sum(e.kind == "recv" for e in pipeline.events)
        == 4
    )
    assert not dist.is_initialized()


def test_work_between_messages_is_all_the_work() -> None:
    """What a rank does itself is timed in pieces, each up to what it asks of the others, and nothing twice."""

    def measured() -> tuple[list[float], float]:
        with silent_rank(1, 2) as journal:
            a, out = torch.ones(400, 400), torch.empty(8)
            # first, as what is worked in here must be no less than what is found
            before = processor_seconds()
            journal.begin()
            for turn in range(3):
                for _ in range(5 * (turn + 1)):
                    a @ a
                dist.all_gather_into_tensor(out, torch.ones(4))
                dist.send(out, 0)
            journal.close()
            whole = processor_seconds() - before
        work = [e.seconds for e in journal.events if e.kind == "work"]
        assert 0 < sum(work) <= whole and out.tolist() == [1.0] * 8
        assert [e.kind for e in journal.events if e.kind != "work"] == [
            "collective",
            "send",
            "wait",
        ] * 3
        return work, whole

    until_true(
        measured,
        lambda m: (
            m[0][6] > m[0][3] > m[0][0] > 0
            and sum(m[0]) == pytest.approx(m[1], rel=0.2)
        ),
    )


def test_measured_curves_are_a_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "probe.toml"
    path.write_text(
        write_toml({"device": "CPU", "count": 2, "calibration": calibration()})
    )
    cluster = load_cluster(str(path))
    assert cluster.count == 2
    local = ProbedMachine.of(cluster.calibration)
    seen = reference("tp=2", "tiny")
    assert 0 < predict_step(local, [seen, seen], Layout(tp=2)).seconds < 10


def test_a_disk_is_measured_through_the_tier_that_uses_it(tmp_path: Path) -> None:
    """Every transfer is of the stated size, in the tier's own file, of which nothing is left."""
    room, made = 16 << 20, list[TierFile]()

    def noted(folder: Path, called: str) -> TierFile:
        made.append(TierFile(folder, called=called))
        return made[0]

    with mock.patch("weft.rehearse.transfers.TierFile", noted):
        found = disk_curves(tmp_path, room)
    assert made[0].bytes == {
        "written": (1 + 3 * TURNS) * room,
        "read": 3 * TURNS * room,
    }
    assert not list(tmp_path.iterdir())
    for name in ("read", "write"):
        assert [size for size, _ in found[name]] == list(SIZES) and all(
            seconds > 0 for _, seconds in found[name]
        )
    with pytest.raises(TierError, match="cannot be used"):
        disk_curves(Path("/proc/nowhere"), room)


def test_a_folder_that_cannot_be_used_is_said_before_anything_is_measured(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with mock.patch(
        "weft.rehearse.machine_probe.setting", side_effect=AssertionError("measured")
    ):
        code, _, err = command(
            "probe", "--folder", tmp_path / "file", "--out", tmp_path / "probe.toml"
        )
    assert code == 1 and re.search(
        r"--folder = .*file.*cannot be used: it is a file", " ".join(err.split())
    ), err


def test_ranks_share_the_disk_that_was_measured(tmp_path: Path) -> None:
    curves = {
        "read": [[2**22, 2**22 / 8e8]],
        "write": [[2**22, 2**22 / 4e8]],
        "free": 60e9,
    }
    memory = {"plain": 1e8, "per_byte": 1.2}
    setting = calibration()["settings"]["2"] | {
        "peaks": {"float32": 1e11, "bfloat16": 1e10},
        "triad": 1e10,
        "links": {},
    }
    tree = cluster([setting | {"memory": memory}], 2, {"disk": curves, "link": {}})
    path = tmp_path / "probe.toml"
    path.write_text(write_toml(tree))
    machine = load_cluster(str(path)).machine()
    assert (machine.disk_read, machine.disk_write) == pytest.approx((4e8, 2e8))
    assert machine.disk_bytes == pytest.approx(30e9) and machine.host_memory == 0


def test_a_file_of_an_older_probe_is_said_to_be_one() -> None:
    old = calibration()
    del old["settings"]["2"]["step"]
    with pytest.raises(UsageError, match="run weft probe again"):
        ProbedMachine.of(old)


def test_axis_with_most_traffic_stays_inside_a_site() -> None:
    near = np.arange(4)[:, None] // 2 == np.arange(4) // 2
    links = WorkerLinks(np.where(near, 1e-5, 1e-3), np.where(near, 1e9, 1e7))
    layout = Layout(dp=2, tp=2)
    assert (
        place_axes(links, layout, {"dp": Traffic(1e6), "tp": Traffic(1e8)}).order
        == "dp tp"
    )
    assert (
        place_axes(links, layout, {"dp": Traffic(1e8), "tp": Traffic(1e6)}).order
        == "tp dp"
    )
    # nothing to choose: the usual order
    assert place_axes(links, layout, {}).order == "dp tp"
    with pytest.raises(ValueError, match="links of 4 workers"):
        place_axes(links, Layout(dp=2), {})


def test_traffic_is_put_down_to_its_axis() -> None:
    seen = reference("dp=2,tp=2", "tiny")
    traffic = traffic_of(seen.events, 0, Layout(dp=2, tp=2))
    assert set(traffic) == {"dp", "tp"}
    hidden = 4 * 8 * 16 * 4 // 2  # rows of this replica
    assert traffic["tp"].bytes == pytest.approx((4 * 8 + 4) * hidden / 2, rel=0.1)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("dp", "leaves out tp"),
        ("tp tp dp", "twice"),
        ("tp, dq", "nearest|unknown axis"),
    ],
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
    return {
        axis: mesh.rank(axis) for axis in ("shard", "tp")
    }, dist.get_process_group_ranks(mesh.group("tp"))


def test_ranks_take_their_places_in_the_order_asked_for(pool: Any) -> None:
    usual, turned = pool.run(4, places, ""), pool.run(4, places, "tp shard")
    assert [group for _, group in usual] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [group for _, group in turned] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [at["shard"] for at, _ in turned] == [0, 1, 0, 1]
