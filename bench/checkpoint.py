"""Checkpoints side by side: Weft, PyTorch's DCP, ``torch.save``, safetensors and raw input and output.

Two ranks hold 64 tensors, cut by rows. Sides take turns in the same processes: each saves, loads what it saved from the
page cache and from disk, and cleans up. A figure is the median over the rounds, a ratio the median of the rounds'
ratios. Raw: one ``memcpy`` into memory that was touched before, one ``write`` and ``fsync``, one read per rank.

Then four ranks save, and one process reads as eight ranks would, one after the other, by rows and by columns. And the
planning for 512 ranks is done for one of them, against a made-up root and manifests.

    python bench/checkpoint.py [--gib 1 4] [--rounds 7] [--only save reshard plan] [--folder /tmp] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from step import machine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.checkpoint import format as layout
from weft.checkpoint.format import StoredBlock
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.save import Saver
from weft.checkpoint.staging import plan_pieces
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.writer import run_writer as _writer  # noqa: F401  fails here, and not in the writer, if it cannot start
from weft.layout.dims import Box, Tensor, part
from weft.layout.parts import Part

TENSORS = 64
CHUNK = 8 << 20  # of raw input and output
RESULTS = Path(__file__).parent / "results" / "checkpoint.json"

#: What was measured elsewhere on this stack (notes, section 4): DCP's planning for 512 ranks x 1,500 tensors.
DCP_PLANNING_S = 41.0


class Goal(NamedTuple):
    what: str
    most: float
    unit: str


GOALS = {
    "stall_first": Goal("stall / memcpy, first save", 1.5, "x"),
    "stall_later": Goal("stall / memcpy, later saves", 1.2, "x"),
    "durable": Goal("durable / raw write + fsync", 1.3, "x"),
    "load_warm": Goal("load / raw read, page cache", 1.2, "x"),
    "load_cold": Goal("load / raw read, from disk", 1.2, "x"),
    "hash": Goal("hashing, share of save time", 0.10, ""),
    "amplification": Goal("bytes read / needed, 4 rows -> 8 columns", 1.1, "x"),
    "reshard_columns": Goal("load as 8 columns / as saved", 1.3, "x"),
    "reshard_rows": Goal("load as 8 rows / as saved", 1.3, "x"),
    "plan": Goal("plan of one of 512 ranks, 1,500 tensors", 1.0, "s"),
    "manifest": Goal("its root and manifests read", 0.5, "s"),
}


class Sample(NamedTuple):
    wall: float  # seconds, of the slowest rank
    cpu: float  # seconds, of all ranks and their helpers


class Worker(NamedTuple):
    """One rank's tensors: ``source`` is saved and ``target`` is loaded into; both ``[rows/world, columns]``."""

    rank: int
    world: int
    folder: Path
    side: int  # rows and columns of a tensor
    source: dict[str, torch.Tensor]
    target: dict[str, torch.Tensor]


def side_of(gib: float) -> int:
    """Tensors are square, in float32."""
    return int((gib * 2**30 / TENSORS / 4) ** 0.5) // 64 * 64


def names() -> list[str]:
    return [f"model.layers.{i:02d}.weight" for i in range(TENSORS)]


def boxed(values: dict[str, torch.Tensor], side: int, box: Box) -> dict[str, Part]:
    return {
        name: Part(v, box, Tensor((side, side), "F32", ("rows", "columns")))
        for name, v in values.items()
    }


def mine(w: Worker, values: dict[str, torch.Tensor]) -> dict[str, Part]:
    return boxed(values, w.side, (part(w.side, w.world, w.rank), (0, w.side)))


def as_dtensors(values: dict[str, torch.Tensor], dim: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: DTensor.from_local(v, mesh, [Shard(dim)]) for name, v in values.items()
    }


# --- measuring ---


