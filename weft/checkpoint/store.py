"""The checkpoints of a run: which there are, which is the last that verifies, and which are kept."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.checkpoint.format import ROOT, DamagedCheckpoint
from weft.checkpoint.load import Checkpoint
from weft.checkpoint.storage import LocalStorage
from weft.errors import WeftError


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


def prune(root: Path, keep: int) -> list[Path]:
    """Delete all but the ``keep`` newest checkpoints of a run; what was deleted.

    The root goes first, so that no half-deleted checkpoint looks whole. Folders without a root are what is left of
    saves that were never committed: those older than the newest checkpoint go as well.
    """
    found = committed(root)
    gone = found[:-keep] if keep else []
    order = _folders(root)
    stale = [p for p in order[: order.index(found[-1])] if p not in found] if found else []
    for folder in [*gone, *stale]:
        storage = LocalStorage(folder)
        storage.delete([ROOT])
        storage.delete(storage.list())
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return gone


def agree(problem: str) -> str:
    """The first rank's problem on all ranks, so that none goes on alone. Collective."""
    problems = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")
