"""Where checkpoints are kept: a small interface, and its form on a file system."""

import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from weft.errors import WeftError


class StorageError(WeftError):
    """Storage could not do what it was asked to; the message names the file and the cause."""


class MissingObject(StorageError):
    """There is no object of that name, or it ends before what is asked of it."""


class Storage(Protocol):
    """Named, immutable objects under one root. Names use ``/``. Failures raise :class:`StorageError`."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        """Make a new object of these bytes, on stable storage when this returns; its size."""

    def create(self, name: str, data: bytes) -> bool:
        """Make a small object at once, if there is none of that name; whether this call made it."""

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """Bytes of an object; fewer than ``size`` if it ends before."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``; :class:`StorageError` if the object is shorter."""

    def list(self, prefix: str = "") -> dict[str, int]:
        """Names (of whole objects) that begin with ``prefix``, and their sizes."""

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""


class LocalStorage:
    """A folder on a local or network file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> int:
        path, size = self.root / name, 0
        draft = path.with_name(f".{path.name}")  # nobody may see a file that is not whole
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    while view:
                        done = os.write(handle, view)
                        size, view = size + done, view[done:]
                os.fsync(handle)
            finally:
                os.close(handle)
            os.link(draft, path)
            os.unlink(draft)
            self._sync_folders(path.parent)
        except OSError as error:
            raise self._error("write", name, error) from error
        return size

    def create(self, name: str, data: bytes) -> bool:
        path = self.root / name
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(draft, path)  # unlike rename, this fails if there is one already
                made = True
            except FileExistsError:
                made = False
            finally:
                draft.unlink(missing_ok=True)
            self._sync_folders(path.parent)
        except OSError as error:
            raise self._error("create", name, error) from error
        return made

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        try:
            with (self.root / name).open("rb", buffering=0) as file:
                file.seek(offset)
                return file.read() if size is None else file.read(size)
        except OSError as error:
            raise self._error("read", name, error) from error

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        try:
            with (self.root / name).open("rb", buffering=0) as file:
                at = 0
                while at < len(buffer):
                    got = os.preadv(file.fileno(), [buffer[at:]], offset + at)
                    if not got:
                        raise OSError(errno.ENODATA, "it is shorter than it should be")
                    at += got
        except OSError as error:
            raise self._error("read", name, error) from error

    def list(self, prefix: str = "") -> dict[str, int]:
        folder = self.root / prefix if prefix.endswith("/") or not prefix else (self.root / prefix).parent
        try:
            files = [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")]
            names = {p.relative_to(self.root).as_posix(): p.stat().st_size for p in files}
        except OSError as error:
            raise self._error("list", prefix, error) from error
        return {name: size for name, size in sorted(names.items()) if name.startswith(prefix)}

    def delete(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self.root / name
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._error("delete", name, error) from error
            folders |= set(path.parents) - {self.root} - set(self.root.parents)
        for folder in sorted(folders, reverse=True):
            try:
                folder.rmdir()
            except OSError:  # not empty
                continue

    def _sync_folders(self, folder: Path) -> None:
        """Make the names on the way to a new file as durable as the file."""
        while True:
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            if folder == self.root or folder == folder.parent:
                return
            folder = folder.parent

    def _error(self, doing: str, name: str, error: OSError) -> StorageError:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENODATA)
        kind = MissingObject if missing and doing == "read" else StorageError
        return kind(f"cannot {doing} {self.root / name}: {error.strerror or error}")
