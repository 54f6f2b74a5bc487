"""Every collective and message of a rank is in its ring, with the line of code; also after kill -9."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.profiler import ProfilerActivity, profile

from tests.cases import recipe, start, write_corpus
from weft.layout.layout import Layout
from weft.net.process import started_at
from weft.observe import rings, trace
from weft.prove.pool import WorkerDied
from weft.train.step import train_step

#: Layouts whose steps have collectives of every kind: FSDP2's, functional ones, messages, exchanges.
#: The dearest of them are left to soak: with fewer ranks and stages the same collectives pass by.
LAYOUTS = (
    "shard=2,tp=2",
    *(
        pytest.param(layout, marks=pytest.mark.soak)
        for layout in ("pp=2,dp=2,zero=1", "cp=4,ulysses=2", "shard=4,secondary=2")
    ),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def my_ring(folder: Path) -> rings.Trace:
    return rings.read_ring(rings.rings_of(folder) / f"0-{dist.get_rank()}.ring")


def two_steps(
    values: dict[str, Any], folder: Path, traced: bool
) -> tuple[int, list[str], list[str], list[float]]:
    """Operators of the second step that the profiler has seen, what the ring has of it, and the losses."""
    job = start(values)
    losses = []
    for number in (1, 2):
        if number == 2 and traced:
            trace.start_tracing(folder, dist.get_rank())
        batches = job.loader.step((number - 1) * 5)
        assert batches is not None
        with profile(activities=[ProfilerActivity.CPU]) as profiler, trace.step(number):
            losses.append(
                train_step(
                    job.model, job.state, batches, job.mesh, lr=1e-3, clip=1.0
                ).loss
            )
    if not traced:
        return 0, [], [], losses
    found = my_ring(folder)
    trace.stop()
    inside = found.records[
        (found.records["step"] == 2) & (found.records["kind"] != rings.STEP)
    ]
    # a first stage does not wait for the sum of the labels' weights
    waited = inside[inside["begin"] > 0]
    assert len(waited) >= len(inside) - 1 and (waited["enter"] <= waited["begin"]).all()
    assert (waited["begin"] <= waited["leave"]).all() and (inside["enter"] > 0).all()
    assert not inside["failed"].any()
    seen = [
        e.name
        for e in profiler.events()
        if e.name.startswith("c10d::") and e.name != "c10d::barrier"
    ]
    kinds, places = (
        [rings.KINDS[k] for k in inside["kind"]],
        [found.places[p] for p in inside["place"]],
    )
    return len(seen), kinds, places, losses


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_passes_by_and_nothing_changes(
    pool: Any, corpus: str, tmp_path: Path, layout: str
) -> None:
    values = recipe(corpus, train__micro_batch=1).model_copy(
        update={"layout": Layout.parse(layout)}
    )
    given = values.model_dump(mode="json")
    plain = pool.run(4, two_steps, given, tmp_path, False, timeout=120)
    traced = pool.run(4, two_steps, given, tmp_path, True, timeout=120)
    for seen, kinds, places, losses in traced:
        assert len(kinds) == seen > 0, (layout, kinds)
        assert all(place.startswith("weft/") for place in places), places
        assert losses == plain[0][-1]
    assert not rings.rings_of(tmp_path).exists()


def functional(folder: Path) -> tuple[list[str], float, list[int]]:
    """Functional collectives, in a compiled function and in inference; and what remains when tracing has ended."""
    ring = trace.start_tracing(folder, dist.get_rank())
    world, x = dist.group.WORLD, torch.ones(4)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x := x * 2)
        return funcol.reduce_scatter_tensor(x + 1, "sum", 0, world) + 1

    with torch.inference_mode():
        total = float(compiled(x).sum() + funcol.all_gather_tensor(x, 0, world).sum())
    sizes = [len(my_ring(folder).records)]
    trace.end_tracing()
    dist.all_reduce(x)
    sizes.append(len(rings.read_ring(ring.path).records))
    found = rings.read_ring(ring.path)
    trace.start_tracing(folder, dist.get_rank())
    trace.stop()
    assert (found.records["leave"] > 0).all()
    return [rings.KINDS[k] for k in found.records["kind"]], total, sizes


@pytest.mark.slow
def test_functional_collectives_of_compiled_code_are_seen(
    pool: Any, tmp_path: Path
) -> None:
    for kinds, total, sizes in pool.run(2, functional, tmp_path, timeout=120):
        assert kinds == ["all_reduce", "reduce_scatter", "all_gather"] and sizes == [
            3,
            3,
        ]
        assert total == 2 * (2 * (2 * 2 + 1) + 1) + 8


def killed(folder: Path) -> None:
    """Rank 1 kills itself, and rank 0 waits for it."""
    trace.start_tracing(folder, dist.get_rank())
    try:
        with trace.step(7):
            dist.all_reduce(torch.ones(3))
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.broadcast(torch.ones(5, dtype=torch.float64), 1)
    finally:
        trace.end_tracing()  # this process lives on, and has other groups under the same names


def test_a_ring_outlives_its_rank(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied):
        pool.run(2, killed, tmp_path)
    living, dead = (
        rings.read_ring(rings.rings_of(tmp_path) / f"0-{rank}.ring") for rank in (0, 1)
    )
    assert [rings.KINDS[k] for k in dead.records["kind"]] == ["step", "all_reduce"]
    assert dead.records["leave"][0] == 0 < dead.records["leave"][1]
    last = living.records[-1]
    assert (
        rings.KINDS[last["kind"]] == "broadcast"
        and last["failed"]
        and last["size"] == 40
        and last["step"] == 7
    )
    assert living.groups[last["group"]].ranks == (0, 1) and last["sequence"] == 2
    # the line of Weft that called the test
    assert living.places[last["place"]].startswith("weft/prove/pool.py:")
    shutil.rmtree(rings.rings_of(tmp_path))


def test_a_ring_is_whole_while_it_is_written(tmp_path: Path) -> None:
    ring, ended = trace.Ring(tmp_path / "0-0.ring", {"rank": 0}), threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            assert (
                ring.write("send", size=number, sequence=number, peer=number) == number
            )

    writer = threading.Thread(target=write)
    writer.start()
    begun, seen = time.monotonic(), list[int]()
    while time.monotonic() < begun + 1 or (
        max(seen) <= 0.9 * rings.RECORDS and time.monotonic() < begun + 60
    ):
        records = rings.read_ring(ring.path).records
        seen.append(len(records))
        assert all(
            (records[name] == records["number"]).all()
            for name in ("size", "sequence", "peer")
        )
        assert (np.diff(records["number"]) > 0).all()
    ended.set()
    writer.join()
    assert max(seen) > 0.9 * rings.RECORDS
    assert (np.diff(rings.read_ring(ring.path).records["number"]) == 1).all()


def test_a_file_that_is_no_ring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0-0.ring").write_bytes(b"weft")
    with pytest.raises(ValueError, match="not a ring"):
        rings.read_ring(tmp_path / "0-0.ring")


def test_full_names_do_not_end_the_rank(tmp_path: Path) -> None:
    ring = trace.Ring(tmp_path / "0-0.ring", {"rank": 0})
    numbers = [ring._name("place", "x" * 999) for _ in range(200)]
    assert (
        numbers[-1] == 0 and len(rings.read_ring(ring.path).places) == max(numbers) + 1
    )


def test_rings_of_a_run_that_ended_badly_go_with_it_or_after_a_day(
    tmp_path: Path,
) -> None:
    about, gone = {"created": started_at(os.getpid()), "rank": 0}, 2**30
    cases = {
        "late": (gone, 2, "/"),
        "living": (os.getpid(), 2, "/nowhere"),
        "new": (gone, 0, "/"),
        "lost": (gone, 0, "/nowhere"),
    }
    for name, (pid, days, run) in cases.items():
        ring = trace.Ring(
            tmp_path / name / "0-0.ring", about | {"pid": pid, "run": run}
        )
        os.utime(ring.path, (time.time() - days * 86400,) * 2)
    for name, days in (("begun", 0), ("empty", 2)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - days * 86400,) * 2)
    trace._sweep(tmp_path / "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "begun",
        "living",
        "new",
    ]


def test_without_room_for_a_ring_the_rank_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    ring = trace.Ring(tmp_path / "rings/0-0.ring", {"rank": 0})
    ring.leave(ring.write("barrier"))
    assert len(ring.read().records) == 1 and not list((tmp_path / "rings").iterdir())