def measure(work: Callable[[], Any], helper: int | None = None) -> Sample:
    """Do ``work`` on all ranks at once. ``helper``: a process whose CPU time counts as well."""
    dist.barrier()
    cpu, begun = time.process_time() + cpu_of(helper), time.perf_counter()
    work()
    return together(
        time.perf_counter() - begun, time.process_time() + cpu_of(helper) - cpu
    )


def together(wall: float, cpu: float) -> Sample:
    slowest, all_of = (
        torch.tensor(wall, dtype=torch.float64),
        torch.tensor(cpu, dtype=torch.float64),
    )
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(all_of)
    return Sample(slowest.item(), all_of.item())


def cpu_of(process: int | None) -> float:
    if process is None:
        return 0.0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def io(field: str) -> int:
    """A counter of ``/proc/self/io``: ``rchar`` is what was asked for, ``read_bytes`` what came from disk."""
    return int(Path("/proc/self/io").read_text().split(f"{field}: ")[1].split()[0])


def forget(folder: Path) -> None:
    """Drop files from the page cache, so that the next read comes from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def settle(process: int) -> None:
    """Wait until a process that has just started does nothing any more."""
    before, quiet = -1.0, 0
    while quiet < 3:
        time.sleep(0.1)
        now = cpu_of(process)
        before, quiet = now, quiet + 1 if now == before and now > 0 else 0


def synced(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# --- the sides: each saves, loads, and says what that took ---

Samples = dict[str, Sample]


def loads(w: Worker, folder: Path, load: Callable[[], Any]) -> Samples:
    """Load from the page cache, then from disk, and see that what comes back is what was saved."""
    found = {"load_warm": measure(load)}
    check(w)
    dist.barrier()
    forget(folder)
    before = io("read_bytes")
    found["load_cold"] = measure(load)
    disk = together(0, (io("read_bytes") - before) / (TENSORS * w.side**2 * 4)).cpu
    return found | {"from_disk": Sample(disk, disk)}


def check(w: Worker) -> None:
    for name, values in w.target.items():
        if not torch.equal(values[:: w.side // 64], w.source[name][:: w.side // 64]):
            raise SystemExit(f"{name} is not what was saved")
        values.zero_()


def raw(w: Worker, scratch: torch.Tensor) -> Samples:
    """``scratch`` ``[bytes]``: this rank's share, in one piece."""

    def memcpy() -> None:
        at = 0
        for values in w.source.values():
            size = values.numel() * 4
            scratch[at : at + size].view(torch.float32).view(values.shape).copy_(values)
            at += size

    path = w.folder / f"raw-{w.rank}"
    view = memoryview(scratch.numpy())

    def write() -> None:
        with path.open("xb", buffering=0) as file:
            for at in range(0, len(view), CHUNK):
                file.write(view[at : at + CHUNK])
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            for at in range(0, len(view), CHUNK):
                file.readinto(view[at : at + CHUNK])

    found = {
        "memcpy": measure(memcpy),
        "durable": measure(write),
        "load_warm": measure(read),
    }
    dist.barrier()
    forget(w.folder)
    return found | {"load_cold": measure(read)}


def weft(w: Worker) -> Samples:
    saver = Saver(lambda text: None, strict=True)
    saver.prepare(mine(w, w.source))
    assert saver._writer is not None
    writer = saver._writer.process.pid
    settle(writer)
    found: Samples = {}
    for turn in ("first", "later"):
        storage = LocalStorage(w.folder / turn)
        save = partial(
            saver.save, storage, 1, mine(w, w.source), {"layout": "rows"}, {}
        )
        dist.barrier()
        cpu, begun = time.process_time(), time.perf_counter()
        before = cpu_of(writer)
        save()
        stall = time.perf_counter() - begun, time.process_time() - cpu
        saver.finish()
        durable = (
            time.perf_counter() - begun,
            time.process_time() - cpu + cpu_of(writer) - before,
        )
        found |= {
            f"stall_{turn}": together(*stall),
            f"durable_{turn}": together(*durable),
        }
        took = saver.reports[0].report.seconds
        saver.reports.clear()
        hashing = together(took["hash"], took["hash"])
        found |= {f"hash_{turn}": Sample(hashing.wall, hashing.wall)}
    saver.close()
    shutil.rmtree(w.folder / "first", ignore_errors=True)
    into = mine(w, w.target)
    return found | loads(
        w,
        w.folder,
        lambda: StoredCheckpoint(LocalStorage(w.folder / "later")).load(into),
    )


