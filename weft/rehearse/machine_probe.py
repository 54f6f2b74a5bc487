"""What ``weft probe`` measures on the machine at hand, for :mod:`weft.rehearse.curves`.

Everything is measured while as many processes do the same at once as a run would have ranks: they share cores, caches
and memory. Costs are processor time by thread, which other programs on the machine hardly change. Times are seconds,
sizes bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist

from weft.errors import WeftError
from weft.memory.heap import keep_heap
from weft.models.widened import multiply
from weft.net.sockets import listen
from weft.observe.flops import peak_resident
from weft.paths import home_path
from weft.rehearse.journal import processor_seconds
from weft.rehearse.rehearsed_step import reference, usual_step
from weft.rehearse.transfers import bytes_per_s, disk_curves, link_curves
from weft.run.failure import leave
from weft.run.rank_processes import init_ranks, threads_per_rank

Points = list[list[float]]

#: Seconds after which the processes of one setting are given up.
PATIENCE_S = 900
#: Seconds that they wait for each other.
JOIN_S = 300
MESSAGES = (64, 2**14, 2**17, 2**19, 2**21, 2**23)


def time_call(call: Callable[[], Any]) -> float:
    """Return the seconds that a call of ``call`` takes: the median of five calls, after one that is not timed.

    The seconds are processor time of all threads, divided by PyTorch's number of threads.
    """
    call()
    samples = []
    for _ in range(5):
        begun = processor_seconds()
        call()
        samples.append(processor_seconds() - begun)
    return statistics.median(samples)


def triad() -> float:
    """Return the bandwidth of the memory in bytes per second, as measured by ``a = b + s * c`` on arrays larger than
    any cache (McCalpin's STREAM).
    """
    a, b, c = torch.ones(3, 2**23).unbind()
    return 3 * 4 * 2**23 / time_call(lambda: torch.add(b, c, alpha=3.0, out=a))


def peaks() -> dict[str, float]:
    """Return the measured FLOP/s of a large square matrix product as in training, by name of its number format."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.rand(768, 768).to(dtype)
        seconds = time_call(partial(multiply, a, a))
        rates[str(dtype).removeprefix("torch.")] = 2 * 768**3 / seconds
    return rates


# --- between ranks ---


def collectives(sizes: Iterable[int], turns: int) -> dict[str, Points]:
    """Measure collectives of several ``sizes``, while ranks also compute.

    Returns rows ``[bytes, cpu seconds, further seconds]`` by collective and group size, such as ``reduce.2``. The cpu
    seconds are those of one rank in one call. The further seconds are what a call takes beyond the time in which the
    shared cores do the cpu work of all ranks. ``sizes``: the sizes to measure, each as bytes of the whole tensor.
    ``turns``: repetitions of each call. If groups are smaller than the world, all of them run the collective at the
    same time.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    cores = cores_here()
    share = max(
        1.0,
        int(os.environ.get("LOCAL_WORLD_SIZE", world))
        * torch.get_num_threads()
        / cores,
    )
    from weft.net.groups import new_group
    from weft.parallel.units import all_gather, reduce_scatter

    a, b = torch.rand(256, 128), torch.rand(128, 512)
    curves: dict[str, Points] = {}
    groups = {world: dist.group.WORLD}
    if world > 2 and world % 2 == 0:
        groups[2] = new_group([rank & ~1, rank | 1], "pairs")
    peer = rank ^ 1 if world % 2 == 0 else None

    def average(call: Callable[[], Any], count: int) -> tuple[float, float]:
        """Least elapsed seconds of a turn, and its processor seconds, both amid a product."""
        wall, cpu = [], []
        for _ in range(5):
            dist.barrier()
            begun = time.perf_counter(), time.process_time()
            for _ in range(count):
                a @ b
                call()
            wall.append((time.perf_counter() - begun[0]) / count)
            cpu.append((time.process_time() - begun[1]) / count)
        both = torch.tensor([min(wall), min(cpu)])
        dist.all_reduce(both)
        return float(both[0]) / world, float(both[1]) / world

    plain = average(lambda: None, 4 * turns)[1]

    def probe_machine(name: str, size: int, call: Callable[[], Any]) -> None:
        call()
        wall, cpu = average(call, turns if size < 2**18 else max(2, turns // 4))
        besides = max(0.0, wall - share * cpu)
        curves.setdefault(name, []).append(
            [float(size), max(1e-6, cpu - plain), besides]
        )

    for size in sizes:
        for members, group in groups.items():
            if members < 2:
                continue
            whole, piece = (
                torch.zeros(size // 4),
                torch.zeros(max(1, size // 4 // members)),
            )
            out, other = torch.zeros(2, len(piece) * members).unbind()
            calls = {
                "reduce": partial(dist.all_reduce, whole, group=group),
                "gather": partial(all_gather, out, piece, group=group),
                "scatter": partial(reduce_scatter, piece, out, group=group),
                "exchange": partial(dist.all_to_all_single, other, out, group=group),
            }
            for name, call in calls.items():
                probe_machine(f"{name}.{members}", size, call)
        if peer is not None:
            sent, theirs = torch.zeros(size // 4), torch.zeros(size // 4)

            def swap(sent: torch.Tensor = sent, theirs: torch.Tensor = theirs) -> None:
                works = [dist.isend(sent, peer), dist.irecv(theirs, peer)]
                for work in works:
                    work.wait()  # type: ignore[union-attr]

            probe_machine("message.2", size, swap)
    return curves


def probe_links(turns: int = 3) -> dict[str, list[list[float]]]:
    """Measure ``latency`` (seconds) and ``bandwidth`` (bytes per second) of each ordered pair of ranks.

    Returns a table ``[ranks, ranks]`` for each of these names. Pairs are measured one after the other, ``turns`` times
    each.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    table = torch.zeros(2, world, world, dtype=torch.float64)
    small, large = torch.zeros(16), torch.zeros(2**18)
    for i in range(world):
        for j in range(i + 1, world):
            dist.barrier()
            if rank not in (i, j):
                continue
            peer, samples = j if rank == i else i, []
            for tensor, count in ((small, 10), (large, turns)):
                seen = []
                for _ in range(count):
                    begun = time.perf_counter()
                    for turn in (i, j):
                        if rank == turn:
                            dist.send(tensor, peer)
                        else:
                            dist.recv(tensor, peer)
                    seen.append((time.perf_counter() - begun) / 2)
                samples.append(min(seen))
            if rank == i:
                table[0, i, j] = table[0, j, i] = samples[0]
                speed = large.nbytes / max(samples[1] - samples[0], 1e-9)
                table[1, i, j] = table[1, j, i] = speed
    dist.all_reduce(table)
    return {"latency": table[0].tolist(), "bandwidth": table[1].tolist()}


# --- one process of a setting ---


def probe_machine(quick: bool) -> dict[str, Any]:
    """Measure the machine as one rank of a group in which all ranks measure at the same time.

    ``quick``: take fewer measurements. Returns the measurements by name.
    """
    world = int(os.environ["WORLD_SIZE"])
    keep_heap()  # as ranks that train do
    measured: dict[str, Any] = {
        "ranks": world,
        "threads": torch.get_num_threads(),
        "memory": empty_memory(world),
    }
    measured["collectives"] = (
        collectives(MESSAGES[:: 2 if quick else 1], 8 if quick else 20)
        if world > 1
        else {}
    )
    measured["links"] = probe_links() if 1 < world <= 16 else {}
    dist.barrier()
    # what follows is each process's own, side by side with the others
    dist.destroy_process_group()
    return measured | {"step": usual_step(), "triad": triad(), "peaks": peaks()}


def setting(ranks: int, quick: bool) -> dict[str, Any]:
    """Start ``ranks`` processes that measure this machine at the same time, and return the measurements of rank 0 by
    name.

    ``quick``: take fewer measurements.
    """
    import torch.multiprocessing as mp

    with listen("127.0.0.1") as free:
        port = free.getsockname()[1]
    threads = threads_per_rank(0, ranks)
    given = {
        "OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }  # fmt: skip
    with mock.patch.dict(os.environ, given), tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _worker, (threads, quick, folder), ranks, join=False, start_method="spawn"
        )
        until = time.monotonic() + PATIENCE_S
        while not context.join(timeout=1):
            if time.monotonic() > until:
                raise WeftError(
                    f"the probe's {ranks} processes did not end in {PATIENCE_S} s"
                )
        measured: dict[str, Any] = json.loads((Path(folder) / "0").read_text())
        return measured


def _worker(rank: int, threads: int, quick: bool, folder: str) -> None:
    from weft.train import training  # noqa: F401 (what a rank of a run has imported by the time it trains)

    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(threads)
    measured = probe_machine(quick)
    (Path(folder) / str(rank)).write_text(json.dumps(measured))
    leave(0)


def empty_memory(world: int) -> dict[str, float]:
    """Measure the resident bytes that a rank needs beside its tensors, in a group of ``world`` ranks, by name.

    With one rank, the names are:

    ``plain``: resident bytes without tensors.
    ``per_byte``: resident bytes per byte of tensors.

    With more ranks, the names are:

    ``sharded``: bytes that sharding adds.
    ``message``: bytes that messages between pipeline stages add.
    ``peak``: resident bytes at the peak of a step with tensor parallelism.
    ``tensors``: bytes of tensors at that peak.
    """
    resident: dict[str, float] = {}
    if world == 1:
        small = reference("dp=1", "small", True).peak
        first = peak_resident()
        per_byte = (probe_peak("dp=1", "large", True) - first) / (
            reference("dp=1", "large", True).peak - small
        )
        resident = {
            "plain": first - max(1.0, per_byte) * small,
            "per_byte": max(1.0, per_byte),
        }
    init_ranks("cpu", JOIN_S)
    if world > 1:
        tensors = reference(f"tp={world}", "small", False).peak
        resident = {"peak": float(peak_resident()), "tensors": float(tensors)}
        for kind, axis in (("sharded", "shard"), ("message", "pp")):
            before = peak_resident()
            resident[kind] = float(
                probe_peak(f"{axis}={world}", "small", False) - before
            )
    return resident


def probe_peak(layout: str, size: str, alone: bool) -> int:
    reference(layout, size, alone)
    return peak_resident()


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )


