"""Who is slow is named, and nobody else: from durations alone, from matrices, and with real ranks that are slowed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hosts import unavailable

from tests.measured import until_true
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.observe import rank_delays as delays
from weft.observe import rings, trace
from weft.observe.rank_delays import (
    WINDOW,
    DelayWatch,
    Digest,
    StepTimes,
    Verdict,
    digest_trace,
    ranks_text,
    slow_computers,
    slow_links,
)
from weft.resilience.watching import Watching
from weft.train.recorder import Recorder

Named = list[tuple[str, tuple[int, ...]]]


def digests(
    compute: Sequence[float],
    seed: int = 0,
    noise: float = 0.2,
    alike: Sequence[str] = (),
    machines: Sequence[str] = (),
) -> list[Digest]:
    """Steps of ranks that compute about so long, and wait for the last of them."""
    draw = np.random.default_rng(seed)
    times = np.array(compute)[:, None] * draw.lognormal(
        0, noise, (len(compute), WINDOW)
    )
    length = times.max(0) + 0.01
    steps = [
        {s: StepTimes(length[s], length[s] - mine[s], 0.0) for s in range(WINDOW)}
        for mine in times
    ]
    alike, machines = alike or [""] * len(steps), machines or ["m"] * len(steps)
    return [
        Digest(rank, machines[rank], mine, alike[rank], 1e6)
        for rank, mine in enumerate(steps)
    ]


def named(found: Sequence[Verdict]) -> Named:
    return [verdict.key for verdict in found]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_slow_computer_is_named_and_equal_ones_are_not(world: int) -> None:
    for seed in range(50):
        usual = [0.1] * world
        assert named(slow_computers(digests(usual, seed), {}, {})) == []
        usual[seed % world] = 0.18
        (found,) = slow_computers(digests(usual, seed, 0.1), {}, {})
        assert found.key == ("computer", (seed % world,)) and 1.5 < found.factor < 2.2


def test_one_slow_step_is_no_slow_computer() -> None:
    given = digests([0.1] * 4, noise=0.05)
    steps = dict(given[2].steps)
    steps[3] = StepTimes(1.1, 0.01, 0.0)
    assert (
        slow_computers([*given[:2], Digest(2, "m", steps, "", 1e6), given[3]], {}, {})
        == []
    )


def test_two_slow_computers_of_eight_are_both_named() -> None:
    usual = [0.1, 0.2, 0.1, 0.1, 0.1, 0.2, 0.1, 0.1]
    assert named(slow_computers(digests(usual, noise=0.05), {}, {})) == [
        ("computer", (1,)),
        ("computer", (5,)),
    ]


def test_stages_with_more_to_do_are_not_slow() -> None:
    alike = ["first", "first", "last", "last"]
    assert (
        slow_computers(digests([0.1, 0.1, 0.17, 0.17], alike=alike, noise=0.05), {}, {})
        == []
    )
    assert named(
        slow_computers(digests([0.1, 0.1, 0.17, 0.3], alike=alike, noise=0.05), {}, {})
    ) == [("computer", (3,))]
    # A stage that no other rank has is held against its own best time.
    alone = digests([0.1, 0.2, 0.1], alike=["a", "b", "c"], noise=0.05)
    assert slow_computers(alone, {0: 0.1, 1: 0.19, 2: 0.1}, {}) == []
    assert named(slow_computers(alone, {0: 0.1, 1: 0.08, 2: 0.1}, {})) == [
        ("computer", (1,))
    ]


def test_a_processor_that_others_have_now_and_then_makes_no_slow_computer() -> None:
    """On a machine with too much to do it is now this rank and now that; one that has hardly any time is named."""
    given = digests([0.1, 0.2, 0.1, 0.1], noise=0.05)
    starved = {s: step._replace(taken=0.1) for s, step in given[1].steps.items()}
    assert (
        slow_computers([given[0], replace(given[1], steps=starved), *given[2:]], {}, {})
        == []
    )
    given = digests([0.1, 0.4, 0.1, 0.1], noise=0.05)
    starved = {s: step._replace(taken=0.3) for s, step in given[1].steps.items()}
    (found,) = slow_computers(
        [given[0], replace(given[1], steps=starved), *given[2:]], {}, {}
    )
    assert found.key == ("computer", (1,)) and found.text.endswith(
        "; for 300 ms of it other work had its processor"
    )


def test_who_has_less_to_do_on_purpose_is_held_against_its_share() -> None:
    given = digests([0.1, 0.1, 0.1, 0.1], noise=0.05)
    assert named(slow_computers(given, {}, {2: 0.5})) == [("computer", (2,))]


def matrix(world: int, usual: float = 0.002, seed: int = 0) -> np.ndarray[Any, Any]:
    found = usual * np.random.default_rng(seed).lognormal(0, 0.2, (world, world))
    np.fill_diagonal(found, np.nan)
    return found


@pytest.mark.parametrize("world", [3, 4, 8])
def test_rows_columns_and_cells_of_the_matrix(world: int) -> None:
    usual = digests([0.05] * world)
    for seed in range(30):
        victim, other = seed % world, (seed + 1) % world
        assert slow_links(matrix(world, seed=seed), usual) == []
        row, column, both, cell = (matrix(world, seed=seed) for _ in range(4))
        row[victim] *= 20
        column[:, victim] *= 20
        both[victim] *= 20
        both[:, victim] *= 20
        cell[victim, other] *= 20
        assert named(slow_links(row, usual)) == [("sender", (victim,))]
        assert named(slow_links(column, usual)) == [("receiver", (victim,))]
        assert named(slow_links(both, usual)) == [("network", (victim,))]
        assert named(slow_links(cell, usual)) == [("link", (victim, other))]


def test_of_two_ranks_it_is_the_link() -> None:
    cell = matrix(2)
    cell[1, 0] *= 20
    assert named(slow_links(cell, digests([0.05] * 2))) == [("link", (1, 0))]


def test_ranks_of_a_machine_are_one() -> None:
    machines = ["a", "a", "b", "b", "c", "c"]
    times = matrix(6)
    times[np.ix_([2, 3], [0, 1, 4, 5])] *= 20
    assert named(slow_links(times, digests([0.05] * 6, machines=machines))) == [
        ("sender", (2, 3))
    ]


def test_what_does_not_cost_a_step_much_is_not_named() -> None:
    times = matrix(4, 0.0001)
    times[1] *= 20
    assert slow_links(times, digests([5.0] * 4)) == []


def test_two_far_sites_are_no_slow_link() -> None:
    times = matrix(6)
    times[:3, 3:] *= 30
    times[3:, :3] *= 30
    assert slow_links(times, digests([0.05] * 6)) == []


def test_pairs_that_were_not_measured_are_no_evidence() -> None:
    times = np.full((4, 4), np.nan)
    assert slow_links(times, digests([0.05] * 4)) == []
    times = matrix(4)
    times[0, 1] = times[2, 1] = np.nan
    times[3, 1] *= 20
    assert named(slow_links(times, digests([0.05] * 4))) == [("link", (3, 1))]


def test_ranks_in_words() -> None:
    assert ranks_text([3, 0, 1, 2, 7]) == "ranks 0-3, 7"
    assert ranks_text([5]) == "rank 5"


def steps_of(
    folder: Path, fault: str, victim: int, count: int
) -> tuple[Named, float, dict[str, Any], Digest]:
    """Steps of a few milliseconds with collectives of a group and messages; ``victim`` is 40 ms slower."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    ring = trace.start_tracing(folder, rank)
    watch, rows = DelayWatch(ring, world, torch.device("cpu")), torch.zeros(1 << 14)
    for number in range(1, count + 1):
        with trace.step(number):
            begun = time.thread_time()
            while time.thread_time() - begun < 0.004 + 0.04 * (
                fault == "busy" and rank == victim
            ):
                pass
            time.sleep(0.04 * (fault == "sleep" and rank == victim))
            dist.all_reduce(rows)
            dist.all_gather([torch.empty_like(rows) for _ in range(world.size())], rows)
        watch.look()
    last = digest_trace(rings.read_ring(ring.path))
    trace.stop()
    slowness = next(
        (
            v.factor
            for v in watch.verdicts
            if v.kind == "computer" and victim in v.ranks
        ),
        1.0,
    )
    return named(watch.verdicts), slowness, watch.record(), last


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("world", "fault", "victim"),
    [(4, "sleep", 2), (4, "busy", 0), (2, "sleep", 1), (3, "busy", 1)],
)
def test_a_slowed_rank_is_named_within_20_steps(
    pool: Any, tmp_path: Path, world: int, fault: str, victim: int
) -> None:
    def seen() -> list[tuple[Named, float, str, float]]:
        found = pool.run(world, steps_of, tmp_path, fault, victim, 20)
        for *_, last in found:
            assert len(last.steps) == min(WINDOW, 20) and last.sent == 65536 * (
                1 + world
            )
        slow = next(last for *_, last in found if last.rank == victim)
        return [
            (said, slowness, str(record["verdicts"]), slow.compute)
            for said, slowness, record, _ in found
        ]

    def named_by_all(found: list[tuple[Named, float, str, float]]) -> bool:
        return all(
            # others may be, if other work has their processors
            ("computer", (victim,)) in said
            and slowness > 1.5
            and f"rank {victim} is a slow computer" in text
            and compute > 0.04
            for said, slowness, text, compute in found
        )

    until_true(seen, named_by_all)


