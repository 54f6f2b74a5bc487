"""The time split of a step, on events made by hand and on two real ranks."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import record_function

from tests.measured import until_true
from weft.observe.time_split import (
    TimeSplit,
    TraceEvent,
    _kind,
    profile_step,
    split_events,
    trace,
)


def work(size: int = 300, times: int = 1) -> None:
    a = torch.rand(size, size)
    for _ in range(times):
        a = torch.tanh(a @ a)


def test_phases_of_one_process() -> None:
    def step() -> str:
        with record_function("weft:data"):
            time.sleep(0.05)
        work(times=3)
        with record_function("weft:optimizer"):
            time.sleep(0.10)
        return "result"

    def measured() -> TimeSplit:
        result, split = profile_step(step)
        assert (
            result == "result"
            and split.communication == 0
            and split.data >= 0.05
            and split.optimizer >= 0.1
        )
        assert sum(
            (split.compute, split.communication, split.data, split.optimizer)
        ) == pytest.approx(split.total)
        return split

    until_true(measured, lambda split: split.data < 0.08 and split.optimizer < 0.14)


def test_cpu_events_count_once_and_on_the_main_thread_only() -> None:
    events = [
        TraceEvent("weft:step", 0, 10),
        TraceEvent("c10d::allreduce_", 1, 2),
        TraceEvent("gloo:all_reduce", 1, 9, thread=2),
        TraceEvent("_c10d_functional::wait_tensor", 4, 6),
        TraceEvent("weft:wait", 4.5, 5.5),
        TraceEvent("weft:data", 0, 0.5),
        TraceEvent("weft:optimizer", 5, 8),
        TraceEvent("weft:wait", 9, 12),
    ]
    assert split_events(events) == TimeSplit(
        compute=3.5, communication=4, data=0.5, optimizer=2, total=10, hidden=5
    )


def test_cuda_events_count_what_no_other_kernel_hides() -> None:
    events = [
        TraceEvent("weft:step", 0, 20),
        TraceEvent("weft:data", 0, 2),
        TraceEvent("weft:optimizer", 3, 4),  # the host is ahead of the device
        TraceEvent("gemm", 1, 6, kind="kernel"),
        TraceEvent("ncclDevKernel_AllGather", 4, 9, kind="kernel"),
        TraceEvent("Memcpy HtoD", 6, 9, kind="gpu_memcpy"),
        TraceEvent("nccl:all_gather", 4, 16, kind="gpu_user_annotation"),
        TraceEvent("gemm", 10, 12, kind="kernel"),
        TraceEvent("weft:optimizer", 12, 16, kind="gpu_user_annotation"),
        TraceEvent("adam", 12, 14, kind="kernel"),
        TraceEvent("ncclDevKernel_AllReduce", 13.5, 15, kind="kernel"),
        TraceEvent("adam", 15, 17, kind="kernel"),
    ]
    split = split_events(events)
    assert split == TimeSplit(
        compute=20 - 4 - 1 - 4,
        communication=4,
        data=1,
        optimizer=4,
        total=20,
        hidden=2.5,
    )


def _rank(rank: int, rendezvous: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2
    )
    large, small = torch.rand(4_000_000), torch.rand(8)

    def talk() -> None:
        for _ in range(4):
            dist.all_reduce(large)

    def talk_functionally() -> None:
        from torch.distributed import _functional_collectives as functional

        for _ in range(4):
            functional.wait_tensor(
                functional.all_reduce(large, "sum", dist.group.WORLD)
            )

    def compute() -> None:
        work(400, times=20)
        dist.all_reduce(small)

    def wait_for_a_slow_rank() -> None:
        if rank == 1:
            time.sleep(0.3)
        dist.barrier()

    def update() -> None:
        with record_function("weft:optimizer"):
            dist.all_reduce(large)
            time.sleep(0.2)

    splits = {}
    for step in (talk, talk_functionally, compute, wait_for_a_slow_rank, update):
        dist.barrier()
        split = profile_step(step)[1]
        splits[step.__name__] = vars(split)
    assert dist.Work.wait.__name__ == "wait", "the mark on Work.wait stayed"
    Path(out, f"{rank}.json").write_text(json.dumps(splits))
    dist.destroy_process_group()


@pytest.mark.soak
def test_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:

    def measured() -> list[dict[str, dict[str, float]]]:
        (tmp_path / "rendezvous").unlink(missing_ok=True)
        mp.spawn(_rank, (str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=2)
        both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
        for splits in both:
            assert splits["update"]["communication"] > 0
            for split in splits.values():
                parts = sum(
                    split[k] for k in ("compute", "communication", "data", "optimizer")
                )
                assert parts == pytest.approx(split["total"])
        return both

    def as_expected(both: list[dict[str, dict[str, float]]]) -> bool:
        shares = [
            {name: s["communication"] / s["total"] for name, s in splits.items()}
            for splits in both
        ]
        waits = [splits["wait_for_a_slow_rank"]["communication"] for splits in both]
        # On a busy machine one rank waits for the other; the one that is waited for tells what the step is made of.
        return (
            max(s["talk"] for s in shares) > 0.8
            and max(s["talk_functionally"] for s in shares) > 0.6
            and min(s["compute"] for s in shares) < 0.4
            and min(splits["update"]["optimizer"] for splits in both) > 0.1
            and waits[0] > max(0.2, waits[1])
        )

    until_true(measured, as_expected)
    assert "USDT" not in capfd.readouterr().err


@pytest.mark.parametrize("loop", [2, 6])
def test_trace_holds_the_asked_steps(tmp_path: Path, loop: int) -> None:
    path = tmp_path / "deep" / "trace.json"
    active = []
    with trace(path, steps=3) as step:
        for i in range(loop):
            with record_function(f"step-{i}"):
                work(8)
            active.append(step())
            if not active[-1]:
                assert profile_step(work)[1].total > 0
    names = {e.get("name") for e in json.loads(path.read_text())["traceEvents"]}
    assert {f"step-{i}" for i in range(6)} & names == {
        f"step-{i}" for i in range(1, min(loop, 4))
    }
    assert active == [True, True, True, False, False, False][:loop]
    work()
    assert profile_step(work)[1].total > 0


def test_profiled_steps_leave_no_memory_behind() -> None:
    """Each left about 0.4 MB in a reference cycle, until a collection of the oldest generation that may never come."""

    def step() -> None:
        x = torch.rand(4, 8)
        for _ in range(100):
            x = x + 1

    enabled = gc.isenabled()
    gc.disable()
    try:
        resident = []
        for _ in range(120):
            profile_step(step)
            resident.append(psutil.Process().memory_info().rss / 2**20)
    finally:
        if enabled:
            gc.enable()
    assert resident[-1] - resident[39] < 4, "MB in 80 profiled steps"


def test_kinds_of_events_without_their_types() -> None:
    # PyTorch 2.11 and 2.12 do not say the type of an event
    kinds = torch.autograd.DeviceType

    def event(device: object, note: bool, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            device_type=lambda: device,
            is_user_annotation=lambda: note,
            name=lambda: name,
        )

    assert [
        _kind(event(*fields))
        for fields in (
            (kinds.CPU, False, "aten::mm"),
            (kinds.CPU, True, "weft:step"),
            (kinds.CUDA, True, "weft:optimizer"),
            (kinds.CUDA, False, "Memcpy DtoH"),
            (kinds.CUDA, False, "ncclDevKernel"),
        )
    ] == ["cpu_op", "user_annotation", "gpu_user_annotation", "gpu_memcpy", "kernel"]
