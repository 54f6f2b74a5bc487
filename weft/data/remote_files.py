"""Files of remote sources: their listing, and the local paths under which they are downloaded when they are read.

A file of ``s3://bucket/docs/*.jsonl`` has a path in the folder ``weft-downloads`` of the cache. Nothing is there until
the file is read (:func:`downloaded`). Then it stays, as long as the limit of all downloads allows, of which those that
were not used for longest are removed. So a corpus may be larger than the disk.
"""

from __future__ import annotations

import fcntl
import fnmatch
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from glob import escape
from itertools import product
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple, TypeVar

from weft.cache import DOWNLOADS, cache_root, digest, locked
from weft.data.remote_store import RemoteFile, RemoteProblem, RemoteStore
from weft.errors import UsageError, WeftError
from weft.recipe.masked import masked_address
from weft.registry import find

T = TypeVar("T")

#: Seconds in which a download must go on, and the pauses between attempts, in seconds.
PATIENCE_S, PAUSE_S, LONGEST_PAUSE_S = 60.0, 0.2, 10.0
#: Seconds of a download between lines about it.
SILENT_S = 15.0
#: Seconds for which a listing counts as new.
FRESH_S = 60.0
#: Bytes of the disk that downloads leave free.
ROOM = 1 << 30
LISTING = ".listing.json"
#: Names of remote places by the scheme of an address, where they differ.
_PLACES = {"http": "https", "s3": "bucket"}


class RemoteListing(NamedTuple):
    """Files of a remote source: the local ``folder`` that they are downloaded to, and the remote file of each local
    path.

    ``whole``: whether the address names files, one by one or by a pattern, and not a folder.
    """

    folder: Path
    files: dict[Path, RemoteFile]
    whole: bool


class FileState(NamedTuple):
    """Size of a remote file in bytes, and a number that changes when its content does."""

    size: int
    changed: int


def downloads_limit() -> int:
    """Return how many bytes all downloads together may take on disk: ``$WEFT_DOWNLOADS_GB`` gigabytes, 50 by
    default.
    """
    asked = os.environ.get("WEFT_DOWNLOADS_GB", "50")
    try:
        if float(asked) <= 0:
            raise ValueError
    except ValueError:
        raise UsageError(
            f"WEFT_DOWNLOADS_GB={asked!r} is no size; set the gigabytes that downloads may take, such as 200"
        ) from None
    return int(float(asked) * 1e9)


def list_remote(address: str) -> RemoteListing:
    """Return the files of the remote source at ``address``: a file, a folder or a pattern with ``*``, ``**``, ``?``.

    ``{000..099}`` and ``{a,b}`` stand for several names, which need not be listed. If the remote place does not answer,
    its last listing is used, and a line tells the user. Raises :class:`WeftError` if there is no listing either, or no
    file matches.
    """
    base, pattern = _split(address)
    key = digest(masked_address(base))  # the same files with a renewed password
    folder = cache_root() / DOWNLOADS / key
    with_braces = tuple(_expanded(pattern))
    fresh = int(time.monotonic() / FRESH_S)
    names: dict[str, RemoteFile] = {}
    whole = bool(pattern)
    for name in with_braces:
        listed = _listed(base, name, str(folder), fresh)
        exact = [file for file in listed if file.name == name]
        below = [file for file in listed if file.name.startswith(f"{name}/")]
        if exact or _is_pattern(name):
            matching = exact or [f for f in listed if _matches(f.name, name)]
        else:
            matching, whole = (below if name else list(listed)), False
        if not matching:
            raise WeftError(
                f"data source {masked_address(address)} has no file {_without_query(base, name)!r}; check "
                "'path'"
            )
        names |= {file.name: file for file in matching}
    files = {folder / _local(name): file for name, file in sorted(names.items())}
    if len(files) < len(names):
        raise WeftError(
            f"data source {masked_address(address)} has several files that differ behind '?' alone; give each its own "
            "source"
        )
    return RemoteListing(folder, files, whole)


