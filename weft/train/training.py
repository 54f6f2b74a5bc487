"""A run from ``weft train`` to its last checkpoint, on every rank."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.checkpoint.best import Best, read_best
from weft.checkpoint.levels import check_hosts, open_levels
from weft.checkpoint.run_checkpoints import Checkpoints
from weft.data.read_so_far import begin_reading
from weft.models.widened import widened_note
from weft.observe.run_metrics import read_metrics
from weft.run.signals import requests
from weft.train.build_step import build_step
from weft.train.callbacks import Callbacks, Running
from weft.train.evaluation import Evaluation
from weft.train.guard import Guard
from weft.train.loop import Loop
from weft.train.lowest_loss import lowest_of_run
from weft.train.recorder import Recorder
from weft.train.rule_optimizer import floor_note, warmup_note
from weft.train.runs import checkpoint_size, open_for_island
from weft.train.setup import Job, build_for_training
from weft.train.step import StepContext

if TYPE_CHECKING:
    from weft.checkpoint.lease import Lease
    from weft.checkpoint.run_state import Progress
    from weft.checkpoint.storage import Storage
    from weft.layout.mesh import Mesh
    from weft.parallel.build import Built
    from weft.recipe import Recipe
    from weft.train.runs import Run


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        ``run``: the run's folder.
        ``checkpoint``: the last checkpoint, None if none was saved.
        ``progress``: numbers of steps, samples and tokens of the run.
        ``validations``: the validation losses of the run, in order.
        ``interrupted``: number of the signal that stopped the run, 0 if the run finished.
    """

    run: Path
    checkpoint: Storage | None
    progress: Progress
    validations: list[float]
    interrupted: int

    @property
    def best(self) -> Best:
        """The lowest validation loss of the run and its step, and with ``validation.keep_best`` also its checkpoint."""
        return read_best(self.run)

    def metrics(self, kind: str = "train") -> list[dict[str, Any]]:
        """Return the run's records of one ``kind`` in ``metrics.jsonl``, in the order of steps.

        ``kind``: ``run``, ``train``, ``validation``, ``event`` or another kind of record.
        """
        return read_metrics(self.run).get(kind, [])


class Ending(NamedTuple):
    """End of a run on one rank.

    ``recipe``: the recipe of the run. ``outcome``: the result of the run; None if other ranks finished the run without
    this rank. ``concludes``: whether this rank writes the report of the run; exactly one rank does.
    """

    recipe: Recipe
    outcome: Outcome | None
    concludes: bool


def train_job(
    job: Job,
    mesh: Mesh,
    out: Path | None = None,
    resume: str | None = None,
    guard: Guard | None = None,
) -> Outcome:
    """Train until the recipe's steps or the data end or a signal arrives, and save. Collective.

    ``out``: the folder to create. ``resume``: the run or checkpoint to continue. ``guard``: object that opens or
    resumes the run, fills its state from a checkpoint, and is called at every step. None: a :class:`Guard` for ``out``
    and ``resume``. A guard that survives the loss of ranks may raise :class:`weft.train.guard.Regroup`.
    """
    if mesh.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    with ExitStack() as stack:
        loop = open_loop(job, mesh, guard or Guard(out, resume), stack)
        loop.run()
    loop.check_skipped()
    return Outcome(
        loop.recorder.folder,
        loop.checkpoints.last,
        loop.progress,
        loop.evaluation.validations,
        [signal.SIGTERM, *loop.signals][-1] if loop.stopped else 0,
    )


