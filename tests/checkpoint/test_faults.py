"""Saves that are killed, torn, out of space or cut off: never a wrong value, never the loss of a checkpoint."""

from __future__ import annotations

import errno
import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from weft.checkpoint.boxes import ROOT
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.staging import plan_pieces
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.store import committed_checkpoints, load_newest, prune, verify
from weft.checkpoint.write_task import Commit, WriteTask
from weft.checkpoint.writer import commit_report, write_share
from weft.layout.dims import Tensor
from weft.layout.parts import Part

#: Some that both ranks write a part of, and one that only one of them writes.
SHAPES = {"model.a": (400, 100), "model.b": (7,), "optimizer.exp_avg.a": (400, 100)}
#: The system calls that change what is stored.
CALLS = ("open", "write", "fsync", "link", "mkdir", "unlink")


def values(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g) for name, shape in SHAPES.items()}


def jobs(folder: Path, seed: int) -> list[tuple[WriteTask, bytes]]:
    """Two ranks' jobs, the first of which commits, and what their memory holds."""
    found = []
    names = tuple(f"manifest/x{seed}-{rank:05d}.json" for rank in range(2))
    tensors = {name: Tensor(shape, "F32") for name, shape in SHAPES.items()}
    whole = values(seed)
    for rank in range(2):
        mine = {
            name: Part(whole[name], tuple((0, n) for n in t.shape), t, rank, 2)
            for name, t in tensors.items()
        }
        pieces = plan_pieces(mine)
        payload = b"".join(
            whole[p.name][tuple(slice(*e) for e in p.box)].numpy().tobytes()
            for p in pieces
        )
        shares = tuple((p.name, p.box) for p in pieces)
        commit = (
            Commit(names, {"step": seed}, {f"files/x{seed}/note": b"hello"}, 0.05)
            if rank == 0
            else None
        )
        job = WriteTask(
            LocalStorage(folder),
            f"data/x{seed}-{rank:05d}.safetensors",
            names[rank],
            tensors,
            shares,
            commit,
        )
        found.append((job, payload))
    return found


def save(folder: Path, seed: int) -> str:
    """Both ranks write, the last one first, then the commit; the first problem."""
    problem = ""
    for job, payload in reversed(jobs(folder, seed)):
        with mmap.mmap(-1, max(len(payload), 1)) as memory:
            memory[: len(payload)] = payload
            problem = problem or write_share(job, memory).problem
        if job.commit is not None and not problem:
            problem = commit_report(job.storage, job.commit, lambda: False).problem
    return problem


def check(root: Path, seeds: dict[str, int], must: str) -> str:
    """The newest checkpoint that seems whole holds exactly what was saved; ``must`` is still there. Returns which."""
    assert must in [p.name for p in committed_checkpoints(root)]
    whole: dict[str, torch.Tensor] = {}

    def load(checkpoint: StoredCheckpoint) -> None:
        expected = values(seeds[checkpoint.storage.name])
        got = {name: torch.full_like(v, torch.nan) for name, v in expected.items()}
        checkpoint.load({
            name: Part(v, tuple((0, n) for n in v.shape), Tensor(tuple(v.shape), "F32")) for name, v in got.items()
        })  # fmt: skip
        whole.update(got)

    name = load_newest([root], load, lambda text: None)[0].storage.name
    expected = values(seeds[name])
    assert all(torch.equal(whole[tensor], expected[tensor]) for tensor in expected), (
        name
    )
    return name


class Count:
    """Numbers the calls that change storage, and does ``fault`` at one of them."""

    def __init__(
        self, at: int, fault: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]
    ) -> None:
        self.at, self.fault, self.names = at, fault, list[str]()

    @property
    def seen(self) -> int:
        return len(self.names)

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(
                    mock.patch.object(os, name, self._counted(name, getattr(os, name)))
                )
            yield

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            if self.seen == self.at:
                return self.fault(name, real, args)
            return real(*args, **kwargs)

        return call


