"""Where a run is written: its folder, the storage of its checkpoints, and the checkpoint that it resumes from.

These are checked before ranks are started; rank 0 then checks them again and leases them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from pydantic import ValidationError

from weft.checkpoint.address import open_storage
from weft.checkpoint.lease import FOLDER, Lease
from weft.checkpoint.levels import LevelStore, check_levels, levels_of
from weft.checkpoint.run_state import Progress, load_state
from weft.checkpoint.storage import LocalStorage, Storage, StorageError
from weft.checkpoint.store import (
    PLACES,
    candidates,
    checkpoint_places,
    committed_checkpoints,
    load_newest,
    open_checkpoint,
    step_of,
)
from weft.errors import UsageError, WeftError, why_unwritten
from weft.layout.mesh import Mesh, from_all
from weft.observe.run_metrics import FILE
from weft.paths import real_path
from weft.recipe import RUNS, Optimizer, Recipe
from weft.shapes.parameters import learns, parameters
from weft.train.rule_optimizer import rate_jump, slot_bytes
from weft.train.setup import Job, prepare

if TYPE_CHECKING:
    from weft.checkpoint.load import StoredCheckpoint
    from weft.checkpoint.run_checkpoints import Listener
    from weft.parallel.state import State


@dataclass
class Run:
    """The storage of a run, chosen by :func:`open_run`.

    ``folder``: the run's folder. ``sources``: folders or addresses of checkpoints that the run may resume from; empty
    for a new run. ``levels``: the levels of its checkpoints, each a storage with an interval of its own. ``in_memory``:
    whether the run resumes from the state in other ranks' memory.
    """

    folder: Path
    sources: list[str]
    levels: list[LevelStore]
    in_memory: bool = False

    @property
    def fresh(self) -> bool:
        return not self.sources

    @property
    def places(self) -> list[Storage]:
        """Storage that only one run at a time may write: the run's folder, and checkpoint levels outside memory."""
        return [
            LocalStorage(self.folder),
            *(level.place for level in self.levels if not level.in_memory),
        ]


def prepare_run(recipe: Recipe, out: Path | None, resume: str | None) -> Job | None:
    """Prepare a job (:func:`weft.train.setup.prepare`) and check the storage of its run before ranks start.

    ``out``: the folder to create. ``resume``: the run or checkpoint to continue. Checks whether both can be used,
    whether the storage can be written, and whether the newest checkpoint is of this model. A recipe with ``[control]``,
    ``[saddle]`` or simulated clients has no data to prepare, and the result is None.
    """
    recipe = as_recorded(recipe, out, resume)
    with Lease() as lease:
        run = open_run(recipe, out, resume, lease, 0)
    if recipe.trains_no_language_model or (
        recipe.federated and recipe.federated.simulates
    ):
        return None
    job = prepare(recipe)
    if not run.fresh:
        checkpoint = open_checkpoint(
            candidates(*run.sources, warn=lambda text: None)[0]
        )
        if _is_readable(checkpoint):
            _check(checkpoint, job)
    return job


def as_recorded(recipe: Recipe, out: Path | None, resume: str | None) -> Recipe:
    """Return ``recipe`` with the defaults that held when the run to be resumed was started.

    Two defaults have changed: the warm-up was 100 steps, and documents had no BOS token, before the setting
    ``data.bos`` existed. They are restored for a run that began before, unless the recipe sets them. ``out``: the
    folder to create. ``resume``: the run or checkpoint to continue; None: a new run, whose recipe is returned
    unchanged.
    """
    if resume is None or (
        recipe.data.bos != "auto" and recipe.optimizer.warmup is not None
    ):
        return recipe
    sources = _choose(recipe, out, resume)[1]
    stored = (
        open_checkpoint(place)
        for place in (candidates(*sources, warn=lambda text: None) if sources else ())
    )
    checkpoint = next(filter(_is_readable, stored), None)
    if checkpoint is None or "data" not in checkpoint.meta:
        return recipe
    recorded = checkpoint.meta.get("recipe", {})
    if recorded.get("data", {}).get("bos", "prompts") != "prompts":
        return recipe
    data, optimizer = recipe.data, recipe.optimizer
    if data.bos == "auto":
        data = data.model_copy(update={"bos": "prompts"})
    if optimizer.warmup is None:
        optimizer = optimizer.model_copy(
            update={"warmup": recorded.get("optimizer", {}).get("warmup")}
        )
    return recipe.model_copy(update={"data": data, "optimizer": optimizer})


def _check(checkpoint: StoredCheckpoint, job: Job) -> None:
    """Refuse to resume from a checkpoint of another model, of an adapter on another base, or of another tokenizer."""
    from weft.checkpoint.resume_check import check_resumable, check_same_base, run_base

    check_resumable(checkpoint, job.shape, job.corpus.tokenizer, job.recipe.optimizer)
    check_same_base(checkpoint, run_base(job.recipe, job.shape))


