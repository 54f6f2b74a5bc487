"""What a run does before its first step: folders, model and state, the best so far, and what is to be said of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.checkpoint.best import Best, read_best
from weft.checkpoint.levels import check_hosts
from weft.data.cache import digest
from weft.layout.mesh import Mesh
from weft.models.widened import widened_note
from weft.run.signals import requests
from weft.train.lowest_loss import LowestLoss, comparable
from weft.train.rule_optimizer import warmup_note
from weft.train.runs import checkpoint_size, open_for_island
from weft.train.setup import Job, build_for_training

if TYPE_CHECKING:
    from weft.checkpoint.lease import Lease
    from weft.parallel.build import Built
    from weft.parallel.state import State
    from weft.train.guard import Guard
    from weft.train.runs import Run


def open_folders(job: Job, mesh: Mesh, guard: Guard, lease: Lease) -> Run:
    """Choose and lease the folder and the places of a run. Collective."""
    recipe, size = job.recipe, checkpoint_size(job)
    opened = partial(guard.open, recipe, lease, size)
    run = mesh.on_main(lambda: open_for_island(mesh, opened, recipe, lease, size))
    if mesh.speaks:
        requests.open_run(run.folder)
    world = recipe.layout.world
    check_hosts(run.levels, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    return run


def with_reference(job: Job, mesh: Mesh) -> tuple[Job, list[str]]:
    """The job with what its loss compares with, and what is to be said of that. Collective."""
    if not job.recipe.loss.of_pairs:
        return job, []
    from weft.train.reference import with_cached_reference

    return with_cached_reference(job, mesh)


def build_state(
    job: Job,
    mesh: Mesh,
    run: Run,
    passed: Callable[[int, int], None],
    report: Callable[[dict[str, Any]], None],
) -> Built:
    """The model and its state, with the values of ``model.from`` where the run begins with these. Collective.

    ``passed`` and ``report`` as of :func:`weft.train.setup.build_for_training`.
    """
    recipe, values = job.recipe, None
    from_origin = recipe.model.origin is not None and not run.in_memory
    if from_origin and (run.fresh or job.shape.adapter):
        # other runs need not import what reads all formats
        from weft.checkpoint.weights import starting_values

        values = starting_values(recipe, job.shape)
    return build_for_training(job.shape, mesh, recipe, values, passed, report)


def lowest_so_far(
    job: Job, mesh: Mesh, run: Run, step: int
) -> tuple[Best, LowestLoss, str]:
    """The best validation that the run remembers, the lowest loss that it can compare with, and what to say of that."""
    recipe, known = job.recipe, mesh.on_main(lambda: read_best(run.folder))
    data = digest(job.corpus.validated, recipe.validation.batches, recipe.train.batch)
    best, note = comparable(known, data, step)
    return known, LowestLoss(recipe.validation, best, data), note


def opening_notes(job: Job, mesh: Mesh, state: State, steps: int) -> Iterator[str]:
    """What is to be said of where the state rests, of slow precisions, and of a run too short for its warm-up."""
    yield state.tiers.note
    yield widened_note(job.recipe.train.dtype, mesh.device)
    yield warmup_note(job.recipe.optimizer, steps)


def nothing_left(job: Job, step: int) -> str:
    """What to say of a run that is resumed after its last step."""
    train, data = job.recipe.train, job.recipe.data
    limit = (
        f"train.steps = {train.steps}"
        if step >= train.steps > 0
        else f"data.epochs = {data.epochs}"
    )
    more = f"raise {limit.partition(' ')[0]} to train on"
    return f"the run is complete: it has taken {step} steps, and {limit} asks for no more; {more}"
