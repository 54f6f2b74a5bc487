"""The folder of a data run: who writes to it, and files in it that appear whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from weft.errors import WeftError, why_unwritten

#: The folder of intermediate files in the folder that a data run writes to.
WORK = ".work"
#: How errors end that leave a run which can go on.
RESUME = "run the same command again: it goes on from there"


def content_digest(data: Any) -> str:
    """Return the digest of bytes, 32 hexadecimal characters (xxh3, 128 bits)."""
    return xxhash.xxh3_128_hexdigest(data)


def words_digest(*parts: Any) -> str:
    """Return a digest of values that JSON can hold. It is the same in every process."""
    return content_digest(json.dumps(parts, sort_keys=True).encode())


def write_atomically(path: Path, data: Any) -> None:
    """Write the bytes ``data`` to ``path`` so that a reader sees either all of them or no file, even if the process is
    killed.

    The folders of ``path`` are created. Raises :class:`WeftError`, which names the remedy, if the disk is full or the
    file cannot be written.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        draft.rename(path)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        with suppress(OSError):
            draft.unlink()


def cannot_write(path: Path, error: OSError) -> WeftError:
    """Return the error for a file of a data run that could not be written because of ``error``."""
    why = why_unwritten(error, "mend that")
    return WeftError(f"cannot write {path}: {why}, then {RESUME}")


def read_intact(path: Path, digest: str) -> bytes:
    """Return the content of the intermediate file ``path``, whose digest must be ``digest``.

    A damaged file is deleted, so that the next run makes it anew. Raises :class:`WeftError`, which names the file.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise WeftError(
            f"cannot read {path}: {error.strerror or error}; {RESUME}"
        ) from None
    if content_digest(data) != digest:
        with suppress(OSError):
            path.unlink()
        raise WeftError(
            f"{path} was damaged since it was written, and is deleted now; {RESUME}"
        )
    return data


def read_json_file(path: Path) -> Any:
    """Return the value in the JSON file ``path``; None if there is no such file or it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_json_file(path: Path, value: Any) -> None:
    """Write a value as JSON by :func:`write_atomically`. Keys are sorted, so that equal values give equal files."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False)
    write_atomically(path, (text + "\n").encode())


@contextmanager
def sole_writer(out: Path) -> Iterator[None]:
    """Create the folder ``out`` of a data run, and lock it against other writing processes while the context lasts.

    Raises :class:`WeftError` if another process writes to the folder, naming the process, or if the folder holds files
    that no data run has written.
    """
    work = out / WORK
    if out.is_dir() and not work.is_dir() and any(out.iterdir()):
        raise WeftError(
            f"--out {out} has files that 'weft data run' has not written; choose another folder"
        )
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("a+")
    except OSError as error:
        raise WeftError(
            f"cannot write --out {out}: {why_unwritten(error, 'choose another folder')}"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "of another host"
            raise WeftError(
                f"process {holder} writes to {out} now; wait until it has ended, or choose another --out"
            ) from None
        try:
            os.truncate(lock.fileno(), 0)
            # not through the file's buffer, which a full disk would have written again at its end
            os.write(lock.fileno(), str(os.getpid()).encode())
        except OSError as error:
            raise cannot_write(out, error) from None
        # what killed processes have left
        for draft in (*out.glob("*.part"), *work.rglob("*.part")):
            with suppress(OSError):
                draft.unlink()
        yield
        lock.truncate(0)
