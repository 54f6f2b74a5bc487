"""Tables executed on real ranks: the same values as in one process, the simulated time, and nobody waits for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.modelled import replay, sleeping
from tests.measured import until_true
from weft.net.lost import PeerLost
from weft.prove.pool import WorkerDied
from weft.schedule.actions import Action, Key, ScheduleError, Table, Value
from weft.schedule.build import Times, build
from weft.schedule.build.greedy import list_schedule
from weft.schedule.execute import execute
from weft.schedule.lower import lower
from weft.schedule.pipeline_wire import Wire
from weft.schedule.simulate import Costs, simulate, uniform_costs
from weft.schedule.skip import plan_paths

CPU = torch.device("cpu")


def tracing(results: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Operations whose results depend on everything they read, with shapes that depend on the microbatch."""

    def op(a: Action, reads: Sequence[Any]) -> list[Any]:
        seed = torch.full(
            (1 + a.microbatch % 3, 2), float(a.stage + 1), dtype=torch.float64
        )
        total = seed + sum(
            t.sum() for r in reads for t in (r if isinstance(r, tuple) else (r,))
        )
        results[str(a)] = total
        # Values of one tensor and of several, of different types.
        return [
            total * i if i else (total, torch.tensor([[a.microbatch]]))
            for i, _ in enumerate(a.writes)
        ]

    return {kind: op for kind in "FBIW"}


def traced(name: str, microbatches: int, window: int) -> dict[str, torch.Tensor]:
    results: dict[str, torch.Tensor] = {}
    wire = Wire(dist.group.WORLD, CPU, 20)
    table = lower(build(name, dist.get_world_size(), microbatches))
    for _ in range(2):  # a wire serves many steps
        execute(table, dist.get_rank(), tracing(results), wire, window=window)
    return results


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gpipe", "interleaved-1f1b", "zb-v", "dualpipe"])
@pytest.mark.parametrize("window", [2, 4])
def test_ranks_compute_what_one_process_computes(
    pool: Any, name: str, window: int
) -> None:
    found: dict[str, torch.Tensor] = {}
    for results in pool.run(4, traced, name, 6, window):
        found |= results
    expected: dict[str, torch.Tensor] = {}
    replay(build(name, 4, 6), tracing(expected))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


def rehearse(
    table: Table, unit: float, move: float
) -> list[list[tuple[int, Key, float, float]]]:
    """This rank, its actions, when each began and when it ended, in each of three runs after a barrier."""
    wire = Wire(dist.group.WORLD, CPU, 30, lambda value: [((1,), torch.float32)])
    costs = uniform_costs(table, Times(unit, unit * 1.1, unit * 0.9, move))
    lowered, runs = lower(table), []
    for _ in range(3):
        dist.barrier()
        run = execute(lowered, dist.get_rank(), sleeping(costs.compute), wire)
        runs.append([(a.rank, a.key, start, end) for a, start, end in run.times])
    return runs


def skipping() -> Table:
    costs = Costs(lambda a: {"F": 1.0, "I": 1.1, "W": 0.9, "B": 2.0}[a.kind])
    holders = [[r] for r in range(4)]
    return list_schedule(
        "skip", holders, plan_paths(holders, 8, 0.25, costs), costs, ranks=4
    )


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "skippipe"]
)
def test_time_is_the_simulated_one(pool: Any, name: str) -> None:
    table = (
        skipping()
        if name == "skippipe"
        else build(name, 4, 8, None, Times(1, 1.1, 0.9))
    )
    # until what a busy machine takes to wake a rank is short beside it
    units = iter((0.02, 0.04, 0.08, 0.16, 0.32))

    def best() -> float:
        ranks = pool.run(4, rehearse, table, next(units), 0.0)
        return min(
            over_simulated(table, [timed for rank in run for timed in rank])
            for run in zip(*ranks, strict=True)
        )

    until_true(best, lambda found: found < 1.1, tries=5)


def over_simulated(table: Table, timed: list[tuple[int, Key, float, float]]) -> float:
    """How long all took, over the simulated time of actions that take what these took: a busy machine oversleeps."""
    seconds = {(rank, key): end - start for rank, key, start, end in timed}
    expected = simulate(table, Costs(lambda a: seconds[a.rank, a.key])).elapsed
    took = max(end for *_, end in timed) - min(start for _, _, start, _ in timed)
    assert expected <= took + 1e-6
    return took / expected


def stalling(seconds: float, exits: bool) -> str:
    """Rank 2 of 4 stops in the middle of its third forward."""
    wire = Wire(dist.group.WORLD, CPU, 1.0)

    def op(a: Action, reads: Sequence[Any]) -> list[Any]:
        if (a.rank, a.kind, a.microbatch) == (2, "F", 3):
            if exits:
                os._exit(3)
            time.sleep(seconds)
        return [torch.zeros(1) for _ in a.writes]

    begun = time.monotonic()
    try:
        execute(
            lower(build("1f1b", 4, 8)), dist.get_rank(), dict.fromkeys("FB", op), wire
        )
    except PeerLost as error:
        time.sleep(1)  # the others still look whom this rank waited for
        return f"{time.monotonic() - begun:.0f} {error}"
    return ""


@pytest.mark.slow
def test_a_rank_that_stalls_is_named_by_the_others(pool: Any) -> None:
    found = pool.run(4, stalling, 4.0, False)
    for rank in (0, 1, 3):
        seconds, _, message = found[rank].partition(" ")
        assert int(seconds) <= 8
        assert "rank 2 has not answered for 1 s" in message, found
        assert f"rank {rank} " in message


def dying() -> str:
    """As :func:`stalling`, but what the survivors say goes into the store, as the pool reports the death itself."""
    message = stalling(0, exits=True)
    dist.distributed_c10d._get_default_store().set(f"said/{dist.get_rank()}", message)
    return message


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(pool: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match="rank 2 died with exit code 3"):
        pool.run(4, dying)
    assert time.monotonic() - begun < 15


def test_unknown_kind_is_named() -> None:
    table = Table("custom", ((Action(0, "Q", 0, 0),),), 1, ())
    with pytest.raises(ScheduleError, match="kind Q, which no op runs"):
        execute(table, 0, {}, None)


def test_circle_in_a_replay_is_named() -> None:
    stuck = Action(0, "F", 0, 0, reads=(Value("act", 5, 0),))
    with pytest.raises(ScheduleError, match=r"cannot go on at F\(0,0\)"):
        replay(Table("custom", ((stuck,),), 1, ()), sleeping(lambda a: 0.0))