def killed(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os._exit(9)


def torn(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Half of a write, then the end."""
    if name == "write":
        real(args[0], bytes(args[1])[: len(args[1]) // 2])
    os._exit(9)


def failing(number: int) -> Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]:
    def fail(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a copy of this process; its exit code."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def root(quick_disk: Path) -> Path:
    assert not save(quick_disk / "root/step-000001", 1)
    return quick_disk / "root"


def test_the_harness_sees_every_call(root: Path) -> None:
    count = Count(0, killed)
    with count.watching():
        assert not save(root / "step-000002", 2)
    assert count.seen > 30
    assert (
        check(root, {"step-000001": 1, "step-000002": 2}, "step-000002")
        == "step-000002"
    )


FAULTS = {
    "kill": killed,
    "torn": torn,
    "full": failing(errno.ENOSPC),
    "io": failing(errno.EIO),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "exhaustive"),
    [
        *((fault, False) for fault in ("kill", "full")),
        *(pytest.param(fault, True, marks=pytest.mark.soak) for fault in FAULTS),
    ],
)
def test_a_fault_at_every_system_call(root: Path, fault: str, exhaustive: bool) -> None:
    count = Count(0, killed)
    with count.watching():
        assert not save(root / "step-000002", 2)
    seeds = {"step-000001": 1, "step-000002": 2}
    outcomes = []
    # Half of a write is the end of a rank that is torn; at any other call it is just killed. Every day at every third.
    calls = [
        n for n, name in enumerate(count.names, 1) if fault != "torn" or name == "write"
    ]
    for at in calls[:: 1 if exhaustive else 3]:
        shutil.rmtree(root / "step-000002", ignore_errors=True)
        code = ended(fault, root / "step-000002", at)
        found = check(root, seeds, "step-000001")
        outcomes.append(found)
        if code == 0:  # it said that it was saved
            assert found == "step-000002", at
    assert outcomes[0] == "step-000001"
    assert len(calls) >= (8 if fault == "torn" else 30)
    # What a fault has left is in nobody's way, and is cleared away once there is something newer.
    shutil.rmtree(root / "step-000002", ignore_errors=True)
    ended(fault, root / "step-000002", count.seen // 2)
    assert not save(root / "step-000003", 3)
    assert check(root, seeds | {"step-000003": 3}, "step-000001") == "step-000003"
    prune(root, 2)
    assert sorted(p.name for p in root.iterdir()) == ["step-000001", "step-000003"]


def ended(fault: str, folder: Path, at: int) -> int:
    """How a save with a fault at the ``at``-th call has ended: 0 if it said that it was saved.

    What ends the process does so in a copy of this one. Copies of so large a process are what takes long here.
    """

    def run() -> int:
        with Count(at, FAULTS[fault]).watching():
            return 3 if save(folder, 2) else 0

    return in_child(lambda: os._exit(run())) if fault in ("kill", "torn") else run()


class Journal:
    """A file system that forgets: what was not synced before a power failure may be whole, torn, empty or gone."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, list[tuple[str, str]]()
        # under which name a file was written and synced
        self.drafts: dict[str, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        opened: dict[int, str] = {}
        real = {name: getattr(os, name) for name in ("open", "write", "fsync", "link")}

        def track(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                result = real[name](*args, **kwargs)
                if name == "open":
                    opened[result] = str(args[0])
                elif name == "link":
                    self.drafts[str(args[1])] = str(args[0])
                    self.log.append(("link", str(args[1])))
                elif args[0] in opened:
                    self.log.append((name, opened[args[0]]))
                return result

            return call

        with ExitStack() as stack:
            for name in real:
                stack.enter_context(mock.patch.object(os, name, track(name)))
            yield


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
def test_power_failures(root: Path, seed: int) -> None:
    """Whatever unsynced data and names a power failure leaves, in whatever order they had reached the disk."""
    journal = Journal(root)
    with journal.recording():
        assert not save(root / "step-000002", 2)
    rng = random.Random(seed)
    folder, kept = root / "step-000002", root.parent / f"{root.name}-kept"
    folder.rename(kept)
    paths = [p for p in kept.rglob("*") if p.is_file()]
    for _ in range(75):
        cut = rng.randrange(len(journal.log) + 1)
        done = journal.log[:cut]
        shutil.copytree(kept, folder)
        for path in paths:
            name = str(root / "step-000002" / path.relative_to(kept))
            target = Path(name)
            linked = done.index(("link", name)) if ("link", name) in done else None
            named = (
                linked is not None and ("fsync", str(target.parent)) in done[linked:]
            )
            synced = ("fsync", journal.drafts[name]) in done
            if linked is None:
                target.unlink()
            elif not (synced and named):
                fate = rng.choice(["whole", "torn", "empty", "gone"])
                if fate == "gone":
                    target.unlink()
                elif fate != "whole":
                    content = target.read_bytes()
                    target.write_bytes(
                        content[: rng.randrange(len(content))]
                        if fate == "torn"
                        else b""
                    )
        found = check(root, {"step-000001": 1, "step-000002": 2}, "step-000001")
        if cut == len(journal.log):
            assert found == "step-000002"
        shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["data", "manifest", "files", ROOT])
def test_flipped_bits_fall_back_to_the_checkpoint_before(root: Path, kind: str) -> None:
    assert not save(root / "step-000002", 2)
    rng = random.Random(kind)
    targets = [
        p
        for p in (root / "step-000002").rglob("*")
        if p.is_file() and kind in (p.parent.name, p.name)
    ]
    targets = targets or [
        p for p in (root / "step-000002" / kind).rglob("*") if p.is_file()
    ]
    seeds = {"step-000001": 1, "step-000002": 2}
    for _ in range(40):
        path = rng.choice(targets)
        before = path.read_bytes()
        damaged = bytearray(before)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        check(root, seeds, "step-000001")
        path.write_bytes(before)
    assert check(root, seeds, "step-000001") == "step-000002"


@pytest.mark.slow
def test_pruning_that_is_killed_leaves_whole_checkpoints(root: Path) -> None:
    for step in (2, 3, 4):
        assert not save(root / f"step-{step:06d}", step)
    seeds = {f"step-{n:06d}": n for n in range(1, 5)}
    copy, count = root.parent / f"{root.name}-pruned", Count(0, killed)
    shutil.copytree(root, copy)
    with count.watching():
        prune(copy, 1)
    assert count.seen > 8
    for at in range(1, count.seen + 1):
        shutil.rmtree(copy)
        shutil.copytree(root, copy)

        def run(at: int = at) -> None:
            with Count(at, killed).watching():
                prune(copy, 1)

        in_child(run)
        assert check(copy, seeds, "step-000004") == "step-000004"
        for folder in committed_checkpoints(copy):
            verify(StoredCheckpoint(folder))


def test_two_attempts_at_once_commit_once(root: Path) -> None:
    """A rank that comes back from the dead cannot touch what another attempt has committed."""
    folder = root / "step-000002"
    assert not save(folder, 2)
    (job, payload), *_ = jobs(folder, 3)
    assert job.commit is not None
    with mmap.mmap(-1, len(payload)) as memory:
        memory[:] = payload
        write_share(job, memory)
    other = jobs(folder, 3)[1]
    with mmap.mmap(-1, len(other[1])) as memory:
        memory[:] = other[1]
        write_share(other[0], memory)
    report = commit_report(job.storage, replace(job.commit, timeout=0.1), lambda: False)
    assert "committed before" in report.problem
    assert (
        check(root, {"step-000001": 1, "step-000002": 2}, "step-000002")
        == "step-000002"
    )
