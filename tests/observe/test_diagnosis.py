"""From outside: for whom all wait and where it stands, while ranks live and when they are dead; ``weft doctor``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from weft.net.lost import peer_lost
from weft.net.process import started_at
from weft.observe import diagnosis, rings, trace
from weft.observe.diagnosis import examine
from weft.observe.run_metrics import Metrics
from weft.prove.pool import WorkerDied

#: Where the pool calls the functions below: the line of Weft nearest to them.
PLACE = "weft/prove/pool.py:"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(rings.rings_of(tmp_path), ignore_errors=True)


def late(folder: Path) -> tuple[str, tuple[int, ...], str, list[str]]:
    """Rank 2 comes late to the third collective, when it is said of it that all others wait."""
    with mock.patch.object(diagnosis, "STUCK_S", 0.3):
        return _late(folder)


def _late(folder: Path) -> tuple[str, tuple[int, ...], str, list[str]]:
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    trace.start_tracing(folder, rank)
    with trace.step(5):
        for _ in range(2):
            dist.all_reduce(torch.ones(1))
        if rank == 2:
            found, until = examine(folder), time.monotonic() + 60
            while not any("ranks 0-1 waited" in one.text for one in found.verdicts):
                assert time.monotonic() < until, found
                time.sleep(0.1)
                found = examine(folder)
        if rank < 2:
            dist.barrier(pair)
        dist.all_gather([torch.empty(1) for _ in range(3)], torch.ones(1))
    dist.barrier()
    trace.stop()
    if rank < 2:
        return "", (), "", []
    (said,) = found.verdicts
    return said.kind, said.ranks, said.text, [row.now for row in found.rows]


def test_who_has_not_come_is_named_with_the_collective_its_number_and_line(
    pool: Any, run: Path
) -> None:
    kind, ranks, text, now = pool.run(3, late, run)[2]
    assert (kind, ranks) == ("hang", (2,))
    assert (
        f"rank 2 hangs: it has not come to all_gather 3 of default_pg ({PLACE}" in text
    )
    assert (
        "in which ranks 0-1 waited" in text
        and f"; it left all_reduce 2 of default_pg ({PLACE}" in text
    )
    assert "in step 5" in text
    assert [one.partition(" of ")[0] for one in now] == [
        "all_gather 3",
        "all_gather 3",
        "computes",
    ]


def dead(folder: Path) -> None:
    """Rank 1 kills itself in the middle of a step; the others see that they have lost it."""
    trace.start_tracing(folder, dist.get_rank())
    try:
        with trace.step(3):
            dist.broadcast(torch.ones(9), 0)
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(9))
    finally:
        trace.end_tracing()  # this process lives on, and has other groups under the same names


def test_after_kill_the_rings_say_where_everybody_stood(
    pool: Any, run: Path, command: Any
) -> None:
    with pytest.raises(WorkerDied):
        pool.run(3, dead, run)
    (said,) = examine(run).verdicts
    assert (
        said.key == ("hang", (1,))
        and "rank 1 is gone: it has not come to all_reduce 2 of default_pg" in said.text
    )
    assert f"; it left broadcast 1 of default_pg ({PLACE}" in said.text
    code, out, err = command("doctor", run)
    assert (
        code == 0
        and not err
        and out.splitlines()[-1].startswith(
            "rank 1 is gone: it has not come to all_reduce 2"
        )
    )
    code, out, _ = command("doctor", run, "--json")
    found = json.loads(out)
    assert [row["process"] for row in found["ranks"]] == ["running", "gone", "running"]
    assert found["verdicts"][0]["ranks"] == [1]


def unanswered(folder: Path) -> str:
    """What is said of rank 1, which does not answer in time."""
    rank, both = dist.get_rank(), dist.new_group([0, 1], timedelta(seconds=1))
    trace.start_tracing(folder, rank)
    dist.barrier()
    said = ""
    if rank == 0:
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(1), group=both)
        said = str(peer_lost(error.value, seconds=1))
        dist.distributed_c10d._get_default_store().set("said", "")
    else:
        dist.distributed_c10d._get_default_store().wait(["said"], timedelta(seconds=60))
    trace.stop()
    return said


def test_a_lost_rank_s_message_says_where_it_stood(pool: Any, run: Path) -> None:
    said = pool.run(2, unanswered, run)[0]
    assert said.startswith("rank 1 has not answered for 1 s: rank 0 waited for it"), (
        said
    )
    assert (
        "; rank 0 went into all_reduce 1 of " in said
        and f"; rank 1 left barrier 1 of default_pg ({PLACE}" in said
    )


# --- rings that are made up ---


class Rings:
    """Rings of ranks of one group, which are this process or none."""

    def __init__(
        self,
        run: Path,
        world: int,
        gone: tuple[int, ...] = (),
        here: tuple[int, ...] | None = None,
    ) -> None:
        self.ranks, self.world = range(world) if here is None else here, world
        self.of = {
            rank: trace.Ring(rings.rings_of(run) / f"0-{rank}.ring", {
                "rank": rank, "epoch": 0, "world": world, "machine": "m", "pid": 2**30 if rank in gone else os.getpid(),
                "created": started_at(os.getpid()), "started": time.time(),
            }) for rank in self.ranks
        }  # fmt: skip
        for ring in self.of.values():
            ring._name("group", {"name": "dp", "id": "7", "range": [0, world, 1]})
            ring._name("place", "weft/somewhere.py:1")

    def write(
        self, rank: int, kind: str, sequence: int, inside: float = -1, peer: int = -1
    ) -> None:
        """A record of a wait that has ended, or has lasted for so many seconds."""
        ring = self.of[rank]
        number = ring.write(kind, 1, 8, sequence, peer, 1)
        ring.wait(number)
        if inside < 0:
            ring.leave(number)
        else:
            begun = time.monotonic_ns() - int(inside * 1e9)
            ring._map[
                ring._at(number) + trace._BEGIN : ring._at(number) + trace._BEGIN + 8
            ] = begun.to_bytes(8, "little")


def verdicts(run: Path) -> list[tuple[str, tuple[int, ...], str]]:
    return [(one.kind, one.ranks, one.text) for one in examine(run).verdicts]


def test_of_a_chain_the_last_is_meant(run: Path) -> None:
    made = Rings(run, 4)
    made.write(3, "send", 1, peer=2)
    made.write(2, "recv", 1, peer=3)
    made.write(2, "recv", 2, 9, peer=3)
    made.write(1, "recv", 1, 8, peer=2)
    made.write(0, "all_reduce", 1, 7)
    ((kind, ranks, text),) = verdicts(run)
    assert (kind, ranks) == ("hang", (3,)) and "it has not come to" in text
    assert "all_reduce 1 of dp (weft/somewhere.py:1), in which rank 0 waited 7" in text
    assert "it left send 1 to rank 2 of dp" in text


def test_a_frozen_rank_within_a_collective_that_the_others_have_left(run: Path) -> None:
    made = Rings(run, 3)
    for rank in (0, 2):
        made.write(rank, "all_reduce", 1)
        made.write(rank, "all_reduce", 2, 12)
    made.write(1, "all_reduce", 1, 13)
    ((kind, ranks, text),) = verdicts(run)
    assert (
        (kind, ranks) == ("hang", (1,))
        and "ranks 0, 2 waited 12" in text
        and "it went into all_reduce 1" in text
    )


def test_ranks_that_took_different_ways(run: Path) -> None:
    made = Rings(run, 3)
    for rank, kind in enumerate(("all_reduce", "all_reduce", "all_gather")):
        made.write(rank, kind, 4, 30)
    ((kind, ranks, text),) = verdicts(run)
    assert (
        kind == "mismatch"
        and 2 in ranks
        and "all_gather 4 of dp" in text
        and "all_reduce 4 of dp" in text
    )


def test_all_inside_is_a_link(run: Path) -> None:
    made = Rings(run, 3)
    for rank in range(3):
        made.write(rank, "all_reduce", 4, 30)
    ((kind, ranks, text),) = verdicts(run)
    assert (kind, ranks) == (
        "hang",
        (0, 1, 2),
    ) and "it does not end: a link between them is down" in text


def test_who_was_killed_within_a_collective_is_named(run: Path) -> None:
    made = Rings(run, 3, gone=(1,))
    for rank in range(3):
        made.write(rank, "all_reduce", 4, 30)
    ((kind, ranks, text),) = verdicts(run)
    assert (kind, ranks) == (
        "hang",
        (1,),
    ) and "rank 1 ended in all_reduce 4 of dp (weft/somewhere.py:1)" in text
    assert "in which ranks 0, 2 waited 30" in text


def test_of_ranks_that_were_ended_together_none_is_blamed(run: Path) -> None:
    made = Rings(run, 2, gone=(0, 1))
    for rank in range(2):
        made.write(rank, "all_reduce", 4, 30)
    assert verdicts(run) == []


def test_what_other_machines_know_is_not_made_up(run: Path) -> None:
    made = Rings(run, 4, here=(0, 1))
    for rank in (0, 1):
        made.write(rank, "all_reduce", 4, 30)
    ((_, _, text),) = verdicts(run)
    assert "of ranks 2-3 the rings are on other machines" in text


def test_short_waits_of_living_ranks_are_none_of_a_hang(run: Path) -> None:
    made = Rings(run, 2)
    made.write(0, "all_reduce", 4, 2)
    assert verdicts(run) == []


def test_a_run_that_has_ended_is_told_from_its_record(run: Path, command: Any) -> None:
    metrics = Metrics(run)
    verdict = {
        "kind": "sender",
        "ranks": [1],
        "factor": 9.0,
        "text": "rank 1 sends slowly to all others",
    }
    rows = [{"rank": r, "machine": "m", "compute": 0.1, "wait": 0.02} for r in range(2)]
    matrix = [[None, 0.002], [0.3, None]]
    metrics.log(
        "delays",
        20,
        verdicts=[verdict],
        ranks=rows,
        matrix=matrix,
        size=262144,
        probes=1,
        probe_s=0.1,
    )
    metrics.close()
    code, out, err = command("doctor", run)
    assert (
        code == 0
        and not err
        and out.splitlines()[-1] == "rank 1 sends slowly to all others"
    )
    assert (
        "ms of 256 KiB\tto 0\tto 1" in out
        and "from 1\t300\t-" in out
        and "1\t100\t20" in out
    )
    assert examine(run).verdicts[0].ranks == (1,)


def test_mistakes_are_one_line(tmp_path: Path, command: Any) -> None:
    code, out, err = command("doctor", tmp_path / "nowhere")
    assert (
        code == 1
        and not out
        and "give the folder of a run that was started" in err
        and err.count("\n") == 1
    )
    place = rings.rings_of(tmp_path)
    place.mkdir(parents=True)
    (place / "0-0.ring").write_bytes(b"\0" * 100)
    (place / "nonsense").write_bytes(b"")
    (place / "0-1.ring").write_bytes(
        rings.MAGIC + b"\0" * (rings.SIZE - len(rings.MAGIC))
    )
    code, _, err = command("doctor", tmp_path)
    shutil.rmtree(place)
    assert code == 1 and err.count("\n") == 1
    for part in (
        {"verdicts": [{"kind": "x"}]},
        {"verdicts": [3]},
        {"matrix": [[1]]},
        {"ranks": [{"rank": 0}]},
    ):
        (tmp_path / "metrics.jsonl").write_text(
            json.dumps({"kind": "delays", "step": 1, "time": 0} | part) + "\n"
        )
        code, out, err = command("doctor", tmp_path)
        assert (
            code == 1
            and not out
            and "its last record of kind delays is damaged" in err
            and err.count("\n") == 1
        )


def test_rings_of_an_earlier_start_do_not_count(run: Path) -> None:
    old = Rings(run, 4, gone=(0, 1, 2, 3))
    for rank in range(4):
        old.write(rank, "all_reduce", 1 + (rank == 3), 99)
    time.sleep(0.01)
    Rings(run, 2)
    assert [row.rank for row in examine(run).rows] == [0, 1] and verdicts(run) == []
