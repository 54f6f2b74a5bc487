"""Cache blocks in files, which other engines and the next start of a service read too.

A folder has one folder for each model (:func:`weft.generate.outside_cache.cache_name`), and in it a file for each
block, named by the block's key. A file is a header, with the key and a hash of the contents, and the contents. It
appears under its name only when it is whole. What does not match its header is removed and never used, so that a
damaged file, an alien one, or one of which a crash has left a part costs the time to compute the block again. When the
files take more than the limit, those that were read longest ago are removed.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue

from weft.errors import UsageError
from weft.generate.block_source import Contents

#: How each file begins; it names the form of what follows.
MAGIC = b"weft block 1\n"
#: Bytes of a key, and of the hash of a block's contents.
KEY, HASH = 16, 16
HEADER = len(MAGIC) + KEY + HASH
SUFFIX = ".block"

#: Bytes that may wait to be written; further blocks are not kept.
QUEUED = 1 << 28
#: Seconds without an attempt to write after one has failed, and that writing may take at the end.
PAUSE_S, END_S = 60.0, 10.0
#: The share of the limit that is left when files are removed, so that it is seldom done.
LEFT = 0.9
#: Seconds after which a part of a file that nobody goes on writing is removed.
STALE_S = 3600.0


def make_cache_folder(folder: Path) -> None:
    """Make ``folder``, which nobody else may read, as texts of users can be guessed from what is kept in it.

    Raises :class:`UsageError` if the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"the cache folder {folder} cannot be made: {error.strerror}; give another folder"
        ) from None


