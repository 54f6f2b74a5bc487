"""Find a run's checkpoints, load the newest undamaged one, verify them, and delete old ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch.distributed as dist
from pydantic import ValidationError

from weft.checkpoint.address import Where, open_storage
from weft.checkpoint.boxes import ROOT, DamagedCheckpoint
from weft.checkpoint.storage import MissingObject, Storage, StorageError
from weft.errors import WeftError
from weft.layout.dims import extents
from weft.layout.layout import Layout
from weft.layout.mesh import from_all
from weft.plugins import check_model_plugin, load_plugins
from weft.recipe import ModelShape

if TYPE_CHECKING:
    from weft.checkpoint.format import StoredBlock
    from weft.checkpoint.load import StoredCheckpoint

T = TypeVar("T")

#: In a run folder: where the run keeps checkpoints besides its folder ``checkpoints``.
PLACES = "checkpoints.json"


def open_checkpoint(where: Where) -> StoredCheckpoint:
    """Open the checkpoint at ``where``, a storage or its address. Nothing is read yet."""
    from weft.checkpoint.load import StoredCheckpoint

    return StoredCheckpoint(open_storage(where))


def model_of(checkpoint: StoredCheckpoint) -> ModelShape:
    """Return the shape of the model in ``checkpoint``.

    Raises :class:`WeftError` if the checkpoint does not describe its model, or the model is that of a missing plugin.
    """
    try:
        shape = ModelShape.model_validate(checkpoint.meta["recipe"]["model"])
        if shape.kind:  # the model is the plugin's
            load_plugins(checkpoint.meta["recipe"]["plugins"])
            check_model_plugin(shape)
        return shape
    except (KeyError, TypeError, ValidationError):
        raise WeftError(f"{checkpoint} does not say which model it is of") from None
    except ValueError as error:
        raise WeftError(f"{checkpoint} is of a plugin's model: {error}") from None


def stored_files(checkpoint: StoredCheckpoint) -> dict[str, bytes]:
    """Read and verify the files beside the tensors of ``checkpoint``, such as the tokenizer's.

    Returns the contents by bare name, such as ``tokenizer.json``.
    """
    return {
        Path(name).name: checkpoint.file(name, *about)
        for name, about in checkpoint.meta["files"].items()
    }


def learned_length(checkpoint: StoredCheckpoint) -> int | None:
    """Return the length in tokens of the sequences that the run of ``checkpoint`` was trained on.

    Returns None if the run started from another model's weights, or the checkpoint was converted.
    """
    recipe = checkpoint.meta.get("recipe", {})
    if "data" not in checkpoint.meta or recipe.get("model", {}).get("from"):
        return None
    length: int | None = recipe.get("data", {}).get("seq_len")
    return length


def checkpoint_places(where: Where) -> list[Storage]:
    """Return the storages that may hold checkpoints of the run in folder ``where``.

    They are the subfolder ``checkpoints``, the folder itself, and the storages listed in the folder's file
    :data:`PLACES`. Raises :class:`WeftError` if that file is damaged.
    """
    place, listed = open_storage(where), []
    with suppress(MissingObject):
        try:
            listed = list(map(open_storage, json.loads(place.read(PLACES))["places"]))
        except (ValueError, KeyError, TypeError):
            raise WeftError(
                f"{place / PLACES}, the list of where the run has checkpoints, is damaged"
            ) from None
    return list(dict.fromkeys([place / "checkpoints", place, *listed]))


def committed_checkpoints(root: Where) -> list[Storage]:
    """Return the committed checkpoints directly under ``root``, in ascending order of their steps.

    ``root``: a storage or its address.
    """
    place = open_storage(root)
    return [place / name for name in _numbered(place) if place.holds(f"{name}/{ROOT}")]


def _numbered(root: Storage) -> list[str]:
    """Return the names of a run's checkpoints, oldest first: ``step-000200``, then ``step-000200-2`` of the second time
    that the run came to that step, and so on.
    """
    return sorted(
        (name for name in root.folders() if _number(name) is not None),
        key=lambda name: _number(name) or (),
    )


def _number(name: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"step-(\d+)(?:-(\d+))?", name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def step_of(place: Storage) -> int:
    """Return the step in the name of the checkpoint folder ``place``, such as 200 of ``step-000200``.

    Returns -1 if the name has no step.
    """
    return (_number(place.name) or (-1, 1))[0]


def new_name(taken: Collection[str], step: int) -> str:
    """Return a folder name for a checkpoint of step number ``step`` that is not among the names ``taken``."""
    name, number = f"step-{step:06d}", 1
    while name in taken:
        number += 1
        name = f"step-{step:06d}-{number}"
    return name


def check_files(checkpoint: StoredCheckpoint) -> None:
    """Verify a checkpoint without reading its tensors: manifests, other files, and the sizes of data files.

    Raises :class:`DamagedCheckpoint`, which names the damaged file.
    """
    for name, (size, xxh3) in checkpoint.meta["files"].items():
        checkpoint.file(name, size, xxh3)
    sizes = checkpoint.storage.list("data/")
    for block in checkpoint.all_blocks():
        if sizes.get(block.file, -1) < block.offset + block.size:
            what = "shorter than it should be" if block.file in sizes else "missing"
            raise checkpoint.damaged(f"{block.file} is {what} (tensor {block.tensor})")


def candidates(
    *where: Where, warn: Callable[[str], None] | None = None
) -> list[Storage]:
    """Return the checkpoints that can be loaded from ``where``, the highest step first.

    Each ``where`` is a checkpoint, or the folder of a run, which stands for all checkpoints of the run. If a run
    reached a step twice, the newer of its two checkpoints comes first. ``warn``: called with a line of text for every
    storage that cannot be read; None: such a storage is an error. Raises :class:`WeftError` if there is no checkpoint.
    """
    checkpoints: list[Storage] = []
    problems: list[StorageError] = []
    if len(where) == 1 and (place := open_storage(where[0])).holds(ROOT):
        return [place]
    for each in where:
        try:
            within = checkpoint_places(each)
        except StorageError as error:
            problems.append(error)
            continue
        for place in within:
            try:
                checkpoints += committed_checkpoints(place)
            except StorageError as error:
                problems.append(error)
    if problems and (warn is None or not checkpoints):
        raise problems[0]
    for problem in problems:
        assert warn is not None
        warn(f"{problem}; looking elsewhere")
    if not checkpoints:
        named, fix = (
            " and ".join(map(str, where)),
            f"give a run folder or a checkpoint (a folder with {ROOT})",
        )
        if len(where) == 1 and not _exists(open_storage(where[0])):
            raise WeftError(f"{named} does not exist; {fix}")
        raise WeftError(f"no checkpoint in {named}; {fix}")
    return sorted(
        dict.fromkeys(checkpoints), key=lambda p: _number(p.name) or (), reverse=True
    )


def is_new(place: Storage) -> bool:
    """Return whether the storage ``place`` is empty: it holds neither folders nor objects."""
    return not place.folders() and not place.list()


def _exists(place: Storage) -> bool:
    try:
        place.modified()
    except MissingObject:
        return False
    return True


def load_newest(
    where: Sequence[Where],
    load: Callable[[StoredCheckpoint], T],
    warn: Callable[[str], None],
    check: Callable[[StoredCheckpoint], object] = lambda checkpoint: None,
    group: dist.ProcessGroup | None = None,
) -> tuple[StoredCheckpoint, T]:
    """Load the newest undamaged checkpoint of the runs or checkpoints ``where``. Returns it and the result of ``load``.

    Collective over ``group`` (default: all ranks); all ranks load the same checkpoint. ``load(checkpoint)`` loads it on
    this rank. If ``load`` raises :class:`DamagedCheckpoint` or :class:`StorageError` on any rank, ``warn`` is called
    with the reason, and all ranks try the next older checkpoint. Other errors are raised. ``check(checkpoint)`` is
    called before ``load`` on the first rank alone; its :class:`WeftError` is raised on all ranks.
    """
    main = not dist.is_initialized() or dist.get_rank(group) == 0
    tried = candidates(*where, warn=warn)
    problem = ""
    for place in tried:
        checkpoint, results, problem, refusal = (
            open_checkpoint(place),
            list[T](),
            "",
            "",
        )
        try:
            checkpoint.meta  # noqa: B018
            if main:
                check_files(checkpoint)
                check(checkpoint)
        except (DamagedCheckpoint, StorageError) as error:
            problem = str(error)
        except WeftError as error:
            refusal = str(error)
        # Loading is collective: no rank may begin with it before all know that all can.
        if refusal := first_problem(refusal, group):
            raise WeftError(refusal)
        if not (problem := first_problem(problem, group)):
            try:
                results.append(load(checkpoint))
            except (DamagedCheckpoint, StorageError) as error:
                problem = str(error)
            if not (problem := first_problem(problem, group)):
                return checkpoint, results[0]
        if len(tried) == 1:
            raise WeftError(problem)
        warn(f"{problem}; trying the one before")
    raise WeftError(
        f"no checkpoint of {len(tried)} can be loaded; the last problem was: {problem}"
    )


def kept_checkpoints(
    checkpoints: Sequence[Storage],
    last: int,
    every: int = 0,
    scores: Mapping[int, float] | None = None,
) -> list[Storage]:
    """Return the checkpoints that must be kept when old ones are deleted.

    A checkpoint is kept if any of four conditions holds. It is among the newest ``last`` ones (at least 1). Its step is
    a multiple of ``every`` (0: no such condition). It has the lowest of ``scores``, the validation losses by step. It
    was committed most recently, which after a resume from an earlier step need not be the highest step. If several
    checkpoints have one step, only the newest of them counts for ``every`` and ``scores``. ``checkpoints``: all
    checkpoints, oldest first.
    """
    newest = {step_of(p): p for p in checkpoints}
    kept = (
        {
            *checkpoints[-last:],
            max(reversed(checkpoints), key=lambda p: p.modified(ROOT)),
        }
        if checkpoints
        else set()
    )
    kept |= {p for step, p in newest.items() if every and step % every == 0}
    if known := {
        step: score for step, score in (scores or {}).items() if step in newest
    }:
        kept.add(newest[min(known, key=lambda step: (known[step], -step))])
    return [p for p in checkpoints if p in kept]


class Pruned(NamedTuple):
    """Result of :func:`prune`.

    ``deleted``: checkpoints that were deleted, or in a dry run would be; ``damaged``: damaged checkpoints that were
    met.
    """

    deleted: list[Storage]
    damaged: list[Storage]


def prune(
    root: Where,
    keep: int,
    every: int = 0,
    scores: Mapping[int, float] | None = None,
    check: Callable[[Storage], object] = lambda place: check_files(
        open_checkpoint(place)
    ),
    dry_run: bool = False,
    is_own: Callable[[Storage], bool] = lambda place: True,
) -> Pruned:
    """Delete old checkpoints under ``root``, and folders of saves that were never committed.

    The newest undamaged checkpoint always stays. If all are damaged, no checkpoint is deleted. The root file is deleted
    first, so that no half-deleted checkpoint looks whole.

    Args:
        ``root``: storage of the checkpoints, or its address.
        ``keep``: number of newest checkpoints to keep; 0: delete no checkpoint.
        ``every``: checkpoints whose step is a multiple of it are kept, too; 0: none.
        ``scores``: validation losses by step; the checkpoint with the lowest is kept, too.
        ``check``: function that raises :class:`WeftError` if a checkpoint is damaged. The default verifies everything
            but the tensors' values.
        ``dry_run``: delete nothing.
        ``is_own``: function that returns False for checkpoints that are neither deleted nor counted.
    """
    place = open_storage(root)
    there = committed_checkpoints(place)
    # Whose each one is does not matter where all of them stay.
    checkpoints = [p for p in there if is_own(p)] if 0 < keep < len(there) else there
    kept = kept_checkpoints(checkpoints, keep, every, scores) if keep else checkpoints
    gone, damaged = [p for p in checkpoints if p not in kept], list[Storage]()
    for checkpoint in reversed(checkpoints if gone else []):
        try:
            check(checkpoint)
        except WeftError:
            damaged.append(checkpoint)
        else:
            gone = [p for p in gone if p != checkpoint]
            break
    else:
        gone = []
    if not dry_run:
        stale = [
            p
            for p in (place / name for name in _numbered(place))
            if p not in there and _abandoned(p, there)
        ]
        for old in [*gone, *stale]:
            old.delete([ROOT])
            old.clear()
    return Pruned(gone, damaged)


def _abandoned(place: Storage, checkpoints: Sequence[Storage]) -> bool:
    """Return whether a folder without a root belongs to a save that has failed, and not to one under way.

    A run saves one checkpoint at a time, so a save under way has written something since the last commit.
    """
    try:
        return bool(checkpoints) and place.modified() < max(
            p.modified(ROOT) for p in checkpoints
        )
    except MissingObject:  # something is being written or deleted right now
        return False


def verify(checkpoint: StoredCheckpoint) -> int:
    """Read and verify a whole checkpoint, including the heads of data files.

    Returns the number of bytes of blocks that were read. Raises :class:`DamagedCheckpoint`, which names the damaged
    file.
    """
    check_files(checkpoint)
    sizes, before = checkpoint.storage.list("data/"), checkpoint.bytes_read
    for about in checkpoint.meta["manifests"]:
        tree = json.loads(checkpoint.file(*about))
        if sizes.get(tree["file"], 0) != tree["size"]:
            raise checkpoint.damaged(f"{tree['file']} is longer than it should be")
    blocks = sorted(checkpoint.all_blocks(), key=lambda b: (b.file, b.offset))
    for _ in checkpoint.read_all(blocks):
        pass
    for file, of_file in groupby(blocks, key=lambda b: b.file):
        _check_head(checkpoint, file, list(of_file))
    return checkpoint.bytes_read - before


def _check_head(
    checkpoint: StoredCheckpoint, file: str, blocks: Sequence[StoredBlock]
) -> None:
    """Raise :class:`DamagedCheckpoint` unless a data file's head, for readers of safetensors, describes its blocks."""
    from weft.checkpoint.format import block_name

    head = bytearray(blocks[0].offset)
    checkpoint.storage.read_into(file, 0, memoryview(head))
    begin = 8 + int.from_bytes(head[:8], "little")
    try:
        table = json.loads(head[8:begin])
    except ValueError:
        table = None
    for b in blocks:
        wanted = {
            "dtype": checkpoint.tensors[b.tensor].dtype,
            "shape": list(extents(b.box)),
            "data_offsets": [b.offset - begin, b.offset - begin + b.size],
        }
        if (
            not isinstance(table, dict)
            or table.get(block_name(b.tensor, b.box)) != wanted
        ):
            raise checkpoint.damaged(
                f"the head of {file} is not what was saved (tensor {b.tensor})"
            )


