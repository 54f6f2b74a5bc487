"""The pool that all multi-rank tests stand on."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.measured import until_true
from weft.errors import UsageError
from weft.prove.pool import ProcessPool, WorkerDied


def rank_sum(offset: int) -> tuple[int, float, int]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def fail_on(rank: int, kind: str) -> None:
    if dist.get_rank() == rank:
        if kind == "usage":
            raise UsageError("axis 'tq' is unknown")
        if kind == "local":

            class Local(Exception):
                pass

            raise Local("out of reach")
        assert dist.get_world_size() == 1, "an assertion of the test"
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def wait_for(rank: int) -> None:
    """All others wait for ``rank``, which waits for nobody; who is killed ends the wait of the others."""
    if dist.get_rank() == rank:
        threading.Event().wait()
    dist.barrier()


def fail_beside_a_hang(rank: int) -> None:
    if dist.get_rank() == rank:
        raise UsageError("the cause")
    threading.Event().wait()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def crash_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def leave_marks() -> tuple[torch.dtype, float]:
    seen = torch.get_default_dtype(), torch.rand(()).item()
    torch.set_default_dtype(torch.float64)
    return seen


def test_results_come_in_rank_order_from_the_same_processes(pool: ProcessPool) -> None:
    results = pool.run(4, rank_sum, 10)
    assert [(rank, total) for rank, total, _ in results] == [
        (r, 46.0) for r in range(4)
    ]
    pids = [pid for *_, pid in results]
    assert pool.pids()[:4] == pids
    assert [pid for *_, pid in pool.run(2, rank_sum, 0)] == pids[:2]
    assert pool.run(1, rank_sum, 5) == [(0, 5.0, pids[0])]


def test_calls_are_quick(pool: ProcessPool) -> None:
    pool.run(4, rank_sum, 0)

    def took() -> float:
        start = time.perf_counter()
        pool.run(4, rank_sum, 0)
        return time.perf_counter() - start

    # Importing PyTorch takes every rank seconds of processor time, however busy the machine is.
    until_true(took, lambda seconds: seconds < 1, tries=20)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "error"),
    [("usage", UsageError), ("assert", AssertionError), ("local", RuntimeError)],
)
def test_an_exception_reaches_the_test_with_its_trace(
    pool: ProcessPool, kind: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        pool.run(3, fail_on, 1, kind)
    assert "on rank 1 of 3" in caught.value.__notes__[0]
    assert "in fail_on" in caught.value.__notes__[0]
    assert len(pool.run(3, rank_sum, 0)) == 3


@pytest.mark.slow
def test_a_hang_names_the_ranks_and_the_pool_recovers(pool: ProcessPool) -> None:
    # on a busy machine the others do not answer within a second either
    limits = iter((1, 4, 16))

    def hung() -> tuple[list[int], list[int]]:
        limit = next(limits)
        before = [pid for *_, pid in pool.run(3, rank_sum, 0)]
        with pytest.raises(
            TimeoutError,
            match=rf"rank 2 did not answer within {limit} s(?s:.)*in hang_on",
        ):
            pool.run(3, hang_on, 2, timeout=limit)
        after = [pid for *_, pid in pool.run(3, rank_sum, 0)]
        assert before[2] not in after and not psutil.pid_exists(before[2])
        return before, after

    until_true(hung, lambda pids: {*pids[0][:2]} <= {*pids[1]}, tries=3)


def test_stacks_are_taken_before_anybody_is_killed(pool: ProcessPool) -> None:
    """A rank that waits for one that was killed fails, and would be shown idle, as if it had come to its end."""
    with pytest.raises(TimeoutError, match="rank 2 did not") as caught:
        pool.run(3, wait_for, 0, timeout=1)
    assert "in _serve" in str(caught.value)
    waiting = str(caught.value).split("rank 2 did not answer")[1]
    assert "in barrier" in waiting and "in wait_for" in waiting


def test_an_error_is_not_hidden_by_the_hang_it_causes(
    pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.prove.pool.AFTERMATH_S", 0.5)
    with pytest.raises(UsageError, match="the cause"):
        pool.run(2, fail_beside_a_hang, 1)
    assert len(pool.run(2, rank_sum, 0)) == 2


def test_a_death_is_named_and_the_worker_replaced(pool: ProcessPool) -> None:
    with pytest.raises(WorkerDied, match="rank 1 died with exit code 7"):
        pool.run(2, die_on, 1)
    assert len(pool.run(2, rank_sum, 0)) == 2


def test_a_crash_shows_where_it_happened(pool: ProcessPool) -> None:
    with pytest.raises(
        WorkerDied,
        match=r"rank 1 died with exit code -11\nFatal Python error(?s:.)*in crash_on",
    ):
        pool.run(2, crash_on, 1)
    assert len(pool.run(2, rank_sum, 0)) == 2


def test_a_call_leaves_no_marks(pool: ProcessPool) -> None:
    first, second = pool.run(1, leave_marks), pool.run(1, leave_marks)
    assert first == second
    assert first[0][0] == torch.float32


def test_closing_ends_all_processes() -> None:
    pool = ProcessPool()
    pids = [pid for *_, pid in pool.run(2, rank_sum, 0)]
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