class BlockFiles:
    """Keeps cache blocks in files in ``folder``. ``model``: name of the model's own folder in ``folder``. ``most``:
    largest number of bytes of all files together. ``warn`` shows the user a line; each kind of trouble is reported
    once. Raises :class:`UsageError` if the folder cannot be made.
    """

    name = "files"

    def __init__(
        self, folder: Path, model: str, most: int, warn: Callable[[str], None]
    ) -> None:
        self.root, self.folder, self.most, self.warn = (
            folder,
            folder / model,
            most,
            warn,
        )
        make_cache_folder(self.folder)
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Contents] = {}
        self._known = set[bytes]()
        self._queued, self._paused = 0, 0.0
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._reader = ThreadPoolExecutor(2, "block-files")
        self._writer = threading.Thread(
            target=self._write_all, name="block-writer", daemon=True
        )
        self._writer.start()

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of ``keys``, from the first one on without a gap, have files or wait to be written."""
        for count, key in enumerate(keys):
            if key not in self._waiting and not os.path.exists(self._path(key)):
                return count
        return len(keys)

    def fetch(self, keys: Sequence[bytes]) -> Future[list[Contents]]:
        """Start to read the files of ``keys`` in a thread. The result is a future of the blocks' contents."""
        return self._reader.submit(self._read_all, list(keys))

    def store(self, key: bytes, contents: Contents) -> bool | None:
        """Hand the block of ``key`` to the writing thread, unless more than :data:`QUEUED` bytes would wait for that
        thread, or the last attempt to write has failed. Return whether it was taken, or None if it waits already.
        ``contents``: its bytes.
        """
        with self._lock:
            full = self._queued + len(contents) > QUEUED
            if key in self._waiting:
                return None
            if full or time.monotonic() < self._paused:
                return False
            self._waiting[key] = contents
            self._queued += len(contents)
        self._queue.put(key)
        return True

    def keys(self) -> set[bytes]:
        """Return the keys of three groups of blocks: blocks that wait to be written, blocks that had files when the
        folder was last listed, and blocks that were written since. Files of other processes are found at the next
        listing.
        """
        with self._lock:
            return {*self._known, *self._waiting}

    def close(self) -> None:
        """Write the blocks that wait to be written, for at most :data:`END_S` seconds, and end the thread."""
        self._queue.put(None)
        self._writer.join(END_S)
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self.folder}/{name[:2]}/{name}{SUFFIX}"

    def _key(self, path: str) -> bytes | None:
        """The key of the block whose file is at ``path``; None if it is of another model, or no block's file."""
        if not path.startswith(f"{self.folder}/"):
            return None
        try:
            key = bytes.fromhex(os.path.basename(path).removesuffix(SUFFIX))
        except ValueError:
            return None
        return key if len(key) == KEY else None

    # Reading, in threads of the pool.

    def _read_all(self, keys: Sequence[bytes]) -> list[Contents]:
        blocks: list[Contents] = []
        for key in keys:
            contents = self._waiting.get(key) or self._read(key)
            if contents is None:
                break
            blocks.append(contents)
        now = time.time()
        # a text's first block is needed by all that follow it: it is to be the latest
        for number, key in enumerate(keys[: len(blocks)]):
            with suppress(OSError):
                os.utime(self._path(key), (now, now - number * 1e-3))
        return blocks

    def _read(self, key: bytes) -> Contents | None:
        """The contents of a block's file; None if there is none that is whole."""
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                raw = bytearray(os.fstat(file.fileno()).st_size)
                count = file.readinto(raw)
        except FileNotFoundError:
            with self._lock:
                self._known.discard(key)
            return None
        except OSError as error:
            self._say(
                "read",
                f"{self.root} cannot be read ({error.strerror}); texts are computed",
            )
            return None
        contents = memoryview(raw)[HEADER:count]
        if bytes(raw[:HEADER]) != header_of(key, contents):
            with suppress(OSError):
                os.unlink(path)
            with self._lock:
                self._known.discard(key)
            self._say("damaged", f"{path} is damaged or alien; such files are removed")
            return None
        return contents

    # Writing, in a thread of its own.

    def _write_all(self) -> None:
        """Write blocks as they come, and remove the oldest ones, until the end."""
        size = self._make_room()
        while (key := self._queue.get()) is not None:
            contents = self._waiting[key]
            if time.monotonic() >= self._paused:
                size += self._write(key, contents)
            there = os.path.exists(self._path(key))
            with self._lock:
                self._known |= {key} if there else set()
                del self._waiting[key]
                self._queued -= len(contents)
            if size > self.most:
                size = self._make_room()

    def _write(self, key: bytes, contents: Contents) -> int:
        """Write a block's file; return the bytes that it takes."""
        path = self._path(key)
        if os.path.exists(path):
            return 0
        part = f"{path}.{os.getpid()}.{threading.get_ident()}.part"
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            with open(part, "wb") as file:
                file.write(header_of(key, contents))
                file.write(contents)
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(part)
            self._paused = time.monotonic() + PAUSE_S
            self._say(
                "write",
                f"{self.root} takes no more cache blocks ({error.strerror}); it is tried again every {PAUSE_S:g} s",
            )
            return 0
        return HEADER + len(contents)

    def _make_room(self) -> int:
        """Remove the files that were read longest ago, if all take more than the limit; return the bytes that remain.

        Files of other processes count too; who removes the same at the same time does no harm.
        """
        files = sorted(self._files())
        size, removed = sum(each for _, each, _ in files), 0
        least = size if size <= self.most else LEFT * self.most
        while removed < len(files) and size > least:
            _, each, path = files[removed]
            with suppress(OSError):
                os.unlink(path)
            size, removed = size - each, removed + 1
        left = map(self._key, (path for *_, path in files[removed:]))
        with self._lock:
            self._known = {key for key in left if key is not None}
        return size

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield when each block's file was read last, its bytes, and its path; remove parts that were left behind."""
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = f"{folder}/{name}"
                with suppress(OSError):
                    about = os.stat(path)
                    if name.endswith(SUFFIX):
                        yield about.st_mtime, about.st_size, path
                    elif name.endswith(".part") and time.time() - about.st_mtime > STALE_S:  # fmt: skip
                        os.unlink(path)

    def _say(self, kind: str, line: str) -> None:
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        self.warn(line)


def header_of(key: bytes, contents: Contents) -> bytes:
    """Return the first bytes of a block's file: key and hash, by which a reader notices a damaged or wrong file.
    ``contents``: the block's bytes, which follow in the file. ``key``: the block's key.
    """
    return MAGIC + key + blake2b(contents, digest_size=HASH).digest()