def _split(address: str) -> tuple[str, str]:
    """Split an address into the folder that is listed, and what is behind it.

    The folder is at least the host, the bucket or the data set.
    """
    scheme, _, path = address.partition("://")
    web = scheme.startswith("http")
    path, mark, query = path.partition("?") if web else (path, "", "")
    parts = path.split("/")
    least = 3 if scheme == "hf" else 1
    plain = next(
        (i for i, part in enumerate(parts) if re.search(r"[*?\[{]", part)),
        len(parts) - 1,
    )
    cut = max(least, plain)
    pattern = "/".join(parts[cut:]).strip("/") + mark + query
    return f"{scheme}://{'/'.join(parts[:cut])}", pattern


def _expanded(pattern: str) -> Iterator[str]:
    """Yield the names for which braces stand: ``{00..11}`` counts, and ``{a,b}`` lists."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] if i % 2 == 0 else _choices(part) for i, part in enumerate(parts)]
    for combination in product(*choices):
        yield "".join(combination)


def _choices(braces: str) -> list[str]:
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", braces):
        first, last = int(match[1]), int(match[2])
        width = len(match[1]) if match[1].startswith("0") else 0
        return [f"{number:0{width}}" for number in range(first, last + 1)]
    return braces.split(",")


def _is_pattern(name: str) -> bool:
    return any(mark in name.partition("?")[0] for mark in "*[")


def _matches(name: str, pattern: str) -> bool:
    """Return whether ``name`` matches, in which ``*`` stays within a folder and ``**`` does not."""
    rules = re.split(r"(\*\*/?|\*|\?)", pattern)
    known = {"**": ".*", "**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    return bool(
        re.fullmatch("".join(known.get(rule) or _literal(rule) for rule in rules), name)
    )


def _literal(rule: str) -> str:
    """Return a part of a pattern without stars as a regular expression: plain text, and sets in brackets."""
    return (
        fnmatch.translate(rule).removeprefix("(?s:").removesuffix(r")\Z")
        if "[" in rule
        else re.escape(rule)
    )


def _local(name: str) -> str:
    """Return the path of a remote file below its folder, without the query of its address."""
    path = name.partition("?")[0]
    if ".." in path.split("/") or path.startswith("/"):
        raise WeftError(
            f"a remote file is called {name!r}, which no folder here can hold"
        )
    return path


def _without_query(base: str, name: str) -> str:
    """Return the name of a file in the remote place ``base`` without its query, which may be secret."""
    return name.partition("?")[0] if base.startswith("http") else name


def open_store(base: str) -> RemoteStore:
    """Return an object that lists and reads the files of the remote place with the address ``base``, such as a bucket.

    Raises :class:`UsageError` if its scheme is not known.
    """
    scheme = base.partition("://")[0]
    place = find("remote", _PLACES.get(scheme, scheme))
    store: RemoteStore = place.implementation(base)
    return store


@lru_cache(maxsize=256)
def _listed(base: str, name: str, folder: str, fresh: int) -> tuple[RemoteFile, ...]:
    """Return the files of a place, and keep them in ``folder``. ``fresh``: a number that changes with time."""
    file = Path(folder, LISTING)
    before = _read_listing(file)[1]
    try:
        files = _retried(
            lambda: open_store(base).list_files(name), f"list {masked_address(base)}"
        )
    except RemoteProblem as problem:
        known = [f for f in before.values() if _concerns(f.name, name)]
        if not (known and problem.again):
            raise
        sys.stderr.write(f"weft: {problem}; its last listing is used\n")
        return tuple(known)
    # a place that lists one file at a time keeps those that it has listed before
    kept = {k: f for k, f in before.items() if base.startswith("http")}
    every = kept | {_local(f.name): f for f in files}
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{LISTING}.{os.getpid()}")
    # signatures and passwords that downloads need are for this user alone
    secret = masked_address(base) != base or any(
        "?" in file.name for file in every.values()
    )
    draft.touch(0o600 if secret else 0o666)
    draft.write_text(json.dumps({"base": base, "files": every}))
    draft.rename(file)
    return tuple(files)


def _concerns(name: str, wanted: str) -> bool:
    return _matches(name, wanted) if _is_pattern(wanted) else name.startswith(wanted)


def _read_listing(file: Path) -> tuple[str, dict[str, RemoteFile]]:
    try:
        values = json.loads(file.read_text())
    except (FileNotFoundError, PermissionError):  # or another user's, with secrets
        return "", {}
    return values["base"], {k: RemoteFile(*f) for k, f in values["files"].items()}


@lru_cache(maxsize=64)
def _listing_of(folder: str, changed: int) -> tuple[str, dict[str, RemoteFile]]:
    return _read_listing(Path(folder, LISTING))


def remote_file(path: Path) -> tuple[str, RemoteFile]:
    """Find the remote file that is downloaded to the local ``path``. Returns its folder's address, and its description.

    Raises :class:`WeftError` if no listing has such a file.
    """
    at = path.parts.index(DOWNLOADS) + 2
    folder = Path(*path.parts[:at])
    try:
        changed = (folder / LISTING).stat().st_mtime_ns
        base, files = _listing_of(str(folder), changed)
        return base, files[str(path.relative_to(folder))]
    except (OSError, KeyError):
        raise WeftError(
            f"{path} is no file of a remote source that has been listed; start the command again"
        ) from None


def remote_state(path: Path) -> FileState:
    """Return the size of a remote file, and a number that changes when its content does, both from the stored listing
    of its source.

    ``path``: local path at which a download puts the file; the file need not be there yet. Raises :class:`WeftError` if
    no listing has the file.
    """
    _, file = remote_file(path)
    return FileState(max(0, file.size), int(digest(file.size, file.mark)[:12], 16))


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Download a remote file to its local ``path``, and keep the cache from removing it while the context lasts."""
    with ExitStack() as stack:
        while True:
            downloaded(path)
            try:
                stream = stack.enter_context(open(path, "rb"))
                fcntl.flock(stream, fcntl.LOCK_SH)
                if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                    break
            except FileNotFoundError:  # removed for another one in between
                continue
        yield


