"""The same faults on Weft's checkpoints and on PyTorch's DCP: what is loaded afterwards?

A checkpoint of step 1 is there. A save of step 2 is killed, torn, out of space, given I/O errors or cut off by a power
failure at every system call that it makes (``watched_disk.py``), or what it has written is damaged. Then a new process
loads the newest checkpoint that it finds, or, if that is refused with an error, the one before, and compares all values
with what was saved. DCP is used as its documentation advises: a new folder per step, files synced. Saving again into
the same folder, which it allows, has rows of its own.

    python bench/checkpoint_faults.py [--quick] [--only kill ...] [--folder /dev/shm]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from step import machine
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from watched_disk import Fault, Journal, Watch, put

from weft.checkpoint.boxes import ROOT
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.save import Saver
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.store import load_newest
from weft.checkpoint.writer import run_writer
from weft.errors import WeftError
from weft.layout.dims import Tensor, part
from weft.layout.parts import Part

RESULTS = Path(__file__).parent / "results" / "checkpoint_faults.json"
#: Tensors that two ranks share by rows, and one that is small.
SHAPES = {
    "model.a": (400, 100),
    "model.b": (8,),
    "optimizer.exp_avg.a": (400, 100),
    "model.c": (64, 64),
}
#: Seconds after which what has not ended hangs; ranks that lose a peer and savers give up long before.
LIMIT, PATIENCE = 30.0, 8.0

Send = Callable[[dict[str, Any]], None]


def values(step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def note(step: int) -> str:
    """Stands for all that is no tensor: position in the data, schedules, random state."""
    return f"position {step * 1000}"


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


# -- the two sides: save step ``step`` into ``folder``; load the newest checkpoint below ``root`` ----------------------


def weft_save(folder: Path, step: int, rank: int, world: int) -> None:
    tensors = values(step)
    held = {}
    for name, v in tensors.items():
        rows = part(len(v), world, rank)
        held[name] = Part(
            v[slice(*rows)].clone(),
            (rows, *((0, n) for n in v.shape[1:])),
            Tensor(SHAPES[name], "F32"),
        )
    saver = Saver(lambda text: None, timeout=1.0)
    try:
        saver.save(
            LocalStorage(folder),
            step,
            held,
            {"note": note(step)},
            {"note.txt": note(step).encode()},
        )
        saver.finish()
    finally:
        saver.close()


def weft_load(root: Path, refused: Callable[[str], None]) -> dict[str, Any]:
    def load(checkpoint: StoredCheckpoint) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()
        }
        held = {
            n: Part(v, tuple((0, k) for k in v.shape), Tensor(SHAPES[n], "F32"))
            for n, v in found.items()
        }
        checkpoint.load(held)
        ((name, about),) = checkpoint.meta["files"].items()
        text = checkpoint.file(name, *about).decode()
        where = checkpoint.storage.name
        return found | {
            "note": text if text == checkpoint.meta["note"] else "torn",
            "folder": where,
        }

    return load_newest([root], load, refused)[1]


def dcp_save(
    folder: Path,
    step: int,
    rank: int,
    world: int,
    threads: int = 1,
    overwrite: bool = True,
) -> None:
    state: dict[str, Any] = dict(values(step))
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for name, v in state.items():
            mine = v[slice(*part(len(v), world, rank))].clone()
            state[name] = DTensor.from_local(
                mine,
                mesh,
                [Shard(0)],
                run_check=False,
                shape=v.shape,
                stride=v.stride(),
            )
    state["note"] = note(step)
    dcp.save(
        state,
        storage_writer=FileSystemWriter(
            folder, thread_count=threads, overwrite=overwrite
        ),
    )


def dcp_load(root: Path, refused: Callable[[str], None]) -> dict[str, Any]:
    """DCP does not say which of several checkpoints to take: the newest that has its metadata, then the one before."""
    for folder in sorted(
        (p for p in root.glob("step-*") if (p / ".metadata").exists()), reverse=True
    ):
        found: dict[str, Any] = {
            name: torch.full(shape, torch.nan) for name, shape in SHAPES.items()
        } | {"note": ""}
        try:
            dcp.load(found, checkpoint_id=folder, no_dist=True)
        except BaseException as error:  # its own are not Exceptions
            refused(f"{type(error).__name__}: {error}")
            continue
        return found | {"folder": folder.name}
    raise WeftError("no checkpoint can be loaded")


@dataclass(frozen=True)
class Side:
    name: str
    save: Callable[[Path, int, int, int], None]
    load: Callable[[Path, Callable[[str], None]], dict[str, Any]]
    #: Kinds of files, as patterns: what holds values, and what describes them.
    files: dict[str, tuple[str, ...]]


_DCP_FILES = {"data": ("*.distcp",), "metadata": (".metadata",)}
WEFT = Side(
    "Weft",
    weft_save,
    weft_load,
    {"data": ("data/*",), "metadata": ("manifest/*", "files/*/*", ROOT)},
)
DCP = Side("DCP", dcp_save, dcp_load, _DCP_FILES)
DCP_2 = Side("DCP, 2 threads", partial(dcp_save, threads=2), dcp_load, _DCP_FILES)
DCP_KEEP = Side(
    "DCP, overwrite=False", partial(dcp_save, overwrite=False), dcp_load, _DCP_FILES
)


# -- running ----------------------------------------------------------------------------------------------------------


class Line:
    """A pipe to the harness: what a run's processes say, and, as long as it is open, that one of them lives."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __call__(self, **message: Any) -> None:
        # in one write: lines of two processes never mix
        os.write(self.handle, json.dumps(message).encode() + b"\n")


