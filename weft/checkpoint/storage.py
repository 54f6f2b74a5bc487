"""Storage of checkpoints: a small interface, and its implementation on a file system."""

import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from weft.errors import WeftError, why_unwritten

#: Buffers of one system call at most.
IOV_MAX = 1000


#: Bytes after which the disk is set to work while the file is still being written.
FLUSH = 8 << 20


class StorageError(WeftError):
    """Error of a storage operation. The message names the file and the cause."""


class MissingObject(StorageError):
    """Error of reading an object that does not exist or is too short."""


class Storage(Protocol):
    """Storage of named, immutable objects under one root, such as a folder or the prefix of a bucket.

    Names use ``/``. Failures raise :class:`StorageError`. ``storage / "folder"`` is the storage whose root is that
    folder; :attr:`name` is the last part of the root's path. Storages of the same root are equal and can be pickled.
    :func:`weft.checkpoint.address.open_storage` opens a storage from its address.
    """

    @property
    def name(self) -> str: ...

    def __truediv__(self, name: str) -> Self: ...

    def __hash__(self) -> int: ...

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Write ``chunks``, one after another, as the object ``name`` to stable storage. Returns its size in bytes.

        The memory of a chunk may change as soon as the next chunk is requested. ``chunks`` is iterated again after a
        failed attempt. Raises :class:`StorageError` if an object of that name exists.
        """

    def create(self, name: str, data: bytes) -> bool:
        """Create a small object ``name`` with the bytes ``data`` atomically.

        Returns False if an object of that name exists.
        """

    def read(self, name: str) -> bytes:
        """Return all bytes of the object ``name``. Raises :class:`MissingObject` if it does not exist."""

    def holds(self, name: str) -> bool:
        """Return whether an object called ``name`` exists."""

    @property
    def granule(self) -> int:
        """Number of bytes per read request with which reading is most efficient."""

    def read_into(self, name: str, offset: int, *buffers: memoryview) -> None:
        """Fill ``buffers``, one after another, with the bytes of the object ``name`` from byte ``offset`` on.

        Raises :class:`MissingObject` if the object does not exist or is too short.
        """

    def list(self, prefix: str = "") -> dict[str, int]:
        """Return the sizes in bytes of all objects whose names begin with ``prefix``, by name."""

    def folders(self) -> Sequence[str]:
        """Return the names of the folders directly under the root. If the root does not exist, there are none."""

    def modified(self, name: str = "") -> float:
        """Return the Unix time in seconds of the last change of the object ``name``.

        If ``name`` is empty, the last change of any object counts. Raises :class:`MissingObject` if nothing exists.
        """

    def delete(self, names: Iterable[str]) -> None:
        """Remove the objects called ``names``. Names of missing objects are ignored."""

    def clear(self) -> None:
        """Remove all objects of the storage, in any order."""


@dataclass(frozen=True)
class LocalStorage:
    """:class:`Storage` in a folder of a local or network file system. ``root``: the folder."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    @property
    def name(self) -> str:
        return self.root.name

    def __truediv__(self, name: str) -> Self:
        return type(self)(self.root / name)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        with self._named("write", name):
            return self._make(name, chunks)

    def create(self, name: str, data: bytes) -> bool:
        with self._named("create", name):
            try:
                self._make(name, [data])
            except FileExistsError:
                return False
        return True

    def _make(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Make a file of these bytes, unless there is one; its size. Nobody ever sees a file that is not whole."""
        path, size, flushed = self.root / name, 0, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    while view:
                        done = os.write(handle, view)
                        size, view = size + done, view[done:]
                    if size >= flushed + FLUSH:
                        flushed = _flush(handle, flushed, size)
                os.fsync(handle)
            finally:
                os.close(handle)
            os.link(draft, path)  # unlike rename, this fails if there is one already
        finally:
            # on a full disk it takes the room that the next attempt needs
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        # those above are as new as the first checkpoint
        self._sync_folders(path.parent)
        return size

    def read(self, name: str) -> bytes:
        with self._named("read", name):
            return (self.root / name).read_bytes()

    def holds(self, name: str) -> bool:
        with self._named("read", name):
            return (self.root / name).is_file()

    @property
    def granule(self) -> int:
        # what has just been read is then still in a core's cache when it is verified and unpacked
        return 512 << 10

    def read_into(self, name: str, offset: int, *buffers: memoryview) -> None:
        left = [b for b in buffers if b.nbytes]
        with self._named("read", name):
            handle = os.open(self.root / name, os.O_RDONLY)
            try:
                while left:
                    got = os.preadv(handle, left[:IOV_MAX], offset)
                    if not got:
                        raise OSError(errno.ENODATA, "it is shorter than it should be")
                    offset += got
                    while left and got >= left[0].nbytes:
                        got -= left.pop(0).nbytes
                    if got:
                        left[0] = left[0][got:]
            finally:
                os.close(handle)

    def list(self, prefix: str = "") -> dict[str, int]:
        folder = self.root / prefix.rpartition("/")[0]
        names = {}
        with self._named("list", prefix):
            if self.root.is_file():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            for parent, _, files in os.walk(folder, onerror=_unless_gone):
                for path in (
                    Path(parent, name) for name in files if not name.startswith(".")
                ):
                    with suppress(FileNotFoundError):  # deleted just now
                        names[path.relative_to(self.root).as_posix()] = (
                            path.stat().st_size
                        )
        return {
            name: size
            for name, size in sorted(names.items())
            if name.startswith(prefix)
        }

    def delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self.root / name
            with self._named("delete", name):
                path.unlink(missing_ok=True)
            folders |= set(path.parents) - {self.root} - set(self.root.parents)
        for folder in sorted(folders, reverse=True):
            with suppress(OSError):  # not empty
                folder.rmdir()

    def folders(self) -> Sequence[str]:
        with self._named("list"), suppress(FileNotFoundError, NotADirectoryError):
            return sorted(p.name for p in self.root.iterdir() if p.is_dir())
        return []

    def modified(self, name: str = "") -> float:
        # what is being written as well
        paths = [self.root / name] if name else [self.root, *self.root.rglob("*")]
        with self._named("read", name):
            return max(path.stat().st_mtime_ns for path in paths) / 1e9

    def clear(self) -> None:
        # gone, or someone else deletes it as well
        with self._named("delete"), suppress(FileNotFoundError):
            shutil.rmtree(self.root)

    def _sync_folders(self, folder: Path) -> None:
        """Sync all folders above a new file, so that its path is as durable as its contents."""
        for above in (folder, *folder.parents):
            try:
                handle = os.open(above, os.O_RDONLY)
            except PermissionError:  # not ours, so not made by us
                return
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    @contextmanager
    def _named(self, doing: str, name: str = "") -> Iterator[None]:
        """Raise an OSError of the body as a :class:`StorageError` that says what cannot be done with which file."""
        try:
            yield
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENODATA)
            kind = MissingObject if missing and doing == "read" else StorageError
            raise kind(
                f"cannot {doing} {self.root / name}: {why_unwritten(error)}"
            ) from error


def _unless_gone(error: OSError) -> None:
    """For :func:`os.walk`: raise its error, unless a folder was deleted in the meantime."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _flush(handle: int, begin: int, end: int) -> int:
    """Start to write a file's bytes ``begin`` to ``end`` to the disk without waiting for it, and return ``end``.

    An error shows when the file is synced.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).sync_file_range(
            handle, ctypes.c_int64(begin), ctypes.c_int64(end - begin), 2
        )
    return end