def downloaded(path: Path) -> Path:
    """Download a remote file to its local ``path`` unless it is there already, and return ``path``.

    An interrupted download is continued. Raises :class:`WeftError`, which names the file, if it cannot be read, has not
    the size that was listed, or has changed since.
    """
    base, file = remote_file(path)
    if _is_there(path, file):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        if not _is_there(path, file):
            path.unlink(missing_ok=True)
            _download(base, file, path)
    return path


def _is_there(path: Path, file: RemoteFile) -> bool:
    """Return whether ``path`` has the content of a remote file as it was listed, which then counts as used now."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return False
    stamp = _stamp_of(file)
    if state.st_mtime_ns != stamp or file.size not in (-1, state.st_size):
        return False
    os.utime(path, ns=(time.time_ns(), stamp))
    return True


def _stamp_of(file: RemoteFile) -> int:
    """Return the time of change, in nanoseconds, that a download gets: it tells of which listed content it is.

    The time of the last use is that of the last access.
    """
    return int(digest(file.size, file.mark)[:7], 16) * 2 * 10**9


def _download(base: str, file: RemoteFile, path: Path) -> None:
    """Download a file, from where its part ends. The part's name has its mark, so that it is of the same content."""
    part = path.with_name(f".{path.name}.{digest(file.size, file.mark)[:8]}.part")
    for older in path.parent.glob(f".{escape(path.name)}.*.part"):
        if older != part:
            older.unlink()
    store, name = open_store(base), f"{masked_address(base)}/{_local(file.name)}"
    make_room(file.size - (part.stat().st_size if part.exists() else 0), name)

    shown = time.monotonic()

    def show(size: int) -> None:
        """Write a line now and then."""
        nonlocal shown
        if time.monotonic() - shown >= SILENT_S:
            shown = time.monotonic()
            whole = f" of {file.size / 1e9:.3f}" if file.size >= 0 else ""
            sys.stderr.write(f"weft: downloads {name}: {size / 1e9:.3f}{whole} GB\n")

    def attempt() -> None:
        with open(part, "ab") as out:
            fcntl.flock(out, fcntl.LOCK_SH)  # so that nobody removes it
            size = out.tell()
            if file.size < size:  # also of a file whose size is not known
                out.truncate(0)
                size = 0
            if size != file.size:
                try:
                    for piece in store.read_from(file, size):
                        size += out.write(piece)
                        show(size)
                except RemoteProblem as problem:
                    if problem.changed:  # its pieces may be of both contents
                        out.truncate(0)
                    raise
        if file.size >= 0 and size != file.size:
            raise RemoteProblem(
                f"it has {size:,} bytes, and {file.size:,} when it was listed",
                again=size < file.size,
            )

    _retried(
        attempt, f"read {name}", lambda: part.stat().st_size if part.exists() else 0
    )
    os.utime(part, ns=(time.time_ns(), _stamp_of(file)))
    part.rename(path)