def _is_readable(checkpoint: StoredCheckpoint) -> bool:
    """Return whether the metadata of a checkpoint can be read."""
    try:
        return bool(checkpoint.meta)
    except WeftError:
        return False


def open_run(
    recipe: Recipe, out: Path | None, resume: str | None, lease: Lease, size: int
) -> Run:
    """Choose and lease the folder of a run and the storage of its checkpoints. Returns both, as a :class:`Run`.

    ``out``: the folder to create. ``resume``: the run or checkpoint to continue. ``lease``: the lease that is taken, so
    that no other run writes there. ``size``: estimated bytes of a checkpoint.
    """
    while True:
        folder, sources = _choose(recipe, out, resume)
        run = Run(folder, sources, levels_of(recipe.checkpoint, folder))
        try:
            lease.take(run.places, new=out is None and resume is None)
        except (
            FileExistsError
        ):  # of several runs that start at once, another took this name
            continue
        except StorageError as error:
            raise WeftError(
                f"this run cannot write where it should: {error}; choose another place (--out)"
            ) from None
        check_levels(run.levels, size, run.fresh)
        return run


def island_folder(island: int) -> str:
    """Return the name of the folder in which ``island``, a number above 0, has its run, inside the first island's."""
    return f"island-{island}"


def open_for_island(
    mesh: Mesh, open_first: Callable[[], Run], recipe: Recipe, lease: Lease, size: int
) -> Run:
    """Choose and lease the folder and the storage of this island's run, and return them. Called on its first rank.

    The first island calls ``open_first`` for this. All other islands get a folder inside the first island's folder.
    ``lease``: the lease that is taken on the island's folder. ``size``: estimated bytes of a checkpoint. Raises
    :class:`WeftError` if the first island cannot open its run.
    """
    if mesh.island_store is None:
        return open_first()
    name = island_folder(mesh.island)
    if mesh.island == 0:
        shared: dict[str, Any] = {}
        try:
            run = open_first()
            shared = {"folder": str(run.folder), "sources": run.sources}
            return run
        finally:
            mesh.island_store.set("weft/run", json.dumps(shared))
    shared = json.loads(mesh.island_store.get("weft/run"))
    if not shared:
        raise WeftError("the first island cannot open the run")
    folder = Path(shared["folder"]) / name
    run = Run(folder, shared["sources"], levels_of(recipe.checkpoint, folder, name))
    lease.take(run.places, new=False)
    check_levels(run.levels, size, run.fresh)
    return run


def counterpart_checkpoint(run: Run, name: str, island_store: dist.Store) -> str:
    """Return the address of the checkpoint from which the island ``name`` resumes.

    This is the island's own checkpoint of the step at which the first island resumes. It is searched in the storage
    where this run saves, and beside the first island's checkpoint, which may belong to a run in another folder. If the
    island has none, the result is the first island's checkpoint. ``island_store``: key-value store of all islands.
    """
    first = open_storage(island_store.get("weft/resumed").decode())
    beside, _, _ = str(first).rpartition("/")
    places = [
        open_storage(f"{beside}/{name}"),
        open_storage(f"{beside.removesuffix('/checkpoints')}/{name}/checkpoints"),
        *(level.place for level in run.levels),
    ]
    own = [
        place
        for storage in places
        for place in committed_checkpoints(storage)
        if step_of(place) == step_of(first)
    ]
    # of a step that was reached twice, the same time
    own.sort(key=lambda place: place.name == first.name)
    return str((own or [first])[-1])


@dataclass
class Resumed:
    """Result of resuming a run.

    ``progress``: steps and samples at which the run continues. ``notes``: lines to print. ``loads``: for each rank, the
    bytes read and the seconds of each stage of loading, by name.
    """

    progress: Progress
    notes: list[str]
    loads: list[dict[str, float]] = field(default_factory=list)

    def report(self, listener: Listener) -> None:
        for rank, load in enumerate(self.loads):
            listener.log("loaded", rank=rank, **load)
        for note in self.notes:
            listener.event(note)


