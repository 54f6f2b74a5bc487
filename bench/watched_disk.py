"""The system calls that change what is stored below one folder: counted, made to fail, or recorded.

Python code is watched wherever it goes through ``os`` or ``open``, which is all that checkpointing in Python does. A
power failure is a recorded log that is cut off: what had not been synced by then may be there, in parts, or not at all.
"""

from __future__ import annotations

import errno
import io
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

#: Calls by what their first argument is.
BY_PATH = ("open", "link", "mkdir", "unlink", "rename", "replace", "rmdir")
BY_HANDLE = (
    "write",
    "pwrite",
    "writev",
    "pwritev",
    "ftruncate",
    "posix_fallocate",
    "fsync",
    "fdatasync",
)
#: Those that need room on the disk.
GROWING = (
    "open",
    "link",
    "mkdir",
    "write",
    "pwrite",
    "writev",
    "pwritev",
    "posix_fallocate",
)

Real = Callable[[], Any]
#: Is told of a call (its name, path, arguments) and makes it happen, or not.
Act = Callable[[str, str, tuple[Any, ...], Real], Any]


class Watch:
    """Sends every call that changes something below ``root`` through ``act``; safe with threads and after a fork."""

    def __init__(self, root: Path, act: Act) -> None:
        self.root, self.act = str(root), act
        self._handles: dict[int, str] = {}
        self._open = io.open

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in BY_PATH + BY_HANDLE:
                if hasattr(os, name):
                    stack.enter_context(
                        mock.patch.object(
                            os, name, self._through(name, getattr(os, name))
                        )
                    )
            stack.enter_context(mock.patch.object(os, "close", self._closing(os.close)))
            stack.enter_context(mock.patch("io.open", self._opening))
            stack.enter_context(mock.patch("builtins.open", self._opening))
            yield

    def _path(self, name: str, first: Any) -> str | None:
        if name in BY_HANDLE or isinstance(first, int):
            return self._handles.get(first)
        path = os.path.abspath(os.fsdecode(os.fspath(first)))
        return path if path.startswith(self.root) else None

    def _through(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = self._path(name, args[0])
            if path is None:
                return real(*args, **kwargs)
            # of a folder, so that it can be synced
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR):
                handle = real(*args, **kwargs)
            else:
                handle = self.act(name, path, args, lambda: real(*args, **kwargs))
            if name == "open":
                self._handles[handle] = path
            return handle

        return call

    def _closing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(handle: int) -> None:
            self._handles.pop(handle, None)
            real(handle)

        return call

    def _opening(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """``open`` for writing, with the buffer that Python itself would put around the file."""
        if (
            isinstance(file, int)
            or "b" not in mode
            or "r" in mode
            or self._path("open", file) is None
        ):
            return self._open(file, mode, *args, **kwargs)
        watch = self

        class Raw(io.FileIO):
            def write(self, data: Any) -> int:
                here = (self.fileno(), bytes(data))
                real = super().write
                return int(
                    watch.act(
                        "write", watch._handles[self.fileno()], here, lambda: real(data)
                    )
                )

            def close(self) -> None:
                if not self.closed:
                    watch._handles.pop(self.fileno(), None)
                super().close()

        return io.BufferedWriter(
            Raw(file, mode, opener=lambda path, flags: os.open(path, flags, 0o666))
        )


class Fault:
    """Counts calls, and at the one of number ``at`` does what ``kind`` says; 0: only counts.

    ``kill``: the process is gone before the call. ``torn``: half of a write is done, then it is gone. ``full``: no room
    from then on; ``tight``: only for little. ``io``: this call fails. ``other``: calls ``victim``, which
    kills another process.
    """

    KINDS = ("kill", "torn", "full", "tight", "io", "other")
    LITTLE = 16 << 10

    def __init__(
        self, kind: str, at: int, victim: Callable[[], None] = lambda: None
    ) -> None:
        self.kind, self.at, self.victim, self.calls = kind, at, victim, 0
        self._lock = threading.Lock()

    def __call__(self, name: str, path: str, args: tuple[Any, ...], real: Real) -> Any:
        with self._lock:
            self.calls += 1
            now = self.calls == self.at
        if 0 < self.at <= self.calls and (
            (self.kind == "full" and name in GROWING)
            or (self.kind == "tight" and name == "write" and len(args[1]) > self.LITTLE)
        ):
            self._fail(errno.ENOSPC)
        if now and self.kind == "io":
            self._fail(errno.EIO)
        if now and self.kind == "torn" and name == "write":
            os.pwrite(
                args[0],
                bytes(args[1])[: len(args[1]) // 2],
                os.lseek(args[0], 0, os.SEEK_CUR),
            )
        if now and self.kind in ("kill", "torn"):
            os._exit(9)
        if now and self.kind == "other":
            self.victim()
        return real()

    @staticmethod
    def _fail(number: int) -> None:
        raise OSError(number, os.strerror(number))


class Journal:
    """Records what a save does to the disk, and makes what a power failure at some point may leave of it.

    Of a file, the writes since its last fsync may all be there, or some of them, or half of one. Of names, with
    ``ordered`` those since the last fsync of anything may be missing from some point on (a journaling file system such
    as ext4); without it each one whose folder was not synced afterwards may be missing (all that POSIX promises).
    """

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, list[tuple[Any, ...]]()
        self.before = {
            str(p): p.read_bytes() if p.is_file() else None
            for p in sorted(root.rglob("*"))
        }
        self._files: dict[str, int] = {}  # which file a name means now
        for number, path in enumerate(self.before):
            self._files[path] = number
        self._number = len(self.before)
        self._lock = threading.Lock()

    def __call__(self, name: str, path: str, args: tuple[Any, ...], real: Real) -> Any:
        # calls of threads are recorded in the order in which they happen
        with self._lock:
            at = os.lseek(args[0], 0, os.SEEK_CUR) if name in ("write", "writev") else 0
            was_there = os.path.lexists(path)
            result = real()
            self._record(name, path, args, at, result, was_there)
            return result

    def _record(
        self,
        name: str,
        path: str,
        args: tuple[Any, ...],
        at: int,
        result: Any,
        was_there: bool,
    ) -> None:
        if name in ("fsync", "fdatasync"):
            self.log.append(("sync", path, self._files.get(path)))
        elif name in ("write", "writev", "pwrite", "pwritev"):
            data = (
                b"".join(map(bytes, args[1])) if name.endswith("v") else bytes(args[1])
            )
            at = args[2] if name.startswith("p") else at
            self.log.append(("data", self._files[path], at, data[:result]))
        elif name in ("ftruncate", "posix_fallocate"):
            self.log.append(
                (
                    "size",
                    self._files[path],
                    args[-1] if name == "ftruncate" else args[1] + args[2],
                )
            )
        elif name in ("open", "mkdir"):
            if was_there and name == "open" and args[1] & os.O_TRUNC:
                self.log.append(("size", self._files[path], 0))
            elif not was_there:
                self._number += 1
                self._files[path] = self._number
                self.log.append(
                    ("name", {path: None if name == "mkdir" else self._number})
                )
        elif name in ("link", "rename", "replace"):
            target = os.path.abspath(os.fsdecode(os.fspath(args[1])))
            moved = self._files[path] if name == "link" else self._files.pop(path)
            self._files[target] = moved
            self.log.append(
                ("name", {target: moved} | ({} if name == "link" else {path: -1}))
            )
        else:  # unlink, rmdir
            self._files.pop(path, None)
            self.log.append(("name", {path: -1}))

    def after_failure(
        self, cut: int, ordered: bool, rng: random.Random
    ) -> dict[str, bytes | None]:
        """What is below the folder once the power failed after ``cut`` calls: contents by path, None for a folder."""
        done = self.log[:cut]
        names: dict[str, int | None] = {}
        contents: dict[int, bytearray] = {}
        for number, (path, data) in enumerate(self.before.items()):
            names[path] = None if data is None else number
            contents[number] = bytearray(data or b"")
        self._names(done, ordered, rng, names)
        synced = {entry[2]: i for i, entry in enumerate(done) if entry[0] == "sync"}
        for number in {entry[1] for entry in done if entry[0] in ("data", "size")}:
            content = contents.setdefault(number, bytearray())
            changes = [
                (i, *entry)
                for i, entry in enumerate(done)
                if entry[0] in ("data", "size") and entry[1] == number
            ]
            for _, kind, _, at, *rest in self._left(
                changes, synced.get(number, -1), rng
            ):
                # what is skipped reads as zeros
                content[len(content) :] = bytes(max(0, at - len(content)))
                if kind == "size":
                    del content[at:]
                else:
                    content[at : at + len(rest[0])] = rest[0]
        return {
            p: None if n is None else bytes(contents.get(n, b""))
            for p, n in names.items()
        }

    @staticmethod
    def _left(changes: list[Any], synced: int, rng: random.Random) -> list[Any]:
        """Those of a file's changes that are on the disk: all that were synced, and some that were not."""
        sure = [c for c in changes if c[0] < synced]
        open_ = changes[len(sure) :]
        fate = rng.choice(["all", "none", "some", "torn"])
        if fate == "some":
            open_ = [c for c in open_ if rng.random() < 0.5]
        elif fate == "torn" and open_:
            open_ = open_[: rng.randrange(len(open_)) + 1]
            i, kind, number, at, *rest = open_.pop()
            if kind == "data":
                open_.append(
                    (i, kind, number, at, rest[0][: rng.randrange(len(rest[0]) + 1)])
                )
        return sure + (open_ if fate != "none" else [])

    def _names(
        self,
        done: list[Any],
        ordered: bool,
        rng: random.Random,
        names: dict[str, int | None],
    ) -> None:
        """Bring ``names`` to what is left of them."""
        folders = [(i, entry[1]) for i, entry in enumerate(done) if entry[0] == "sync"]
        kept = (
            rng.randrange(folders[-1][0] if folders else 0, len(done) + 1)
            if done
            else 0
        )
        for i, (kind, *rest) in enumerate(done):
            if kind != "name":
                continue
            parents = {os.path.dirname(path) for path in rest[0]}
            durable = {path for at, path in folders if at > i}
            if i >= kept if ordered else not parents <= durable and rng.random() < 0.5:
                continue
            for path, number in rest[0].items():
                if number == -1:
                    names.pop(path, None)
                else:
                    names[path] = number
        # what is in a folder that is not there, is not there
        for path in sorted(names):
            parent = os.path.dirname(path)
            if path in names and parent != str(self.root) and parent not in names:
                del names[path]


def put(found: dict[str, bytes | None]) -> None:
    """Make the files and folders of :meth:`Journal.after_failure`."""
    for path in sorted(found):
        data = found[path]
        if data is None:
            Path(path).mkdir(exist_ok=True)
        else:
            Path(path).write_bytes(data)
