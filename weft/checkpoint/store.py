"""The small interface through which a run saves and loads. DCP is behind it; a commit is one rename.

A checkpoint is a folder ``step-000200`` with DCP's files and ``weft.json``: step, data position, recipe, layout, and
size and BLAKE2b of every other file. It is written under another name and renamed when everything is on disk, so a
folder of that name is whole unless its disk failed, which loading detects.
"""

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from weft.checkpoint.boxes import BoxTensor
from weft.errors import WeftError

FORMAT = 1
META = "weft.json"


#: A checkpoint's tensors by name, and what stands in its ``weft.json``.
Boxes = Mapping[str, BoxTensor]
Meta = dict[str, Any]


def save(root: Path, step: int, tensors: Boxes, meta: Meta, keep: int, extras: Callable[[Path], None]) -> Path:
    """Write ``root/step-NNNNNN`` from all ranks' boxes, then drop all but the ``keep`` newest. Collective.

    ``extras`` adds files (the tokenizer). Raises :class:`WeftError` on every rank if any rank could not write; the
    checkpoints that were there before are then untouched.
    """
    final, draft = root / f"step-{step:06d}", root / f".step-{step:06d}.part"
    main = not dist.is_initialized() or dist.get_rank() == 0
    problem = None
    if main:
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        except OSError as error:
            problem = f"cannot create {draft}: {error.strerror}"
    _agree(problem)
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(draft, single_file_per_rank=True))
    except (OSError, dcp.CheckpointException, RuntimeError) as error:
        problem = f"checkpoint at step {step} could not be written to {root}: {_cause(error)}"
    _agree(problem)
    if main:
        try:
            extras(draft)
            files = {f.name: [f.stat().st_size, _digest(f)] for f in sorted(draft.iterdir()) if f.is_file()}
            (draft / META).write_text(json.dumps({"format": FORMAT, "step": step, **meta, "files": files}, indent=1))
            for file in draft.iterdir():
                _sync(file)
            _sync(draft)
            if final.exists():
                shutil.rmtree(final)
            draft.rename(final)
            _sync(root)
            for old in committed(root)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            problem = f"checkpoint at step {step} could not be committed in {root}: {error.strerror}"
    _agree(problem)
    return final


def committed(root: Path) -> list[Path]:
    """Checkpoints under ``root``, oldest first."""
    return sorted(p for p in root.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and (p / META).is_file())


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """The contents of ``weft.json`` after checking that every file is there, whole and unchanged."""
    try:
        meta = json.loads((checkpoint / META).read_text())
        if meta["format"] != FORMAT:
            raise WeftError(f"{checkpoint} has checkpoint format {meta['format']}; this Weft reads format {FORMAT}")
        for name, (size, digest) in meta["files"].items():
            file = checkpoint / name
            if not file.is_file():
                raise WeftError(f"checkpoint {checkpoint} is damaged: {name} is missing")
            if file.stat().st_size != size or _digest(file) != digest:
                raise WeftError(f"checkpoint {checkpoint} is damaged: {name} is not what was saved")
    except FileNotFoundError:
        raise WeftError(f"{checkpoint} is not a checkpoint: it has no {META}") from None
    except (ValueError, KeyError, TypeError):
        raise WeftError(f"checkpoint {checkpoint} is damaged: {META} cannot be read") from None
    return meta


def find(path: Path, warn: Callable[[str], None]) -> tuple[Path, Meta]:
    """The checkpoint that ``path`` means: itself, or the last of a run that verifies; ``warn`` hears of others."""
    if (path / META).is_file():
        return path, read_meta(path)
    for checkpoint in reversed(committed(path / "checkpoints") or committed(path)):
        try:
            return checkpoint, read_meta(checkpoint)
        except WeftError as error:
            warn(f"{error}; trying the one before")
    raise WeftError(f"no checkpoint in {path}; give a run folder or a checkpoint (a folder with {META})")


def load(checkpoint: Path, tensors: Mapping[str, BoxTensor]) -> None:
    """Fill the boxes in place; collective. Raises :class:`WeftError` naming what does not fit."""
    reader = dcp.FileSystemReader(checkpoint)
    try:
        stored = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise WeftError(f"checkpoint {checkpoint} is damaged: its index cannot be read ({_cause(error)})") from None
    for name, box in tensors.items():
        if name not in stored:
            raise WeftError(f"checkpoint {checkpoint} has no tensor {name}: it is of another model")
        size = getattr(stored[name], "size", None)
        if size != box.logical_shape:
            found = f"{name} is {list(size or ())}, the model needs {list(box.logical_shape)}"
            raise WeftError(f"checkpoint {checkpoint}: {found}")
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.load(dict(tensors), storage_reader=reader)
    except (OSError, dcp.CheckpointException, RuntimeError) as error:
        raise WeftError(f"checkpoint {checkpoint} could not be read: {_cause(error)}") from None


def _agree(problem: str | None) -> None:
    """Raise the first rank's problem on all ranks, so that none goes on alone."""
    problems = [problem]
    if dist.is_initialized() and dist.get_world_size() > 1:
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    for text in filter(None, problems):
        raise WeftError(text)


def _cause(error: BaseException) -> str:
    """The innermost reason, in one line."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
