"""Files as blocks named by the hash of their content, so that senders need not be trusted.

A file is cut into blocks of 1 MiB; a block's name is the BLAKE2b-256 hash of its bytes. The names of a file's blocks,
concatenated, are its *index*, which is a block as well. The index's name is the file's *root* and identifies the whole
content.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

BLOCK = 1 << 20
NAME = 32  # bytes of a block's name
#: Bytes of the longest index: that of a file of 512 GiB.
LONGEST = 16 << 20


def name_of(block: bytes | memoryview) -> bytes:
    return hashlib.blake2b(block, digest_size=NAME).digest()


class Shared(NamedTuple):
    """File that a peer shares, as it announces the file to other peers.

    ``size``: bytes of the file; ``root``: hash of its index (the list of its blocks' hashes), in hexadecimal.
    """

    size: int
    root: str


def shared_from(said: Any) -> Shared | None:
    """Return the file that another peer has announced as the JSON value ``said``.

    Returns None if the announcement is malformed.
    """
    match said:
        case [int(size), str(root)] if size >= 0 and re.fullmatch("[0-9a-f]{64}", root):
            return Shared(size, root)
    return None


def is_inside(path: str) -> bool:
    """Return whether the relative path ``path``, which another peer has sent, stays inside the folder to which it is
    appended.
    """
    pure = PurePosixPath(path)
    return (
        not pure.is_absolute()
        and pure.parts != ()
        and ".." not in pure.parts
        and "\0" not in path
    )


class BlockShelf:
    """Index of the blocks of all files in some folders; it serves blocks to other peers by their hashes. ``folders``:
    the shared folders, by name. ``files``: the shared files, by path; a path begins with the name of the folder and
    goes on with the path inside it.
    """

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders, self.files = folders, dict[str, Shared]()
        # size and time of change when a file was hashed
        self._seen: dict[str, tuple[int, int]] = {}
        self._where: dict[bytes, tuple[Path, int, int]] = {}
        self._indices: dict[bytes, bytes] = {}

    def scan(self) -> None:
        """Update ``files`` from the folders: hash new and changed files, and drop deleted ones."""
        files = dict(self._walk())
        for path in self.files.keys() - files.keys():
            del self.files[path], self._seen[path]
        for path, file in files.items():
            with suppress(OSError):  # deleted just now
                about = file.stat()
                seen = about.st_size, about.st_mtime_ns
                if self._seen.get(path) != seen:
                    self.files[path], self._seen[path] = self._hash(file), seen

    def read(self, name: bytes) -> bytes | None:
        """Return the block whose hash is ``name``, or None if no file has it.

        The receiver has to check the hash, because the file may have changed since it was hashed.
        """
        if name in self._indices:
            return self._indices[name]
        if name in self._where:
            file, offset, size = self._where[name]
            with suppress(OSError), file.open("rb") as handle:
                handle.seek(offset)
                return handle.read(size)
        return None

    def _walk(self) -> Iterator[tuple[str, Path]]:
        for name, folder in self.folders.items():
            for parent, _, files in os.walk(folder):
                # these are not whole yet
                for file in (Path(parent, f) for f in files if not f.startswith(".")):
                    yield f"{name}/{file.relative_to(folder).as_posix()}", file

    def _hash(self, file: Path) -> Shared:
        index, offset = bytearray(), 0
        with file.open("rb") as handle:
            while block := handle.read(BLOCK):
                name = name_of(block)
                self._where[name] = file, offset, len(block)
                index += name
                offset += len(block)
        root = name_of(bytes(index))
        self._indices[root] = bytes(index)
        return Shared(offset, root.hex())