def open_loop(job: Job, mesh: Mesh, guard: Guard, stack: ExitStack) -> Loop:
    """Open a run's folders, build and fill its state, and return its loop. Collective.

    ``guard``: opens a new run or resumes one, fills the state from a checkpoint, and is called at every step of the
    loop. ``stack``: closes what was opened for the loop, when the caller leaves it.
    """
    recipe, lease = job.recipe, stack.enter_context(guard.lease())
    run = open_folders(job, mesh, guard, lease)
    notes: list[str] = []
    if recipe.loss.of_pairs:
        from weft.train.reference import with_cached_reference

        job, notes = with_cached_reference(job, mesh)
    if mesh.layout.tp_shares:
        from weft.layout.rank_power import measured_line

        notes.append(measured_line(mesh.layout, mesh.device, job.shape.heads))
    recorder = Recorder(job, mesh, run.folder)
    built = guard.build(
        job, mesh, recorder, lambda: build_state(job, mesh, run, recorder)
    )
    model, state = built
    resumed = guard.fill(run, job, state, mesh)
    progress = resumed.progress
    if len(job.corpus.train.streams) > 1:
        from weft.train.mix_run import continued_mix

        corpus, mix_notes = continued_mix(job.corpus, recipe, progress)
        job = replace(job, corpus=corpus)
        recorder.continue_as(job)
        notes += mix_notes
    begin_reading(progress.loader, job.corpus, progress.position)
    mesh.on_main(lambda: open_levels(run.levels, run.folder, run.fresh))
    lowest = lowest_of_run(job, mesh, run.folder, progress.step)
    signals = stack.enter_context(guard.signals())

    stack.enter_context(recorder.recording(progress))
    resumed.report(recorder)
    report_notes(
        recorder,
        *notes,
        lowest.note,
        state.tiers.note,
        widened_note(recipe.train.dtype, mesh.device),
        warmup_note(recipe.optimizer, job.steps(progress)),
        floor_note(recipe.optimizer),
    )
    checkpoints = stack.enter_context(Checkpoints(
        run.levels, state, progress, job.facts(progress), job.files, job.shape, mesh, recorder, run.folder,
        lowest.known, strict=recipe.checkpoint.on_error == "stop", timeout=recipe.train.timeout,
        keeps_best=recipe.validation.keep_best,
    ))  # fmt: skip

    def before_update() -> None:
        checkpoints.wait_for_copy()
        guard.before_update()

    presence = stack.enter_context(guard.presence(mesh, recipe))
    if presence is not None:
        from weft.train.islands import put_in_ring

        report_notes(recorder, put_in_ring(presence.streams, state, recipe.sync))
    context = StepContext(
        model, state, mesh, before_update, presence=presence, begun=progress.step, report=recorder.report,
    )  # fmt: skip
    step = build_step(context, recipe)
    loader = job.training_loader(
        mesh, built, recorder, lambda: bool(signals), stack, progress.loader
    )
    evaluation = Evaluation(
        job, mesh, model, state, recorder, before_update, lambda: bool(signals), guard.validations,
        loader.questions(),
    )  # fmt: skip
    running = Running(recipe, run.folder, mesh, model, state, progress, recorder)
    callbacks = Callbacks(recipe.callbacks, running)
    guard.begin(state, mesh, resumed, recorder)
    if progress.step >= job.steps(progress) and not (run.fresh or run.in_memory):
        recorder.event(nothing_left(job, progress.step))
    return Loop(
        job, mesh, step, progress, recorder, checkpoints, evaluation, callbacks, signals, lease, guard, lowest,
        loader, presence, again=run.in_memory,
    )  # fmt: skip


def report_notes(recorder: Recorder, *notes: str) -> None:
    """Print the lines ``notes``, and record them as events by ``recorder``; empty lines are left out."""
    for note in filter(None, notes):
        recorder.event(note)


def open_folders(job: Job, mesh: Mesh, guard: Guard, lease: Lease) -> Run:
    """Choose and lease the run's folder and the storage of its checkpoints. Collective.

    ``guard``: chooses the folder; ``lease``: keeps other runs from writing there.
    """
    recipe, size = job.recipe, checkpoint_size(job)
    opened = partial(guard.open, recipe, lease, size)
    run = mesh.on_main(lambda: open_for_island(mesh, opened, recipe, lease, size))
    if mesh.speaks:
        requests.open_run(run.folder)
    world = recipe.layout.world
    check_hosts(run.levels, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    return run


def build_state(job: Job, mesh: Mesh, run: Run, recorder: Recorder) -> Built:
    """Build the model and its state. Collective. ``run``: the run's folder and storages. ``recorder``: writes the run's
    records.

    A new run from ``model.from`` starts with the values of that model; with an adapter, a resumed run reads its base
    again.
    """
    recipe, values = job.recipe, None
    from_origin = recipe.model.origin is not None and not run.in_memory
    if from_origin and (run.fresh or job.shape.adapter):
        # other runs need not import what reads all formats
        from weft.checkpoint.weights import starting_values

        values = starting_values(recipe, job.shape)
    return build_for_training(
        job.shape, mesh, recipe, values, recorder.passes, recorder.activations
    )


def nothing_left(job: Job, step: int) -> str:
    """Return the line that says that a resumed run has no steps left. ``step``: the number of steps it has taken."""
    train, data = job.recipe.train, job.recipe.data
    limit = (
        f"train.steps = {train.steps}"
        if step >= train.steps > 0
        else f"data.epochs = {data.epochs}"
    )
    more = f"raise {limit.partition(' ')[0]} to train on"
    return f"the run is complete: it has taken {step} steps, and {limit} asks for no more; {more}"