def _retried(
    attempt: Callable[[], T], doing: str, progress: Callable[[], int] = lambda: 0
) -> T:
    """Return what ``attempt`` returns, which is repeated as long as it may succeed and ``progress`` rises in time."""
    before, pause = progress(), PAUSE_S
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return attempt()
        except RemoteProblem as problem:
            now = progress()
            if now > before:
                before, pause, deadline = now, PAUSE_S, time.monotonic() + PATIENCE_S
            if not problem.again or time.monotonic() + pause > deadline:
                late = f" ({PATIENCE_S:.0f} s of attempts)" if problem.again else ""
                said = str(problem)
                raise RemoteProblem(
                    said
                    if doing.startswith("list")
                    else f"cannot {doing}: {said}{late}",
                    problem.again,
                ) from None
        except OSError as error:
            raise WeftError(
                f"cannot {doing} into the cache: {error.strerror or error}; set WEFT_CACHE to another folder"
            ) from None
        time.sleep(pause)
        pause = min(LONGEST_PAUSE_S, 2 * pause)


def make_room(size: int, name: str) -> None:
    """Remove downloads until there is room for ``size`` bytes of the file ``name``, the least recently used first.

    Downloads that a process is reading stay. Raises :class:`WeftError` if the disk still has no room for the file.
    """
    root = cache_root() / DOWNLOADS
    if size <= 0:
        return
    kept = sorted(_kept_downloads(root))
    limit, total = downloads_limit(), sum(size for _, size, _ in kept)
    for _, own, file in kept:
        free = shutil.disk_usage(root).free
        if total + size <= limit and free >= size + ROOM:
            break
        if _removed(file):
            total -= own
    if (free := shutil.disk_usage(root).free) < size:
        raise WeftError(
            f"{name} has {size / 1e9:.1f} GB, and the disk of {root} has {free / 1e9:.1f} GB left; set WEFT_CACHE to "
            "a folder on another disk"
        )


def _kept_downloads(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield the time of the last use, the size and the path of every download, whole or not."""
    for file in root.rglob("*"):
        if file.name.startswith(LISTING) or file.name.endswith(".lock"):
            continue
        try:
            state = file.stat()
        except FileNotFoundError:  # another process has removed it, or is done with it
            continue
        if S_ISREG(state.st_mode):
            yield state.st_atime, state.st_size, file


def _removed(file: Path) -> bool:
    """Remove a download that no process reads, and return whether it is gone."""
    try:
        with open(file, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
