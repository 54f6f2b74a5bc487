"""A training step whose state rests in a file, beside the same in memory, and with reads that are waited for.

One process, one thread of compute, direct I/O. In every turn each side takes a step: ``resident``; ``FSDP2``, PyTorch's
own offload to the CPU; in files ``waiting`` for the norm with all updates, ``even`` and ``all`` as ``memory.speculate``
says; ``blocking``, the best of these with a wait after every transfer; and the transfers of each alone. ``--tokens 0``
chooses so many tokens that compute and transfers take about the same. A pipelined step cannot be shorter than the
longer of the two; it is asked to keep 1.15 times that, and the first read and last write, which nothing hides.

``--deepspeed`` names a Python that has DeepSpeed: its ZeRO-Infinity then takes turns as well, weights and moments in
files (``deepspeed_peer.py``), from the same weights and on the same tokens.

Before that, the memory that steps take, in a process of its own: 1.1 times what buffers and one unit have are asked.
Then the time that an update adds to a step, with moments in memory and in a file: after backward, and in a thread
beside it, which is a second core's work.

    python bench/tiers.py [--turns 5] [--tokens 0] [--folder .] [--deepspeed VENV/bin/python]
        [--json bench/results/tiers.json]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing as mp
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist

from weft.data.batch import Batch
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.memory.heap import keep_heap
from weft.memory.tier_file import BufferPool, Region, Transfer
from weft.models.hugging_face import export
from weft.recipe import build_recipe
from weft.techniques.phases.speculation.early_units import early_units
from weft.train.build_step import build_step
from weft.train.setup import build_for_training, prepare
from weft.train.step import StepContext, clear_gradients
from weft.train.step_values import StepInput

Transfers = list[tuple[Region, int, int, bool]]
FILES, LR = {"weights": "file"}, 1e-4
WAYS = {"read": False, "written": True}


def recipe_of(
    given: argparse.Namespace, memory: dict[str, str], rows: int, recompute: str
) -> Any:
    return build_recipe({
        "model": {"layers": given.layers, "embed": given.width, "heads": 8, "vocab": 512, "tied": False},
        "data": {"sources": [{"kind": "stdlib"}], "tokenizer": "bytes", "seq_len": 128},
        "train": {"batch": rows, "micro_batch": max(1, rows // 4), "threads": 1, "device": "cpu",
                  "recompute": recompute},
        "optimizer": {"warmup": 0, "clip": 1e9},
        "memory": memory,
    })  # fmt: skip


class Side:
    """A model in memory or in a file, and steps of it; all sides train the same, and nothing is clipped."""

    def __init__(
        self, given: argparse.Namespace, memory: dict[str, str], rows: int, mesh: Mesh | None = None,
        recompute: str = "none",
    ) -> None:  # fmt: skip
        recipe = recipe_of(given, memory, rows, recompute)
        job, self.mesh, self.rows, self.steps = (
            prepare(recipe),
            mesh or Mesh.single(),
            rows,
            0,
        )
        self.shape, self.settings = job.shape, recipe.optimizer
        self.model, self.state = build_for_training(job.shape, self.mesh, recipe)
        self.loader = job.loader(job.corpus.train, self.mesh)
        self.stepper = build_step(
            StepContext(self.model, self.state, self.mesh), recipe
        )
        self.early = early_units(self.state, recipe.memory, recipe.train.recompute)

    def step(self) -> float:
        return self.stepper.take(self.batches(), LR)[0].loss

    def batches(self) -> list[Batch]:
        """The microbatches of the next step."""
        self.steps += 1
        return self.loader.step((self.steps - 1) * self.rows) or []

    def passes(self) -> None:
        """A step without its update."""
        given = StepInput(self.loader.step(self.steps * self.rows) or [], LR)
        shares = self.stepper.gradients.gradients(given, self.stepper.agree)
        self.stepper.agree.agree(given, shares)
        clear_gradients(self.model, self.state)

    def formula(self) -> dict[str, int]:
        """Bytes of a step among others: where passes turn, two stages' weights stay, at the ends early ones' alone."""
        units, found = self.state.units, {"read": 0, "written": 0}
        for i, unit in enumerate(units):
            size = {
                kind: group.region.size
                for kind, group in self.state.tiers.groups[unit].items()
            }
            early, every = unit in self.early, sum(size.values())
            found["read"] += size["weights"] * (
                (i < len(units) - 2) + (early and i >= 2)
            )
            found["read"] += size["moments"] if early else every
            found["written"] += every
        return found


def seconds(work: Callable[[], Any]) -> tuple[float, float, Any]:
    begun, busy = time.perf_counter(), time.process_time()
    found = work()
    return time.perf_counter() - begun, time.process_time() - busy, found


def waited(transfer: Callable[..., Transfer]) -> Callable[..., Transfer]:
    """A transfer that is over when the call returns."""

    def call(self: Region, data: torch.Tensor, start: int = 0) -> Transfer:
        found = transfer(self, data, start)
        found.wait()
        return found

    return call


def recorded(side: Side) -> Transfers:
    """The transfers of one step, in order."""
    found: Transfers = []

    def noted(
        transfer: Callable[..., Transfer], write: bool
    ) -> Callable[..., Transfer]:
        def call(self: Region, data: torch.Tensor, start: int = 0) -> Transfer:
            found.append((self, data.numel(), start, write))
            return transfer(self, data, start)

        return call

    with mock.patch.multiple(
        Region, read=noted(Region.read, False), write=noted(Region.write, True)
    ):
        side.step()
    return found


def replay(transfers: Transfers, pool: BufferPool) -> None:
    """The transfers alone, two at a time; what is written is what was read."""
    before: tuple[Transfer, torch.Tensor] | None = None
    for region, size, start, write in transfers:
        buffer = pool.take(size)
        if write:
            region.read(buffer, start).wait()
        now = (region.write if write else region.read)(buffer, start)
        if before is not None:
            before[0].wait()
            pool.give(before[1])
        before = now, buffer
    if before is not None:
        before[0].wait()


class DeepSpeed:
    """Steps of DeepSpeed's ZeRO-Infinity in a process of its own, from the weights and on the tokens of a side."""

    def __init__(self, python: str, folder: str, side: Side) -> None:
        self.side = side  # is never stepped itself: gives weights, and tokens
        settings = side.settings
        adam = {
            "lr": LR,
            "betas": settings.betas,
            "eps": settings.eps,
            "weight_decay": settings.weight_decay,
        }
        peer = Path(__file__).with_name("deepspeed_peer.py")
        with tempfile.TemporaryDirectory() as model:
            export(
                {h.name: h.local for h in side.state.held},
                side.shape,
                Path(model) / "model",
            )
            accumulated = str(len(side.loader.step(0) or []))
            self.process = subprocess.Popen(
                [python, str(peer), f"{model}/model", folder, accumulated, json.dumps(adam)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            )  # fmt: skip
            assert json.loads(self._line()) == "ready"

    def _line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline()

    def step(self) -> tuple[float, float]:
        """The loss, and the seconds that it took."""
        batches = [
            {
                name: getattr(batch, name).tolist()
                for name in ("tokens", "labels", "positions")
            }
            for batch in self.side.batches()
        ]
        print(json.dumps(batches), file=self.process.stdin, flush=True)
        loss, took = json.loads(self._line())
        return loss, took

    def busy(self) -> float:
        """Seconds of the processor that its process has taken so far."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def moved(self) -> dict[str, int]:
        """Bytes that its process has read from the disk and written to it so far."""
        lines = Path(f"/proc/{self.process.pid}/io").read_text().splitlines()
        counts = {
            name: int(value) for name, value in (line.split(": ") for line in lines)
        }
        return {"read": counts["read_bytes"], "written": counts["write_bytes"]}


def alone() -> Mesh:
    """A mesh of one rank with what FSDP2 needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return Mesh.create(Layout(), "cpu")


def rows_for(given: argparse.Namespace) -> int:
    """So many rows that transfers and compute take about the same time."""
    probe, whole, pool = (
        Side(given, FILES | {"folder": given.folder}, 4),
        Side(given, {}, 4),
        BufferPool(),
    )
    probe.step(), whole.step()
    transfers = recorded(probe)
    disk, compute = (
        min(seconds(work)[0] for _ in range(2))
        for work in (lambda: replay(transfers, pool), whole.step)
    )
    return max(2, round(4 * disk / compute))


def beside_files(given: argparse.Namespace, rows: int) -> dict[str, Any]:
    sides = {
        "resident": Side(given, {}, rows),
        "FSDP2": Side(given, {"weights": "host"}, rows, alone()),
    }
    for name, how in (("waiting", "none"), ("even", "even"), ("all", "all")):
        sides[name] = Side(
            given, FILES | {"folder": given.folder, "speculate": how}, rows
        )
    for side in sides.values():
        side.step(), side.step()
    peer = (
        DeepSpeed(given.deepspeed, given.folder, Side(given, {}, rows))
        if given.deepspeed
        else None
    )
    for _ in range(3 if peer else 0):
        peer.step()
    in_files, pool = (
        [name for name in sides if name not in ("resident", "FSDP2")],
        BufferPool(),
    )
    transfers = {
        name: recorded(side) if name in in_files else [side.step()]
        for name, side in sides.items()
    }
    taken: dict[str, list[float]] = defaultdict(list)
    busy: dict[str, list[float]] = defaultdict(list)
    moved: dict[str, int] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        wall, cpu, found = seconds(work)
        taken[name].append(wall)
        busy[name].append(cpu)
        return found

    for _ in range(given.turns):
        losses = {name: timed(name, side.step) for name, side in sides.items()}
        assert len(set(losses.values())) == 1, losses
        if peer is not None:
            before, begun = peer.moved(), peer.busy()
            loss, wall = peer.step()
            moved = {way: total - before[way] for way, total in peer.moved().items()}
            assert abs(loss / losses["resident"] - 1) < 1e-3, (loss, losses)
            taken["DeepSpeed"].append(wall)
            busy["DeepSpeed"].append(peer.busy() - begun)
            peer.step()
        for name in in_files:
            timed(f"disk of {name}", partial(replay, transfers[name], pool))
        with mock.patch.multiple(
            Region, read=waited(Region.read), write=waited(Region.write)
        ):
            timed("blocking", sides["even"].step)
        for name, side in sides.items():
            if name != "even":
                side.step()
    middle = {name: statistics.median(values) for name, values in taken.items()}
    for name, value in middle.items():
        print(
            f"{name:16} {value:7.3f} s  (processor {statistics.median(busy[name]):.3f})"
        )
    found: dict[str, Any] = {
        "parameters": sum(h.logical.numel for h in sides["even"].state.held), "tokens": rows * 128, "seconds": middle,
        "processor seconds": {name: statistics.median(values) for name, values in busy.items()},
    }  # fmt: skip
    if peer is not None:
        peer.process.kill()
        over = [b / a for a, b in zip(taken["all"], taken["DeepSpeed"], strict=True)]
        found["DeepSpeed"] = {"over all": statistics.median(over), "bytes": moved}
        print(
            f"DeepSpeed: {found['DeepSpeed']['over all']:.2f} times as long as all, bytes {moved}"
        )
    return found | {
        name: measured(name, sides[name], transfers[name], taken) for name in in_files
    }


def measured(
    name: str, side: Side, transfers: Transfers, taken: dict[str, list[float]]
) -> dict[str, Any]:
    """What the times of a side in files come to; ratios are medians over the turns."""
    moved = {
        word: sum(n for _, n, _, write in transfers if write == way)
        for word, way in WAYS.items()
    }
    disk = taken[f"disk of {name}"]
    floors = [max(pair) for pair in zip(taken["resident"], disk, strict=True)]
    units = [
        [group.region.size for group in groups.values()]
        for groups in side.state.tiers.groups.values()
        if groups
    ]
    rate = sum(moved.values()) / statistics.median(disk)
    fill = 2 * sum(units[0]) / rate  # nothing hides the first read and the last write
    over = statistics.median(
        one / floor for one, floor in zip(taken[name], floors, strict=True)
    )
    found = {
        "over floor": over, "fill over floor": fill / statistics.median(floors), "early": len(side.early),
        "blocking over it": statistics.median(b / f for b, f in zip(taken["blocking"], taken[name], strict=True)),
        "within": over <= 1.15 + fill / statistics.median(floors), "bytes": moved, "formula": side.formula(),
        "buffers over one unit": side.state.tiers.pool.most / max(map(sum, units)), "bandwidth": rate,
    }  # fmt: skip
    asked, ratio, units_there = (
        1.15 + found["fill over floor"],
        found["blocking over it"],
        len(side.state.units),
    )
    print(
        f"{name}: {over:.2f} of the longer of compute and disk (asked {asked:.3f}), blocking / it {ratio:.2f}, "
        f"{rate / 1e9:.2f} GB/s, {found['early']} of {units_there} units early, bytes {moved} of {found['formula']}, "
        f"buffers of {found['buffers over one unit']:.2f} units"
    )
    return found


def exposed(given: argparse.Namespace) -> dict[str, Any]:
    """Seconds that an update adds to the passes of a step, which are short, so that these differences are not noise."""
    found: dict[str, Any] = {}
    for place in ("device", "file"):
        memory = {"moments": place, "folder": given.folder}
        sides = {
            how: Side(given, memory | {"speculate": how}, 2) for how in ("none", "all")
        }
        bare = Side(given, {}, 2)
        for side in (*sides.values(), bare):
            side.step(), side.step()
        more: dict[str, list[float]] = defaultdict(list)
        for _ in range(4 * given.turns):
            passes, *_ = seconds(bare.passes)
            for how, side in sides.items():
                more[how].append(seconds(side.step)[0] - passes)
        waiting, early = (statistics.median(more[how]) for how in ("none", "all"))
        found[place] = {
            "waiting": waiting,
            "speculating": early,
            "ratio": early / waiting,
        }
        print(f"moments in {place}: an update adds {waiting:.3f} s when it waits, {early:.3f} s beside backward: "
              f"{early / waiting:.2f}")  # fmt: skip
    return found


def anonymous() -> int:
    """Bytes of memory that this process has and no file: what it has allocated and written to."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(
        1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")
    )


class Heap(ctypes.Structure):
    """glibc's ``mallinfo2``."""

    _fields_ = [
        *(
            (name, ctypes.c_size_t)
            for name in (
                "arena",
                "ordblks",
                "smblks",
                "hblks",
                "hblkhd",
                "usmblks",
                "fsmblks",
            )
        ),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def allocated() -> int:
    """Bytes that are in use now of the process's heap, and of what is mapped for it."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Heap
    heap = libc.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


@contextmanager
def watched(pool: BufferPool) -> Iterator[dict[str, list[int]]]:
    """In here memory is looked at again and again: what is in use, buffers among it, and what has been touched."""
    seen: dict[str, list[int]] = {"in use": [], "touched": []}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            seen["in use"].append(allocated() + pool.bytes)
            seen["touched"].append(anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def resident(given: argparse.Namespace, pipe: Any) -> None:
    """Memory that steps take beside what a model of next to no size takes, in a process of its own.

    Two rows of 128 tokens, one by one, with blocks that compute forward again: nothing but the state is large.
    """
    torch.set_num_threads(1)
    keep_heap()
    memory = FILES | {"folder": given.folder}
    small = Side(
        argparse.Namespace(**vars(given) | {"width": 32}), memory, 2, recompute="full"
    )
    for _ in range(3):
        small.step()
    before, side = (
        {"in use": allocated(), "touched": anonymous()},
        Side(given, memory, 2, recompute="full"),
    )
    with watched(side.state.tiers.pool) as seen:
        for _ in range(4):
            side.step()
    units = [
        sum(group.region.size for group in groups.values())
        for groups in side.state.tiers.groups.values()
    ]
    sizes = {
        "buffers": side.state.tiers.pool.most,
        "one unit": max(units),
        "state": sum(units),
    }
    pipe.send(
        sizes | {name: max(values) - before[name] for name, values in seen.items()}
    )


def in_process_of_its_own(
    work: Callable[[argparse.Namespace, Any], None], given: argparse.Namespace
) -> dict[str, Any]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(given, theirs))
    process.start()
    theirs.close()
    found: dict[str, Any] = ours.recv()
    process.join()
    return found


def memory_of(given: argparse.Namespace) -> dict[str, Any]:
    found = in_process_of_its_own(resident, given)
    both = found["buffers"] + found["one unit"]
    mib = {name: size / 2**20 for name, size in found.items()}
    found |= {f"{name} over both": found[name] / both for name in ("in use", "touched")}
    print(
        f"buffers have {mib['buffers']:.1f} MiB and a unit {mib['one unit']:.1f} of a state of {mib['state']:.0f}; in "
        f"use are at most {mib['in use']:.1f}, {found['in use over both']:.2f} of both (asked 1.10), and touched, with "
        f"what the heap keeps, {mib['touched']:.1f}, {found['touched over both']:.2f}"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--deepspeed", help="the Python of a venv that has deepspeed")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    found = {"memory": memory_of(given)}
    found |= beside_files(given, given.tokens // 128 or rows_for(given)) | {
        "exposed": exposed(given)
    }
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