def dcp_sync(w: Worker) -> Samples:
    source, target = as_dtensors(w.source, 0), as_dtensors(w.target, 0)
    took = measure(lambda: dcp.save(source, checkpoint_id=w.folder))
    found = {"stall_later": took, "durable": took}
    return found | loads(w, w.folder, lambda: dcp.load(target, checkpoint_id=w.folder))


def dcp_async(w: Worker) -> Samples:
    source = as_dtensors(w.source, 0)
    dist.barrier()
    cpu, begun = time.process_time(), time.perf_counter()
    future = dcp.async_save(source, checkpoint_id=w.folder)
    stall = time.perf_counter() - begun, time.process_time() - cpu
    future.result()  # type: ignore[union-attr]
    durable = time.perf_counter() - begun, time.process_time() - cpu
    return {"stall_later": together(*stall), "durable": together(*durable)}


def torch_save(w: Worker) -> Samples:
    path = w.folder / f"{w.rank}.pt"

    def save() -> None:
        torch.save(w.source, path)
        synced(path)

    def load() -> None:
        for name, values in torch.load(path).items():
            w.target[name].copy_(values)

    took = measure(save)
    return {"stall_later": took, "durable": took} | loads(w, w.folder, load)


def plain_safetensors(w: Worker) -> Samples:
    path = w.folder / f"{w.rank}.safetensors"

    def save() -> None:
        safetensors.torch.save_file(w.source, path)
        synced(path)

    def load() -> None:
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                w.target[name].copy_(file.get_tensor(name))

    took = measure(save)
    return {"stall_later": took, "durable": took} | loads(w, w.folder, load)


def measure_saves(w: Worker, rounds: int, path: Path) -> None:
    """Write to ``path`` the seconds per side and what, and the ratios to raw, of ``rounds`` interleaved rounds."""
    scratch = torch.zeros(
        sum(v.numel() * 4 for v in w.source.values()), dtype=torch.uint8
    )
    sides: dict[str, Callable[[Worker], Samples]] = {
        "raw": partial(raw, scratch=scratch), "weft": weft, "DCP": dcp_sync, "DCP, async": dcp_async,
        "torch.save": torch_save, "safetensors": plain_safetensors,
    }  # fmt: skip
    found: dict[str, list[Samples]] = {side: [] for side in sides}
    for i in range(rounds + 1):
        for side, turn in sides.items():
            here = w.folder / "round"
            here.mkdir(exist_ok=True)
            dist.barrier()
            samples = turn(w._replace(folder=here))
            if i:  # the first round imports, connects and touches memory
                found[side].append(samples)
            dist.barrier()
            if w.rank == 0:
                shutil.rmtree(here)
            dist.barrier()
        if w.rank == 0:
            print(
                f"  round {i} of {rounds} done, load {os.getloadavg()[0]:.0f}",
                file=sys.stderr,
                flush=True,
            )
            if i:
                # what there is, should a later round not end
                path.write_text(json.dumps(summary(found)))


