"""The checkpoints of a run: which there are, which is the last that verifies, and which are kept."""

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.checkpoint.format import ROOT, Block, DamagedCheckpoint, entry, header, manifest
from weft.checkpoint.load import Checkpoint
from weft.checkpoint.storage import LocalStorage, Storage, StorageError
from weft.checkpoint.writer import Commit, commit
from weft.errors import WeftError
from weft.layout.layout import Layout


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(LocalStorage(folder))


def extras(folder: Path, meta: dict[str, Any]) -> Path:
    """The folder inside a checkpoint that holds its other files, such as the tokenizer's."""
    return folder / Path(next(iter(meta["files"]), "files/none/")).parent


def committed(root: Path) -> list[Path]:
    """Checkpoints under ``root``, oldest first: the folders with a root."""
    return [p for p in _folders(root) if (p / ROOT).is_file()]


def _folders(root: Path) -> list[Path]:
    """``step-000200``, then ``step-000200-2`` if a run has come to that step a second time, and so on."""
    found = [(m, p) for p in root.glob("step-*") if (m := re.fullmatch(r"step-(\d+)(?:-(\d+))?", p.name))]
    return [p for *_, p in sorted((int(m[1]), int(m[2] or 1), p) for m, p in found)]


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(folder.name.split("-")[1])


def new_folder(root: Path, step: int) -> Path:
    """Where a checkpoint of ``step`` goes: what is committed is never written to again."""
    folder, number = root / f"step-{step:06d}", 1
    while (folder / ROOT).exists():
        number += 1
        folder = root / f"step-{step:06d}-{number}"
    return folder


def read_meta(folder: Path) -> dict[str, Any]:
    """The root of a checkpoint after checking that its manifests and files are whole and its data files there."""
    checkpoint = open_checkpoint(folder)
    for name, (size, xxh3) in checkpoint.meta["files"].items():
        checkpoint.file(name, size, xxh3)
    sizes = checkpoint.storage.list("data/")
    for block in checkpoint.all_blocks():
        if sizes.get(block.file, -1) < block.offset + block.size:
            what = "shorter than it should be" if block.file in sizes else "missing"
            raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {block.file} is {what} (tensor {block.tensor})")
    return checkpoint.meta


def candidates(path: Path) -> list[Path]:
    """The checkpoints that ``path`` may mean, best first: itself, or those of a run. Raises if there is none."""
    if (path / ROOT).is_file():
        return [path]
    found = committed(path / "checkpoints") or committed(path)
    if not found:
        raise WeftError(f"no checkpoint in {path}; give a run folder or a checkpoint (a folder with {ROOT})")
    return found[::-1]


