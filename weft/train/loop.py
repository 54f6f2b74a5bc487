"""The run: everything between ``weft train`` and its last checkpoint, on every rank."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.checkpoints import Checkpoints
from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import check_hosts, open_levels
from weft.checkpoint.same import base_of_run
from weft.checkpoint.state import Progress
from weft.checkpoint.storage import Storage
from weft.errors import WeftError
from weft.layout.mesh import Mesh, from_all
from weft.train.callbacks import Callbacks, Running
from weft.train.evaluation import Evaluation
from weft.train.optim import learning_rate
from weft.train.ranks import noted_signals
from weft.train.recorder import Recorder
from weft.train.reference import with_cached_reference
from weft.train.runs import checkpoint_size, open_run, resume_run
from weft.train.setup import Job, assemble
from weft.train.step import Stepper, StepResult
from weft.train.stepper import build_stepper

#: A run whose last so many steps were all skipped, because they were not finite, ends.
FRUITLESS = 5


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``interrupted`` is the signal that stopped it, 0 if it finished."""

    run: Path
    checkpoint: Storage | None
    progress: Progress
    validations: list[float]
    interrupted: int


def _interrupt(number: int) -> None:
    """SIGINT and SIGTERM ask the run to stop after the current step; another SIGINT ends it at once."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt


def train(job: Job, mesh: Mesh, out: Path | None = None, resume: str | None = None) -> Outcome:
    """Train to the end of the recipe, of the data, or to a signal; save, and say how it went. Runs on every rank."""
    recipe, tokenizer = job.recipe, job.corpus.tokenizer
    with ExitStack() as stack:
        lease = stack.enter_context(Lease())
        run = mesh.on_main(lambda: open_run(recipe, out, resume, lease, checkpoint_size(job)))
        check_hosts(run.levels, mesh.layout.world, int(os.environ.get("LOCAL_WORLD_SIZE", mesh.layout.world)))
        job, noted = with_cached_reference(job, mesh)
        values = None
        if recipe.model.origin is not None and (run.fresh or job.shape.adapter):
            from weft.checkpoint.weights import starting_values  # other runs need not import what reads all formats

            values = starting_values(recipe, job.shape)
        model, state = assemble(job.shape, mesh, recipe, values)
        resumed = resume_run(run, job, state, mesh)
        about = {
            "recipe": recipe.model_copy(update={"model": job.shape}).model_dump(mode="json"),
            "layout": str(mesh.layout),
            "world": mesh.layout.world,
            "data": job.corpus.fingerprint,
        }
        if base := base_of_run(recipe, job.shape):
            about["base"] = base
        mesh.on_main(lambda: open_levels(run.levels, run.folder, run.fresh))
        signals = stack.enter_context(noted_signals((signal.SIGINT, signal.SIGTERM), _interrupt))
        recorder = stack.enter_context(Recorder(job, mesh, run.folder, resumed.progress, about))
        resumed.report(recorder)
        if model.saved is not None:
            model.saved.report = recorder.activations
        for note in (*noted, state.tiers.note):
            if note:
                recorder.event(note)
        checkpoints = stack.enter_context(Checkpoints(
            run.levels, state, resumed.progress, about, tokenizer.files(), job.shape, mesh, recorder,
            strict=recipe.checkpoint.on_error == "stop", timeout=recipe.train.timeout,
        ))  # fmt: skip
        stepper = build_stepper(model, state, mesh, recipe.optimizer, checkpoints.wait_for_copy)
        evaluation = Evaluation(job, mesh, model, state, recorder, checkpoints.wait_for_copy, lambda: bool(signals))
        running = Running(recipe, run.folder, mesh, model, state, resumed.progress, recorder)
        callbacks = Callbacks(recipe.callbacks, running)
        loop = Loop(job, mesh, stepper, resumed.progress, recorder, checkpoints, evaluation, callbacks, signals, lease)
        loop.run()
    loop.check_fruitful()
    interrupted = [signal.SIGTERM, *signals][-1] if loop.stopped else 0
    return Outcome(run.folder, checkpoints.last, resumed.progress, evaluation.validations, interrupted)


@dataclass
class Loop:
    """Data, step, agree, record, save: over and over, until the recipe is done, the data ends or a rank wants to stop.

    ``begun`` counts steps; those that are final are in ``progress``. ``fruitless`` are the last ones that were skipped.
    """

    job: Job
    mesh: Mesh
    stepper: Stepper
    progress: Progress
    recorder: Recorder
    checkpoints: Checkpoints
    evaluation: Evaluation
    callbacks: Callbacks
    signals: list[int]
    lease: Lease
    stopped: bool = False
    fruitless: int = 0

    def __post_init__(self) -> None:
        corpus, recipe = self.job.corpus, self.job.recipe
        self.steps, self.batch, self.begun = recipe.train.steps, recipe.train.batch, self.progress.step
        self.loader = self.job.loader(corpus.train, self.mesh)

    def run(self) -> None:
        self.callbacks.call("start")
        if not self.progress.step:
            self.evaluate(self.evaluation.missing(0))
        self.recorder.restart_clock()
        while self.begun < self.steps and not self.ending:
            self.lease.check()
            results = self.recorder.watch(self.begun, self.take_step)
            if results is None:
                self.recorder.event(f"the data ended after {self.position:,} samples")
                break
            self.begun += 1
            to_save, to_evaluate = self.checkpoints.due(self.begun), self.evaluation.due(self.begun)
            self.stopped = any(result.stop for result in results)
            if to_save or to_evaluate or self.stopped or self.begun == self.steps:
                results += self.stepper.finish()
            self.account(results)
            self.recorder.end_step()
            self.checkpoints.poll()
            self.evaluate(to_evaluate)
            if to_save and not self.ending:
                self.checkpoints.save(to_save)
            if to_evaluate or to_save:
                self.recorder.restart_clock()
        self.end()

    def take_step(self) -> list[StepResult] | None:
        """Fetch the next batches and take a step with them; the results that are final now, or None past the end."""
        with self.recorder.fetching():
            batches = self.loader.step(self.position)
        if batches is None:
            return None
        lr = learning_rate(self.job.recipe.optimizer, self.begun, self.steps)
        return self.stepper.step(batches, lr, self.wants_to_stop)

    def account(self, results: list[StepResult]) -> None:
        """Count and record the steps that have become final."""
        self.recorder.lap(results)
        for result in results:
            lr = learning_rate(self.job.recipe.optimizer, self.progress.step, self.steps)
            self.progress.advance(self.batch, result.tokens, not result.skipped)
            self.fruitless = self.fruitless + 1 if result.skipped else 0
            self.stopped = self.stopped or result.stop
            self.recorder.step(result, lr)
            self.callbacks.call("after_step", result)

    def evaluate(self, names: list[str]) -> None:
        if names:
            self.callbacks.call("after_evaluation", self.evaluation.run(names, self.progress.step))

    def end(self) -> None:
        """Make the last steps final, evaluate, save, and say why the run ends."""
        self.account(self.stepper.finish())
        if summary := self.stepper.summary():
            self.recorder.event(summary)
        if self.stopped and not self.complete():
            who = signal.Signals(self.signals[-1]).name if self.signals else "another rank"
            self.recorder.event(f"stopped by {who}")
        else:
            self.evaluate(self.evaluation.missing(self.progress.step))
        # A broken model must not push a whole one out.
        self.checkpoints.finish(save=self.fruitless < FRUITLESS)
        self.callbacks.running.checkpoint = self.checkpoints.last
        self.callbacks.call("end")

    def complete(self) -> bool:
        """Whether a run that was to stop ends as if it were complete, as a callback of some rank asked. Collective."""
        wishes = from_all((bool(self.signals), self.callbacks.running.stopping), self.mesh.step_group)
        whys = [why for _, why in wishes if why]
        if not whys or any(received for received, _ in wishes):
            return False
        self.stopped = False
        self.recorder.event(f"ended by a callback: {whys[0]}")
        return True

    @property
    def wants_to_stop(self) -> bool:
        return bool(self.signals or self.callbacks.running.stopping)

    @property
    def position(self) -> int:
        """The first sample of the next step."""
        return self.progress.position + (self.begun - self.progress.step) * self.batch

    @property
    def ending(self) -> bool:
        return self.stopped or self.fruitless >= FRUITLESS

    def check_fruitful(self) -> None:
        """Raise :class:`WeftError` if the last steps were all skipped."""
        if self.fruitless >= FRUITLESS:
            raise WeftError(
                f"loss or gradient norm were not finite in {self.fruitless} steps in a row, which changed nothing; "
                f"ended at step {self.progress.step}, without saving: lower optimizer.lr, lengthen optimizer.warmup, "
                "or look at the data and the weights it began with"
            )