def summary(found: dict[str, list[Samples]]) -> dict[str, Any]:
    """Medians; and ratios per round to the raw side's, by wall clock and by CPU time."""
    base = {
        "stall_first": "memcpy",
        "stall_later": "memcpy",
        "durable_first": "durable",
        "durable_later": "durable",
    }
    table: dict[str, Any] = {}
    for side, turns in found.items():
        table[side] = {}
        for what in turns[0]:
            row = {
                "s": median(t[what].wall for t in turns),
                "cpu_s": median(t[what].cpu for t in turns),
            }
            peer = base.get(what, what)
            if side != "raw" and peer in found["raw"][0]:
                pairs = [
                    (t[what], r[peer]) for t, r in zip(turns, found["raw"], strict=True)
                ]
                row |= ratios([mine.wall / its.wall for mine, its in pairs])
                row["cpu_ratio"] = median(mine.cpu / its.cpu for mine, its in pairs)
            table[side][what] = row
    shares = [t["hash_later"].wall / t["durable_later"].wall for t in found["weft"]]
    table["weft"]["hash_share"] = ratios(shares)
    return table


def median(values: Iterator[float] | list[float]) -> float:
    return round(statistics.median(values), 4)


def ratios(values: list[float]) -> dict[str, Any]:
    ends = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    return {
        "ratio": median(values),
        "ratio_quartiles": [round(ends[0], 3), round(ends[2], 3)],
    }


def on_rank(
    rank: int, world: int, store: str, folder: str, gib: float, rounds: int, path: str
) -> None:
    """``rounds`` of saving and loading; with none, save once with Weft and with DCP and leave that in ``folder``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    side, g = side_of(gib), torch.Generator().manual_seed(rank)
    source = {name: torch.randn(side // world, side, generator=g) for name in names()}
    target = {name: torch.zeros_like(v) for name, v in source.items()} if rounds else {}
    w = Worker(rank, world, Path(folder), side, source, target)
    if rounds:
        measure_saves(w, rounds, Path(path))
    else:
        saver = Saver(lambda text: None, strict=True)
        saver.save(
            LocalStorage(w.folder / "weft"), 1, mine(w, source), {"layout": "rows"}, {}
        )
        saver.finish()
        saver.close()
        dcp.save(as_dtensors(source, 0), checkpoint_id=w.folder / "dcp")
    dist.barrier()
    dist.destroy_process_group()


# --- resharding: four ranks have saved, one process reads as eight would ---


class Reading(NamedTuple):
    readers: int
    dim: int


READINGS = {
    "as saved": Reading(4, 0),
    "8 rows": Reading(8, 0),
    "8 columns": Reading(8, 1),
}


def read_as(folder: Path, side: int, how: Reading, peer: bool) -> dict[str, float]:
    """Every reader's load, one after the other: seconds, CPU seconds and bytes, of all of them."""
    shape = [side, side]
    shape[how.dim] //= how.readers
    values = {name: torch.zeros(shape) for name in names()}
    total = dict.fromkeys(("wall", "cpu", "rchar", "bytes"), 0.0)
    for rank in range(how.readers):
        edges = [(0, side), (0, side)]
        edges[how.dim] = part(side, how.readers, rank)
        if peer:
            dist.init_process_group(
                "fake", store=FakeStore(), rank=rank, world_size=how.readers
            )
            state = as_dtensors(values, how.dim)
            load = partial(dcp.load, state, checkpoint_id=folder / "dcp", no_dist=True)
        else:
            checkpoint = StoredCheckpoint(LocalStorage(folder / "weft"))
            load = partial(checkpoint.load, boxed(values, side, (edges[0], edges[1])))
        before, cpu, begun = io("rchar"), time.process_time(), time.perf_counter()
        load()
        total["wall"] += time.perf_counter() - begun
        total["cpu"] += time.process_time() - cpu
        total["rchar"] += io("rchar") - before
        if peer:
            dist.destroy_process_group()
        else:
            total["bytes"] += checkpoint.bytes_read
    return total