@pytest.mark.slow
def test_probes_are_bounded_and_counted(pool: Any, tmp_path: Path) -> None:
    """Steps that hardly compute are a reason to probe, but not again and again."""
    for _, _, record, _ in pool.run(4, steps_of, tmp_path, "", 0, 60):
        assert (
            record["probes"] <= 48
            and record["probe_s"] >= 0
            and len(record["ranks"]) == 4
        )
        assert record["matrix"] is None or np.array(record["matrix"]).shape == (4, 4)


def probed(late: float, wire: float) -> Named:
    """Who is slow if rank 1 sends so many seconds late to rank 2, and so many more for every 256 KiB."""
    world, send_all = dist.group.WORLD, dist.batch_isend_irecv
    assert world is not None

    def send(ops: list[dist.P2POp]) -> list[dist.Work]:
        theirs = [
            op.tensor
            for op in ops
            if op.op is dist.isend and op.peer == 2 and dist.get_rank() == 1
        ]
        time.sleep(sum(late + wire * tensor.nbytes / delays.PROBE for tensor in theirs))
        return send_all(ops)

    with mock.patch.object(dist, "batch_isend_irecv", send):
        found, times = delays.steady_matrix(world, torch.device("cpu"))
    assert found.shape == (3, 3) and times <= 1 + delays.REPEATS
    return named(slow_links(found, digests([0.05] * 3)))