def whole(path: Path, warn: Callable[[str], None]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The checkpoints that ``path`` may mean and that seem whole, best first; ``warn`` hears of the others.

    What a data file holds shows when it is read; go on to the next then. Raises after the last.
    """
    tried = candidates(path)
    problem = ""
    for folder in tried:
        try:
            meta = read_meta(folder)
        except WeftError as error:
            if len(tried) == 1:
                raise
            problem = str(error)
            warn(f"{problem}; trying the one before")
            continue
        yield folder, meta
    raise WeftError(f"no checkpoint in {path} can be loaded; the last problem was: {problem or 'damaged data'}")


def find(path: Path, warn: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that ``path`` means: itself, or the last of a run that verifies, data included."""
    for folder, meta in whole(path, warn):
        try:
            open_checkpoint(folder).verify()
        except DamagedCheckpoint as error:
            if folder == path:
                raise
            warn(f"{error}; trying the one before")
            continue
        return folder, meta
    raise AssertionError("whole() raises after the last")


def retained(found: Sequence[Path], last: int, every: int = 0, scores: Mapping[int, float] | None = None) -> list[Path]:
    """Which checkpoints (oldest first) a policy keeps: the ``last`` ones, every ``every`` steps, the best score.

    ``scores``: by step, the lower the better. Of several checkpoints of one step, only the newest can be kept for its
    step. What was committed last is always kept: a run that went back may save before what it had already reached.
    """
    newest = {step_of(p): p for p in found}
    kept = {*found[-last:], max(found, key=lambda p: (p / ROOT).stat().st_mtime_ns)} if found else set()
    kept |= {p for step, p in newest.items() if every and step % every == 0}
    if known := {step: score for step, score in (scores or {}).items() if step in newest}:
        kept.add(newest[min(known, key=lambda step: (known[step], -step))])
    return [p for p in found if p in kept]


def prune(
    root: Path,
    keep: int,
    every: int = 0,
    scores: Mapping[int, float] | None = None,
    check: Callable[[Path], object] | None = None,
    dry_run: bool = False,
) -> list[Path]:
    """Delete the checkpoints of a run that :func:`retained` does not keep; what was deleted. ``keep`` 0 deletes none.

    Never deletes the last that verifies: ``check`` raises :class:`WeftError` for one that does not (by default it
    looks at all but the tensors' values). If none does, nothing is deleted.

    The root goes first, so that no half-deleted checkpoint looks whole. Folders without a root that nobody has
    written to since the last commit are what is left of saves that were never committed: they go as well.
    """
    found = committed(root)
    kept = retained(found, keep, every, scores) if keep else found
    gone = [p for p in found if p not in kept]
    if gone:
        last = next((p for p in reversed(found) if _passes(p, check or read_meta)), None)
        gone = [p for p in gone if p != last] if last is not None else []
    if not dry_run:
        stale = [p for p in _folders(root) if p not in found and _abandoned(p, found)]
        for folder in [*gone, *stale]:
            LocalStorage(folder).delete([ROOT])
            try:
                shutil.rmtree(folder)
            except FileNotFoundError:  # someone else deletes it as well
                continue
            except OSError as error:
                raise StorageError(f"cannot delete {folder}: {error.strerror or error}") from error
    return gone


def _passes(folder: Path, check: Callable[[Path], object]) -> bool:
    try:
        check(folder)
    except WeftError:
        return False
    return True


def _abandoned(folder: Path, found: Sequence[Path]) -> bool:
    """A save under way began after the last commit, as a run saves one checkpoint at a time."""
    try:
        commits = [(p / ROOT).stat().st_mtime_ns for p in found]
        return bool(commits) and max(p.stat().st_mtime_ns for p in (folder, *folder.rglob("*"))) < max(commits)
    except FileNotFoundError:  # something is being written or deleted right now
        return False


def verify_all(checkpoint: Checkpoint) -> int:
    """Verify, and compare the heads of the data files, which only other programs read, with the manifests."""
    read = checkpoint.verify()
    heads: dict[str, tuple[int, Any]] = {}
    for b in checkpoint.all_blocks():
        if b.file not in heads:
            size = int.from_bytes(checkpoint.storage.read(b.file, 0, 8), "little")
            try:
                table = json.loads(checkpoint.storage.read(b.file, 8, size)) if size <= b.offset else None
            except ValueError:
                table = None
            heads[b.file] = 8 + size, table if isinstance(table, dict) else {}
        begin, table = heads[b.file]
        wanted = {
            "dtype": checkpoint.tensors[b.tensor].dtype,
            "shape": [hi - lo for lo, hi in b.box],
            "data_offsets": [b.offset - begin, b.offset - begin + b.size],
        }
        if table.get(entry(b.tensor, b.box)) != wanted:
            what = f"the head of {b.file} is not what was saved (tensor {b.tensor})"
            raise DamagedCheckpoint(f"checkpoint {checkpoint} is damaged: {what}")
    return read


def rewrite(source: Checkpoint, target: Storage) -> None:
    """Make the checkpoint again as one of a single rank: one data file with the blocks as they are, each verified."""
    blocks = sorted(source.all_blocks(), key=lambda b: (b.tensor, b.box))
    head, spans = header(((b.tensor, b.box) for b in blocks), source.tensors)
    attempt = secrets.token_hex(6)
    data, listed = f"data/{attempt}-00000.safetensors", f"manifest/{attempt}-00000.json"
    moved = [Block(b.tensor, b.box, data, at, size, b.digest) for b, (at, size) in zip(blocks, spans, strict=True)]
    files = {f"files/{attempt}/{Path(n).name}": source.file(n, *about) for n, about in source.meta["files"].items()}
    meta = {k: v for k, v in source.meta.items() if k not in ("tensors", "places", "manifests", "files")}
    before = {"layout": meta.get("layout"), "world": meta.get("world")}
    meta |= {"layout": str(Layout()), "world": 1, "merged_from": before}
    size = target.write(data, _stream(head, blocks, source))
    target.write(listed, [manifest(data, size, source.tensors, moved)])
    commit(target, Commit((listed,), meta, files, timeout=0))


def _stream(head: bytes, blocks: Sequence[Block], source: Checkpoint) -> Iterator[bytes | memoryview]:
    yield head
    for b in blocks:
        for _, data in source.read([b]):
            yield data


def agree(problem: str) -> str:
    """The first rank's problem on all ranks, so that none goes on alone. Collective."""
    problems = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")