@dataclass
class Ended:
    """What the processes of one run said, and whether they had to be ended."""

    said: list[dict[str, Any]]
    hung: bool = False

    def of(self, key: str) -> list[Any]:
        return [m[key] for m in self.said if key in m]


def in_processes(
    work: Callable[[int, Line], None], count: int = 1, limit: float = LIMIT
) -> Ended:
    """Run ``work`` in copies of this process; returns once they and all that they have started are gone."""
    read, write = os.pipe()
    children: list[int] = []
    for rank in range(count):
        child = os.fork()
        if not child:
            try:
                os.setpgid(0, children[0] if children else 0)
                os.close(read)
                quiet = os.open(os.devnull, os.O_WRONLY)
                os.dup2(quiet, 1)
                os.dup2(quiet, 2)
                # threads do not survive a fork, and would be waited for
                torch.set_num_threads(1)
                work(rank, Line(write))
            except BaseException as error:
                Line(write)(rank=rank, problem=f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        children.append(child)
        with suppress(OSError):  # the child has done so itself, or is gone
            os.setpgid(child, children[0])
    os.close(write)
    data, deadline, hung = b"", time.monotonic() + limit, False
    while True:
        if not hung and time.monotonic() > deadline:
            hung = True
            os.killpg(children[0], signal.SIGKILL)
        if select.select([read], [], [], 0.2)[0]:
            chunk = os.read(read, 1 << 16)
            if not chunk:
                break
            data += chunk
    os.close(read)
    for child in children:
        os.waitpid(child, 0)
    return Ended([json.loads(line) for line in data.splitlines()], hung)


class ForkedWriter:
    """Stands in for ``subprocess.Popen`` of Weft's writer: a copy of this process, whose calls are watched too."""

    def __init__(
        self,
        line: Line,
        done: Callable[[], None],
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            try:
                for handle in map(int, os.listdir("/proc/self/fd")):
                    # a real writer has none of the rank's
                    if handle > 2 and handle not in (*pass_fds, line.handle):
                        with suppress(OSError):
                            os.close(handle)
                run_writer(*pass_fds)
                done()
            finally:
                os._exit(0)

    def poll(self) -> int | None:
        if self.returncode is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.returncode = 0
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("writer", timeout)
            time.sleep(0.001)
        return 0

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def save(
    side: Side,
    folder: Path,
    step: int,
    world: int = 1,
    target: int = 0,
    kind: str = "none",
    at: int = 0,
) -> Ended:
    """All ranks save; of rank ``target`` and its writer the call of number ``at`` meets the fault ``kind``."""

    def work(rank: int, line: Line) -> None:
        if world > 1:
            store = f"file://{folder.parent.parent}/rendezvous"
            dist.init_process_group(
                "gloo", store, timedelta(seconds=PATIENCE), world, rank
            )
        me = os.getpid()
        fault = Fault(
            kind, at if rank == target else 0, lambda: os.kill(me, signal.SIGKILL)
        )

        def done() -> None:
            line(rank=rank, calls=fault.calls)

        with (
            Watch(folder.parent, fault).watching(),
            mock.patch("subprocess.Popen", partial(ForkedWriter, line, done)),
        ):
            try:
                side.save(folder, step, rank, world)
                line(rank=rank, saved=True)
            except BaseException as error:
                line(rank=rank, problem=f"{type(error).__name__}: {error}")
        done()

    if world > 1:
        (folder.parent.parent / "rendezvous").unlink(missing_ok=True)
    return in_processes(work, world)


def calls_of(side: Side, root: Path, world: int) -> list[int]:
    """How many calls change the disk when ``side`` saves, by rank."""
    ended = save(side, folder_of(root, 2), 2, world)
    assert len(ended.of("saved")) == world, ended.said
    return [
        max(m["calls"] for m in ended.said if m["rank"] == rank and "calls" in m)
        for rank in range(world)
    ]


# -- what came of it --------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Outcomes of the runs of one kind of fault. The first five exclude each other."""

    fault: str
    side: str
    new: int = 0  # step 2 loads, every value as saved
    before: int = 0  # step 1 loads, every value as saved
    wrong: int = 0  # values are loaded that nobody saved, without a word
    lost: int = 0  # nothing can be loaded
    hung: int = 0  # the save or the load did not end, or the load died
    claimed: int = 0  # the save said that it succeeded, and step 2 does not load
    refused: int = 0  # checkpoints that were refused with an error
    named: int = 0  # those of which the error names the file
    examples: list[str] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return self.new + self.before + self.wrong + self.lost + self.hung

    @property
    def refusals(self) -> str:
        return f"{self.refused} ({self.named})" if self.refused else "0"


def judge(
    tally: Tally, side: Side, root: Path, ended: Ended, what: str, again: bool = False
) -> str:
    """Load what is below ``root`` in a new process and count the outcome; returns its name.

    ``what`` was done is told in examples. ``again``: the folder of step 1 may hold step 2.
    """
    names = {p.name for p in root.rglob("*") if p.is_file()} | {".metadata", ROOT, what}

    def work(rank: int, line: Line) -> None:
        try:
            found = side.load(root, lambda text: line(refused=text))
        except WeftError as error:
            line(lost=str(error))
            return
        for step, name in ((2, "new"), (1, "before")):
            mine = again or found["folder"] == folder_of(root, step).name
            if (
                mine
                and found["note"] == note(step)
                and all(torch.equal(found[k], v) for k, v in values(step).items())
            ):
                line(loaded=name)
                return
        line(loaded="wrong")

    after, saved = in_processes(work), bool(ended.of("saved"))
    outcome = (
        "hung"
        if ended.hung
        else (after.of("loaded") or ["lost" if after.of("lost") else "hung"])[0]
    )
    setattr(tally, outcome, getattr(tally, outcome) + 1)
    tally.claimed += saved and outcome != "new"
    for text in after.of("refused"):
        tally.refused += 1
        tally.named += any(name in text for name in names)
    if outcome in ("wrong", "lost", "hung") or (saved and outcome != "new"):
        tally.examples.append(
            f"{what}: {outcome}{', though it said saved' if saved else ''}"
        )
    return outcome


class Bench:
    """A scratch folder, and how many runs each row gets."""

    def __init__(self, scratch: Path, most: int, seed: int = 0) -> None:
        self.scratch, self.most, self.rng = scratch, most, random.Random(seed)
        self.tallies: list[Tally] = []

    def tally(self, fault: str, side: Side) -> Tally:
        self.tallies.append(Tally(fault, side.name))
        return self.tallies[-1]

    def fresh(self, side: Side, steps: int = 1, world: int = 1) -> Path:
        """A folder of checkpoints with the first ``steps`` steps saved."""
        kept = self.scratch / f"kept-{side.name}-{steps}-{world}"
        if not kept.exists():
            for step in range(1, steps + 1):
                ended = save(side, folder_of(kept, step), step, world)
                assert len(ended.of("saved")) == world, ended.said
        root = self.scratch / "checkpoints"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(kept, root)
        return root

    def at_every_call(
        self, fault: str, side: Side, kind: str, world: int = 1, again: bool = False
    ) -> None:
        """A fault at each call of a save: of a new step, or ``again`` into the folder of step 1."""
        tally = self.tally(fault, side)
        points = [
            (rank, at)
            for rank, calls in enumerate(
                calls_of(side, self.fresh(side, world=world), world)
            )
            for at in range(1, calls + 1)
        ]
        if len(points) > self.most:
            points = sorted(self.rng.sample(points, self.most))
        for rank, at in points:
            root = self.fresh(side, world=world)
            ended = save(
                side, folder_of(root, 1 if again else 2), 2, world, rank, kind, at
            )
            judge(tally, side, root, ended, f"rank {rank}, call {at}", again)

    def power_failures(
        self, fault: str, side: Side, ordered: bool, again: bool = False
    ) -> None:
        """The power fails during a save or right after it."""
        tally = self.tally(fault, side)
        root = self.fresh(side)
        journal, saved = self.journal(root, side, folder_of(root, 1 if again else 2))
        for i in range(self.most):
            cut = (
                len(journal.log)
                if i % 8 == 0
                else self.rng.randrange(len(journal.log) + 1)
            )
            shutil.rmtree(root)
            root.mkdir()
            put(journal.after_failure(cut, ordered, self.rng))
            ended = Ended(
                [{"saved": True}] if saved and cut == len(journal.log) else []
            )
            judge(
                tally,
                side,
                root,
                ended,
                f"after call {cut} of {len(journal.log)}",
                again,
            )

    def journal(self, root: Path, side: Side, folder: Path) -> tuple[Journal, bool]:
        """The record of a whole save, and whether it said that it succeeded."""
        journal, path = Journal(root), self.scratch / "journal"

        def done() -> None:
            if journal.log:  # of the process that writes
                path.write_bytes(pickle.dumps(journal.log))

        def work(rank: int, line: Line) -> None:
            popen = mock.patch("subprocess.Popen", partial(ForkedWriter, line, done))
            with Watch(root, journal).watching(), popen:
                try:
                    side.save(folder, 2, 0, 1)
                    line(saved=True)
                finally:
                    done()

        path.unlink(missing_ok=True)
        ended = in_processes(work)
        journal.log = pickle.loads(path.read_bytes())
        return journal, bool(ended.of("saved"))

    def damage(self, fault: str, side: Side, kind: str, how: str) -> None:
        """One file of a committed checkpoint of step 2, saved by two ranks, is changed."""
        tally = self.tally(fault, side)
        root = self.fresh(side, steps=2, world=2)
        newest, older = (
            [p for g in side.files[kind] for p in sorted(folder_of(root, n).glob(g))]
            for n in (2, 1)
        )
        pairs = list(zip(newest, older, strict=True))
        for path, other in (
            pairs if how in ("gone", "stale") else self.rng.choices(pairs, k=self.most)
        ):
            before = path.read_bytes()
            if how == "gone":
                path.unlink()
            else:
                path.write_bytes(harmed(before, other.read_bytes(), how, self.rng))
            judge(tally, side, root, Ended([]), path.name)
            path.write_bytes(before)


def harmed(data: bytes, other: bytes, how: str, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    if how == "stale":
        return other
    if how == "cut":
        return data[:at]
    if how == "zeros":  # a page that never reached the disk
        page = at // 4096 * 4096
        return data[:page] + bytes(len(data[page : page + 4096])) + data[page + 4096 :]
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


# -- the rows ---------------------------------------------------------------------------------------------------------

SIDES = (WEFT, DCP, DCP_2)
DAMAGES = {
    "flip": "a flipped bit in {}",
    "zeros": "a page of zeros in {}",
    "cut": "{} cut off",
    "gone": "{} missing",
    "stale": "{} replaced by step 1's",
}


def groups(bench: Bench) -> dict[str, Callable[[], None]]:
    """The rows, in groups that can be run alone."""

    def kill() -> None:
        for side in SIDES:
            bench.at_every_call("killed before a call (who writes)", side, "kill")
            bench.at_every_call("killed within a write (who writes)", side, "torn")
        bench.at_every_call(
            "killed before a call (the rank, its writer lives)", WEFT, "other"
        )

    def full() -> None:
        for side in SIDES:
            bench.at_every_call("disk full from a call on", side, "full")
            bench.at_every_call(
                "disk nearly full from a call on: small writes fit", side, "tight"
            )
            bench.at_every_call("one call fails: I/O error", side, "io")

    def power() -> None:
        for side in SIDES:
            bench.power_failures(
                "power failure, names in order (as ext4)", side, ordered=True
            )
            bench.power_failures(
                "power failure, names in any order (POSIX)", side, ordered=False
            )

    def damage() -> None:
        for how, title in DAMAGES.items():
            for kind in ("data", "metadata"):
                for side in (WEFT, DCP):
                    bench.damage(title.format(kind), side, kind, how)

    def ranks() -> None:
        for side in (WEFT, DCP):
            bench.at_every_call(
                "2 ranks, one killed before a call",
                side,
                "other" if side is WEFT else "kill",
                world=2,
            )
            bench.at_every_call("2 ranks, disk of one full", side, "full", world=2)
        bench.at_every_call(
            "2 ranks, the writer of one killed before a call", WEFT, "kill", world=2
        )

    def again() -> None:
        for side in (WEFT, DCP, DCP_KEEP):
            bench.at_every_call(
                "same folder again: killed before a call", side, "kill", again=True
            )
            bench.at_every_call(
                "same folder again: disk full from a call on", side, "full", again=True
            )
        for side in (WEFT, DCP):
            kind = "other" if side is WEFT else "kill"
            bench.at_every_call(
                "same folder again: 2 ranks, one killed",
                side,
                kind,
                world=2,
                again=True,
            )
            bench.power_failures(
                "same folder again: power failure (as ext4)",
                side,
                ordered=True,
                again=True,
            )

    return {f.__name__: f for f in (kill, full, power, damage, ranks, again)}


COLUMNS = {
    "runs": "runs",
    "new": "step 2 loads",
    "before": "step 1 loads",
    "wrong": "WRONG VALUES",
    "lost": "nothing loads",
    "claimed": '"saved", but is not',
    "hung": "hangs",
    "refusals": "refused (file named)",
}


def table(tallies: Sequence[Tally]) -> str:
    """In Markdown, as docs/measured/checkpoint-faults.md shows it."""
    rows = [["fault", "", *COLUMNS.values()]]
    for i, t in enumerate(tallies):
        fault = t.fault if not i or tallies[i - 1].fault != t.fault else ""
        rows.append([fault, t.side, *(str(getattr(t, name)) for name in COLUMNS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rows.insert(1, ["-" * (w - (i > 1)) + ":" * (i > 1) for i, w in enumerate(widths)])
    return "\n".join(
        "| "
        + " | ".join(
            c.ljust(w) if i < 2 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in rows
    )


def totals(tallies: Sequence[Tally]) -> list[Tally]:
    found = []
    for name in dict.fromkeys(t.side.split(",")[0] for t in tallies):
        of = [t for t in tallies if t.side.split(",")[0] == name]
        keys = ("new", "before", "wrong", "lost", "hung", "claimed", "refused", "named")
        counts = {key: sum(getattr(t, key) for t in of) for key in keys}
        found.append(Tally("all", name, **counts))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--quick", action="store_true", help="a few runs of every row")
    parser.add_argument(
        "--most",
        type=int,
        default=64,
        help="runs per row at most; the calls are drawn if there are more",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        help="groups of rows: " + " ".join(groups(Bench(Path(), 0))),
    )
    memory = Path("/dev/shm")
    parser.add_argument(
        "--folder",
        type=Path,
        default=memory if memory.is_dir() else Path(tempfile.gettempdir()),
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument(
        "--docs",
        type=Path,
        help="the page whose table is to be replaced: docs/measured/checkpoint-faults.md",
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    facts, begun = machine(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-faults-", dir=options.folder) as name:
        bench = Bench(Path(name), 4 if options.quick else options.most)
        for title, run in groups(bench).items():
            if not options.only or title in options.only:
                at, first = time.monotonic(), len(bench.tallies)
                run()
                count = sum(t.runs for t in bench.tallies[first:])
                print(
                    f"{title}: {count} runs in {time.monotonic() - at:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    tallies = sorted(
        bench.tallies, key=lambda t: [u.fault for u in bench.tallies].index(t.fault)
    )
    tallies += totals(tallies)
    print(table(tallies))
    found = {
        "machine": facts,
        "seconds": round(time.monotonic() - begun),
        "rows": [
            vars(t) | {"runs": t.runs, "examples": t.examples[:4]} for t in tallies
        ],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.docs:
        before, _, after = options.docs.read_text().split("<!-- table -->\n")
        options.docs.write_text(
            f"{before}<!-- table -->\n\n{table(tallies)}\n\n<!-- table -->\n{after}"
        )
    print(f"\n{found['seconds']} s; written to {options.json}")


if __name__ == "__main__":
    main()