def resume_run(run: Run, job: Job, state: State, mesh: Mesh) -> Resumed:
    """Load into ``state`` the newest checkpoint that is whole on all ranks; a new run loads none. Collective.

    The notes of the result name the loaded checkpoint, the incomplete ones, and where the recipe differs from the
    recipe in the checkpoint.
    """
    notes = list(job.notes)
    if run.fresh:
        return Resumed(Progress(), notes)
    island_store, sources = mesh.island_store, run.sources
    if island_store is not None and mesh.island:
        name = island_folder(mesh.island)
        sources = [
            mesh.on_main(lambda: counterpart_checkpoint(run, name, island_store))
        ]
        if f"/{name}/" not in sources[0]:
            notes.append(
                f"{name} has no checkpoint of this step, and takes that of the first island"
            )
    checkpoint, progress = load_newest(
        sources,
        lambda checkpoint: load_state(checkpoint, state, mesh.step_group),
        notes.append,
        lambda checkpoint: _check(checkpoint, job),
        mesh.step_group,
    )
    if island_store is not None and mesh.speaks:
        island_store.set("weft/resumed", str(checkpoint.storage))
    notes.append(f"resumed from {checkpoint} at step {progress.step}")
    from weft.checkpoint.resume_check import other_differences

    fingerprint = job.corpus.fingerprint
    if len(job.corpus.train.streams) > 1:
        from weft.train.mix_run import resume_mix

        fingerprint = resume_mix(job.corpus, checkpoint.meta, progress)
    differences = other_differences(checkpoint, job.recipe, fingerprint)
    notes += [f"resumed with {difference}" for difference in differences]
    notes += filter(None, [_jump_of_rate(checkpoint, job, progress)])
    opening = job.corpus.tokenizer.opening
    if job.recipe.data.bos == "prompts" and opening:
        notes.append(
            f"documents go on without {job.corpus.tokenizer.name_of(opening[0])}, as the run began, though prompts "
            "have it (data.bos = 'prompts'); new runs write it, and data.bos = true does so from here on"
        )
    for level in run.levels:
        level.resume_from(checkpoint.storage)
    stages = {f"{stage}_s": spent for stage, spent in checkpoint.seconds.items()}
    return Resumed(
        progress,
        notes,
        from_all({"bytes": checkpoint.bytes_read, **stages}, mesh.step_group),
    )


def _jump_of_rate(checkpoint: StoredCheckpoint, job: Job, progress: Progress) -> str:
    """Return a note if the learning rate is not what the run had planned when ``checkpoint`` was saved."""
    recorded = checkpoint.meta["recipe"]
    planned = checkpoint.meta.get("steps") or recorded["train"]["steps"]
    try:
        before = Optimizer.model_validate(recorded["optimizer"])
    except ValidationError:  # settings of another version, which other lines name
        return ""
    return rate_jump(
        before, job.recipe.optimizer, progress.step, planned, job.steps(progress)
    )


def checkpoint_size(job: Job) -> int:
    """Return the estimated bytes of a checkpoint: all parameters, and the moments of trained ones.

    With an adapter, only trained parameters are counted, because the checkpoint leaves out the base model.
    """
    train, wide = job.recipe.train, 8 if job.recipe.train.dtype == "float64" else 4
    moments, frozen = (
        slot_bytes(job.recipe.optimizer, wide),
        0 if job.shape.adapter else wide,
    )
    size = round(sum(
        p.numel * (wide + moments if learns(p.name, job.shape, train.freeze) else frozen) for p in parameters(job.shape)
    ))  # fmt: skip
    if job.recipe.rl is not None:
        from weft.train.beside_size import beside_bytes

        size += beside_bytes(job, checkpoint_size)
    return size


def _choose(
    recipe: Recipe, out: Path | None, resume: str | None
) -> tuple[Path, list[str]]:
    """Return the folder of a run, and the places from which it may resume; none for a new run."""
    folder = RUNS / recipe.name
    try:
        misplaced = out is not None and out.exists() and not out.is_dir()
    except OSError as error:
        raise UsageError(
            f"cannot write --out {out}: {why_unwritten(error, 'choose another folder')}"
        ) from None
    if misplaced:
        raise UsageError(f"--out {out} is not a folder; choose another")
    if resume is not None and resume != "auto":
        candidates(resume)  # before what would raise an error of the system
        if Path(resume).is_symlink():  # RUN/best, which goes on to mean others
            resume = str(real_path(resume))
        path = Path(resume)
        own = next(
            (p for p in (path, *list(path.parents)[:2]) if (p / FILE).is_file()), None
        )
        return out or own or unused_folder(folder), [resume]
    if resume == "auto":
        saved = [
            p
            for p in folder.parent.glob(f"{recipe.name}*")
            if committed_checkpoints(p / "checkpoints") or (p / PLACES).exists()
        ]
        run = out or max(saved, key=lambda p: p.stat().st_mtime, default=folder)
        outside = [str(level.place) for level in levels_of(recipe.checkpoint, run)]
        sources = [
            str(run),
            *(place for place in outside if place != str(run / "checkpoints")),
        ]
        return run, sources if any(
            committed_checkpoints(place)
            for source in sources
            for place in checkpoint_places(source)
        ) else []
    if out is not None:
        if out.exists() and any(p.name != FOLDER for p in out.iterdir()):
            raise UsageError(
                f"--out {out} already holds something; choose another folder or add --resume auto"
            )
        return out, []
    return unused_folder(folder), []


def unused_folder(folder: Path) -> Path:
    """Return ``folder`` if it does not exist, else the first of ``folder-2``, ``folder-3``, ... that does not exist."""
    run, number = folder, 1
    while run.exists():
        number += 1
        run = folder.with_name(f"{folder.name}-{number}")
    return run