def test_a_slow_wire_is_named_and_a_process_that_answers_late_is_not(pool: Any) -> None:
    """Every time a few milliseconds late, as of a process that waits for its core: that is no matter of bytes."""
    assert pool.run(3, probed, 0.0, 0.08) == [[("link", (1, 2))]] * 3
    assert pool.run(3, probed, 0.004, 0.0) == [[]] * 3


@pytest.mark.parametrize("size", [2, 3, 4, 7, 16, 17, 24])
def test_nobody_has_two_messages_at_a_time(size: int) -> None:
    rounds = delays.rounds_of(size)
    pairs = [pair for some in rounds for pair in some]
    assert (
        len(set(pairs))
        == len(pairs)
        == (size * (size - 1) if size <= 16 else len(pairs))
    )
    for some in rounds:
        assert all(len({pair[end] for pair in some}) == len(some) for end in (0, 1))
        assert not {pair[::-1] for pair in some} & {*some}


@pytest.mark.soak
def test_slow_wires_between_hosts_are_named(tmp_path: Path) -> None:
    """The campaign of ``bench/doctor.py``, a trial of each kind; on a busy machine one of them may be missed."""
    if reason := unavailable():
        pytest.skip(reason)
    script, path = (
        Path(__file__).parents[2] / "bench" / "doctor.py",
        tmp_path / "doctor.json",
    )
    command = [
        sys.executable,
        str(script),
        "--trials",
        "4",
        "--quiet",
        "0",
        "--seed",
        "2",
        "--json",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    trials = json.loads(path.read_text())["trials"]
    assert {trial["fault"] for trial in trials} > {"sender", "receiver", "link"}
    assert sum(trial["right"] for trial in trials) >= 3, done.stdout


def test_the_only_rank_left_does_not_watch_the_groups_of_the_view_before() -> None:
    guard = Watching()
    guard.watch = cast(
        DelayWatch, SimpleNamespace(look=lambda: pytest.fail("these groups are gone"))
    )
    guard.watch_ranks(
        cast(Mesh, SimpleNamespace(step_group=None, layout=Layout())),
        cast(Recorder, None),
    )
    guard.after_step()