def rewrite(source: StoredCheckpoint, target: Storage) -> None:
    """Write a copy of the checkpoint ``source`` with a single data file to the storage ``target``.

    Each block is verified when it is read. Raises :class:`DamagedCheckpoint` if a block differs from the saved bytes.
    """
    from weft.checkpoint.writer import write_whole

    blocks = sorted(source.all_blocks(), key=lambda b: (b.tensor, b.box))
    meta = {
        k: v
        for k, v in source.meta.items()
        if k not in ("tensors", "places", "manifests", "files")
    }
    before = {"layout": meta.get("layout"), "world": meta.get("world")}
    meta |= {"layout": str(Layout()), "world": 1, "merged_from": before}
    boxes = [(b.tensor, b.box) for b in blocks]
    write_whole(
        target,
        boxes,
        source.tensors,
        lambda: source.read_all(blocks),
        meta,
        stored_files(source),
    )


def first_problem(problem: str, group: dist.ProcessGroup | None = None) -> str:
    """Return the first non-empty ``problem`` of the ranks of ``group``, or "" if all are empty. Collective.

    All ranks get the same result, so that an error of one rank can be raised on all. ``problem``: this rank's error
    message. ``group``: by default all ranks.
    """
    return next(filter(None, from_all(problem, group)), "")