def measure_reshard(folder: Path, side: int, rounds: int) -> dict[str, Any]:
    needed = TENSORS * side * side * 4
    turns: dict[tuple[str, str], list[dict[str, float]]] = {}
    for i in range(rounds + 1):
        for what, how in READINGS.items():
            for name in ("weft", "DCP"):
                found = read_as(folder, side, how, peer=name == "DCP")
                if i:
                    turns.setdefault((name, what), []).append(found)
    table: dict[str, Any] = {}
    for (name, what), samples in turns.items():
        same = turns[name, "as saved"]
        table.setdefault(name, {})[what] = {
            "s": median(t["wall"] for t in samples),
            "cpu_s": median(t["cpu"] for t in samples),
            **ratios(
                [t["wall"] / s["wall"] for t, s in zip(samples, same, strict=True)]
            ),
            "cpu_ratio": median(
                t["cpu"] / s["cpu"] for t, s in zip(samples, same, strict=True)
            ),
            "rchar_over_needed": round(samples[0]["rchar"] / needed, 4),
            "data_over_needed": round(samples[0]["bytes"] / needed, 4),
        }
    return table


# --- planning for 512 ranks ---

#: Shapes of a large transformer's parameters; 1,500 tensors take turns.
SHAPES = ((8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672), (8192,))


def big_locals(ranks: int, rank: int, tensors: int = 1500) -> dict[str, Part]:
    """One rank's rows of each tensor; planning looks at boxes only, so the values are one element."""
    nothing, found = torch.zeros(()), {}
    for i in range(tensors):
        shape = SHAPES[i % len(SHAPES)]
        box = (part(shape[0], ranks, rank), *((0, n) for n in shape[1:]))
        found[f"model.layers.{i // 5:03d}.part{i % 5}.weight"] = Part(
            nothing, box, Tensor(shape, "F32")
        )
    return found


def blocks_of(locals_: dict[str, Part]) -> list[Box]:
    """What one rank plans for a save: its shares, and their blocks."""
    shares = [(p.box, locals_[p.name].tensor) for p in plan_pieces(locals_)]
    return [
        block
        for box, tensor in shares
        for block in layout.cut_blocks(box, tensor.shape, tensor.itemsize)
    ]


def measure_planning(folder: Path, ranks: int, rounds: int) -> dict[str, Any]:
    """Plan one rank; then what readers need of a checkpoint that has a block per rank and tensor, or our blocks."""
    one = big_locals(ranks, 3)
    plans = [timed(lambda: blocks_of(one)) for _ in range(rounds)]
    found: dict[str, Any] = {
        "ranks": ranks,
        "tensors": len(one),
        "blocks_of_a_rank": len(blocks_of(one)),
    }
    found |= {
        "plan_s": median(w for w, _ in plans),
        "plan_cpu_s": median(c for _, c in plans),
    }
    tensors = {name: local.tensor for name, local in one.items()}
    manifests: dict[str, tuple[dict[str, Tensor], list[StoredBlock]]] = {}
    storage, listed = LocalStorage(folder), []
    for rank in range(ranks):
        name, file = f"manifest/{rank:05d}.json", f"data/{rank:05d}.safetensors"
        whole = [(key, v.box, v.tensor) for key, v in big_locals(ranks, rank).items()]
        # The index needs only what a rank holds, as one block; the first manifests are on disk with all their blocks.
        manifests[name] = (
            tensors,
            [StoredBlock(key, box, file, 0, 0, "") for key, box, _ in whole],
        )
        if rank < 8:
            cut = [
                StoredBlock(
                    key, b, file, 1 << 30, 1 << 18, layout.digest(f"{key}{b}".encode())
                )
                for key, box, tensor in whole
                for b in layout.cut_blocks(box, tensor.shape, tensor.itemsize)
            ]
            data = layout.manifest_json(file, 1 << 30, tensors, cut)
            storage.write(name, [data])
        listed.append([name, len(data), layout.digest(data)])
    held: list[dict[str, Any]] = []
    took = timed(lambda: held.append(layout.root_index(manifests)))
    found |= {"index_s": round(took[0], 3), "index_cpu_s": round(took[1], 3)}
    text = layout.seal({"step": 1, **held[0], "manifests": listed, "files": {}})
    storage.create(layout.ROOT, text)
    found |= {"root_bytes": len(text), "manifest_bytes": listed[3][1]}
    readers = {
        "same layout": ranks,
        "other number of ranks": ranks * 3 // 4,
        "twice the ranks": ranks * 2,
    }
    found["readers"] = {}
    for what, count in readers.items():
        wanted = big_locals(count, 3)
        turns = [
            timed(lambda wanted=wanted: needed(folder, wanted)) for _ in range(rounds)
        ]
        root = [
            timed(lambda: StoredCheckpoint(LocalStorage(folder)).tensors)
            for _ in range(rounds)
        ]
        row = {"s": median(w for w, _ in turns), "cpu_s": median(c for _, c in turns)}
        row |= {
            "root_s": median(w for w, _ in root),
            "manifests": needed(folder, wanted),
        }
        found["readers"][what] = row
    return found