def probe_storage(folder: Path, quick: bool) -> dict[str, Any]:
    """Measure the disk of ``folder``, and the link between host and GPU.

    Returns a dictionary with two keys. ``disk``: the curves of :func:`disk_curves`, with the folder and the free bytes
    on its disk. ``link``: the curves of :func:`link_curves`. ``quick``: use a smaller file.
    """
    folder = home_path(folder)
    disk = disk_curves(folder, (32 if quick else 128) << 20, called="--folder")
    return {
        "disk": disk | {"folder": str(folder), "free": shutil.disk_usage(folder).free},
        "link": link_curves(),
    }


def cluster(
    settings: Sequence[dict[str, Any]], count: int, moves: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of a cluster file: the fields of :class:`weft.planner.machine.Cluster`, with measured curves.

    ``settings``: the measurements for each number of ranks. ``count``: number of ranks of the cluster. ``moves``: the
    result of :func:`probe_storage`. All ranks share the disk.
    """
    full = max(
        settings,
        key=lambda s: (min(s["ranks"] * s["threads"], cores_here()), -s["ranks"]),
    )
    most = max(settings, key=lambda s: s["ranks"])
    rate = full["peaks"]["float32"]
    table = most["links"]
    base = next(
        (s["memory"] for s in settings if "plain" in s["memory"]),
        {"plain": 3.6e8, "per_byte": 1.25},
    )
    for s in settings:
        memory = s["memory"]
        if "peak" in memory:  # of a rank under tensor parallelism
            empty = base["plain"] + base["per_byte"] * memory.pop("tensors")
            s["memory"] = (
                base | {"functional": max(0.0, memory.pop("peak") - empty)} | memory
            )
    speeds = [x for row in table.get("bandwidth", []) for x in row if x] or [1e9]
    delays = [x for row in table.get("latency", []) for x in row if x] or [5e-5]
    disk, link = moves["disk"], moves["link"]
    return {
        "device": "CPU",
        "count": count,
        "per_node": count,
        "memory": psutil.virtual_memory().total / 1e9 / count,
        "bf16": max(rate, full["peaks"]["bfloat16"]) / 1e12,
        "hbm": full["triad"] / 1e9,
        "link": statistics.median(speeds) / 1e9,
        "network": min(speeds) / 1e9,
        "link_latency": statistics.median(delays) * 1e6,
        "network_latency": max(delays) * 1e6,
        "disk_read": bytes_per_s(disk["read"]) / 1e9 / count,
        "disk_write": bytes_per_s(disk["write"]) / 1e9 / count,
        "disk_bytes": disk["free"] / 1e9 / count,
        **({"host": min(map(bytes_per_s, link.values())) / 1e9} if link else {}),
        "calibration": {
            "cores": cores_here(),
            "triad": {str(s["ranks"]): s["triad"] for s in settings},
            "peaks": {str(s["ranks"]): s["peaks"] for s in settings},
            "links": table,
            **moves,
            "settings": {
                str(s["ranks"]): {
                    k: v for k, v in s.items() if k not in ("links", "triad", "peaks")
                }
                for s in settings
            },
        },
    }