def needed(folder: Path, wanted: dict[str, Part]) -> int:
    """Find the blocks that a rank needs, as loading does; how many manifests were read."""
    checkpoint = StoredCheckpoint(LocalStorage(folder))
    for name, local in wanted.items():
        checkpoint.blocks(name, local.box)
    return len(checkpoint._manifests)


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    cpu, begun = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - begun, time.process_time() - cpu


# --- running ---


def run_gib(gib: float, rounds: int, only: list[str], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for what, world, turns in (("save", 2, rounds), ("reshard", 4, 0)):
        if what in only:
            with tempfile.TemporaryDirectory(prefix="weft-bench-", dir=folder) as name:
                here = Path(name)
                (here / "saved").mkdir()
                arguments = (
                    world,
                    f"{here}/store",
                    f"{here}/saved",
                    gib,
                    turns,
                    f"{here}/results.json",
                )
                mp.spawn(on_rank, arguments, nprocs=world)  # type: ignore[no-untyped-call]
                if what == "save":
                    found[what] = json.loads((here / "results.json").read_text())
                    show_saves(gib, found[what])
                else:
                    found[what] = measure_reshard(here / "saved", side_of(gib), rounds)
                    show_reshard(gib, found[what])
    return found


def goals_of(found: dict[str, Any]) -> dict[str, float]:
    values: dict[str, float] = {}
    if "save" in found:
        ours = found["save"]["weft"]
        values |= {
            key: ours[key]["ratio"]
            for key in ("stall_first", "stall_later", "load_warm", "load_cold")
        }
        values |= {
            "durable": ours["durable_later"]["ratio"],
            "hash": ours["hash_share"]["ratio"],
        }
    if "reshard" in found:
        ours = found["reshard"]["weft"]
        values |= {"amplification": ours["8 columns"]["rchar_over_needed"]}
        values |= {
            "reshard_columns": ours["8 columns"]["ratio"],
            "reshard_rows": ours["8 rows"]["ratio"],
        }
    if "plan" in found:
        values |= {
            "plan": found["plan"]["plan_s"],
            "manifest": found["plan"]["readers"]["same layout"]["s"],
        }
    return values


def show_saves(gib: float, table: dict[str, Any]) -> None:
    columns = {
        "stall_first": "first stall", "stall_later": "stall", "durable_first": "durable, first",
        "durable_later": "durable", "durable": "durable", "load_warm": "load, warm", "load_cold": "load, cold",
    }  # fmt: skip
    print(f"\n2 ranks, {gib:g} GiB: seconds, ratio to raw (quartiles; of CPU time)")
    print(f"  {'memcpy':14}{'':16}{table['raw']['memcpy']['s']:8.3f}")
    for side, rows in table.items():
        for what, title in columns.items():
            if what in rows:
                row = rows[what]
                line = f"  {side:14}{title:16}{row['s']:8.3f}"
                if "ratio" in row:
                    low, high = row["ratio_quartiles"]
                    line += f"{row['ratio']:8.2f}x  ({low:.2f} - {high:.2f}; {row['cpu_ratio']:.2f})"
                print(line, flush=True)


def show_reshard(gib: float, table: dict[str, Any]) -> None:
    print(
        f"\nsaved by 4 ranks, {gib:g} GiB: seconds of all readers, ratio to as saved (quartiles; of CPU time)"
    )
    for side, rows in table.items():
        for what, row in rows.items():
            low, high = row["ratio_quartiles"]
            line = f"  {side:8}{what:12}{row['s']:8.3f}{row['ratio']:8.2f}x  ({low:.2f} - {high:.2f}; "
            print(
                f"{line}{row['cpu_ratio']:.2f})   read {row['rchar_over_needed']:.2f}x of what is needed",
                flush=True,
            )


def show_planning(found: dict[str, Any]) -> None:
    print(
        f"\n{found['ranks']} ranks x {found['tensors']:,} tensors (DCP: about {DCP_PLANNING_S:.0f} s, from the notes)"
    )
    blocks = f"{found['blocks_of_a_rank']:,} blocks"
    print(
        f"  plan of a rank {found['plan_s']:.3f} s, {blocks}; index {found['index_s']:.2f} s"
    )
    print(
        f"  root {found['root_bytes'] / 1e6:.2f} MB, a manifest {found['manifest_bytes'] / 1e6:.2f} MB"
    )
    for what, row in found["readers"].items():
        print(
            f"  reader, {what:24}{row['s']:8.3f} s, {row['manifests']} manifests (root {row['root_s']:.3f} s)"
        )


def show_goals(title: str, values: dict[str, float]) -> None:
    print(f"\n{title}\n  {'':46}{'found':>8}{'goal':>8}")
    for key, value in values.items():
        goal = GOALS[key]
        print(
            f"  {goal.what:46}{value:>7.2f}{goal.unit:1}{goal.most:>7.2f}{goal.unit:1}  {verdict(key, value)}"
        )


def verdict(key: str, value: float) -> str:
    return "met" if value <= GOALS[key].most else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument(
        "--gib",
        type=float,
        nargs="+",
        default=[1.0],
        help="sizes of the checkpoint, over all ranks",
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of every side")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=["save", "reshard", "plan"],
        default=["save", "reshard", "plan"],
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on the disk to be measured",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny tensors, to see that everything runs"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    sizes, rounds = ([1 / 64], 1) if options.quick else (options.gib, options.rounds)
    facts = machine()
    print(f"{facts['cores']} cores, load before: {facts['load_before']}")
    results: dict[str, Any] = {"machine": facts, "rounds": rounds}
    goals: dict[str, Any] = {}
    for gib in sizes:
        found = results[f"{gib:g} GiB"] = run_gib(
            gib, rounds, options.only, options.folder
        )
        goals[f"{gib:g} GiB"] = goals_of(found)
    if "plan" in options.only:
        with tempfile.TemporaryDirectory(
            prefix="weft-bench-", dir=options.folder
        ) as name:
            found = measure_planning(Path(name), 16 if options.quick else 512, rounds)
        results["plan"] = found | {
            "dcp_s": DCP_PLANNING_S,
            "dcp_is": "from the notes, not measured here",
        }
        show_planning(found)
        goals["planning"] = goals_of({"plan": found})
    for title, values in goals.items():
        if values:
            show_goals(title, values)
    results["goals"] = {
        title: {
            k: {"found": v, "goal": GOALS[k].most, "met": v <= GOALS[k].most}
            for k, v in values.items()
        }
        for title, values in goals.items()
    }
    facts |= {"load_after": round(os.getloadavg()[0], 1)}  # about 3 of it ours
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nload after: {facts['load_after']}; written to {options.json}")


if __name__ == "__main__":
    main()
