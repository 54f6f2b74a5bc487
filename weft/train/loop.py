"""The run: everything between ``weft train`` and its last checkpoint, on every rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from weft.checkpoint.base import base_of_run
from weft.checkpoint.checkpoints import Checkpoints
from weft.checkpoint.lease import Lease
from weft.checkpoint.levels import check_hosts, open_levels
from weft.checkpoint.state import Progress
from weft.checkpoint.storage import Storage
from weft.checkpoint.weights import starting_values
from weft.data.loader import Loader
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.train.optim import learning_rate
from weft.train.recorder import Recorder
from weft.train.runs import checkpoint_size, open_run, resume_run
from weft.train.setup import Job, assemble
from weft.train.step import StepResult, evaluate
from weft.train.stepper import Stepper, build_stepper

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


@dataclass
class Signals:
    """SIGINT and SIGTERM ask the run to stop after the current step; a second SIGINT ends it at once."""

    received: int = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    @contextmanager
    def watch(self) -> Iterator[Signals]:
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train(job: Job, mesh: Mesh, out: Path | None = None, resume: str | None = None) -> Outcome:
    """Train to the end of the recipe, of the data, or to a signal; save, and say how it went. Runs on every rank."""
    recipe, tokenizer = job.recipe, job.corpus.tokenizer
    with ExitStack() as stack:
        lease = stack.enter_context(Lease())
        run = mesh.on_main(lambda: open_run(recipe, out, resume, lease, checkpoint_size(job)))
        check_hosts(run.levels, mesh.layout.world, int(os.environ.get("LOCAL_WORLD_SIZE", mesh.layout.world)))
        values = starting_values(recipe, job.shape) if run.fresh or job.shape.adapter else None
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
        signals = stack.enter_context(Signals().watch())
        recorder = stack.enter_context(Recorder(job, mesh, run.folder, resumed.progress, about))
        resumed.report(recorder)
        checkpoints = stack.enter_context(Checkpoints(
            run.levels, state, resumed.progress, about, tokenizer.files(), job.shape, mesh, recorder,
            strict=recipe.checkpoint.on_error == "stop", timeout=recipe.train.timeout,
        ))  # fmt: skip
        stepper = build_stepper(model, state, mesh, recipe.optimizer, checkpoints.wait_for_copy)
        loop = Loop(job, mesh, model, state, stepper, resumed.progress, recorder, checkpoints, signals, lease)
        loop.run()
    loop.check_fruitful()
    interrupted = (signals.received or signal.SIGTERM) if loop.stopped else 0
    return Outcome(run.folder, checkpoints.last, resumed.progress, loop.validations, interrupted)


@dataclass
class Loop:
    """Data, step, agree, record, save: over and over, until the recipe is done, the data ends or a rank wants to stop.

    ``begun`` counts steps; those that are final are in ``progress``. ``fruitless`` are the last ones that were skipped.
    """

    job: Job
    mesh: Mesh
    model: Transformer
    state: State
    stepper: Stepper
    progress: Progress
    recorder: Recorder
    checkpoints: Checkpoints
    signals: Signals
    lease: Lease
    validations: list[float] = field(default_factory=list)
    stopped: bool = False
    fruitless: int = 0

    def __post_init__(self) -> None:
        corpus, recipe = self.job.corpus, self.job.recipe
        self.steps, self.batch, self.begun = recipe.train.steps, recipe.train.batch, self.progress.step
        self.loader = self.job.loader(corpus.train, self.mesh)
        self.held_out: Loader | None = None
        if corpus.validation is not None and recipe.validation.every:
            self.held_out = self.job.loader(corpus.validation, self.mesh)

    def run(self) -> None:
        if not self.progress.step:
            self.validate()
        self.recorder.restart_clock()
        while self.begun < self.steps and not self.ending:
            self.lease.check()
            results = self.recorder.watch(self.begun, self.take_step)
            if results is None:
                self.recorder.event(f"the data ended after {self.position:,} samples")
                break
            self.begun += 1
            to_save, to_validate = self.checkpoints.due(self.begun), self.validation_due(self.begun)
            self.stopped = any(result.stop for result in results)
            if to_save or to_validate or self.stopped or self.begun == self.steps:
                results += self.stepper.finish()
            self.account(results)
            self.recorder.end_step()
            self.checkpoints.poll()
            if to_validate:
                self.validate()
            if to_save and not self.ending:
                self.checkpoints.save(to_save)
            if to_validate or to_save:
                self.recorder.restart_clock()
        self.end()

    def take_step(self) -> list[StepResult] | None:
        """Fetch the next batches and take a step with them; the results that are final now, or None past the end."""
        with self.recorder.fetching():
            batches = self.loader.step(self.position)
        if batches is None:
            return None
        lr = learning_rate(self.job.recipe.optimizer, self.begun, self.steps)
        return self.stepper.step(batches, lr, self.signals.received > 0)

    def account(self, results: list[StepResult]) -> None:
        """Count and record the steps that have become final."""
        self.recorder.lap(results)
        for result in results:
            lr = learning_rate(self.job.recipe.optimizer, self.progress.step, self.steps)
            self.progress.advance(self.batch, result.tokens, not result.skipped)
            self.fruitless = self.fruitless + 1 if result.skipped else 0
            self.stopped = self.stopped or result.stop
            self.recorder.step(result, lr)

    def validate(self) -> None:
        if self.held_out is None:
            return
        steps = (self.held_out.step(i * self.batch) for i in range(self.job.recipe.validation.batches))
        self.validations.append(evaluate(self.model, self.state, filter(None, steps), self.mesh))
        self.recorder.validation(self.validations[-1])

    def end(self) -> None:
        """Make the last steps final, validate, save, and say why the run ends."""
        self.account(self.stepper.finish())
        if summary := self.stepper.summary():
            self.recorder.event(summary)
        if self.stopped:
            received = self.signals.received
            self.recorder.event(f"stopped by {signal.Signals(received).name if received else 'another rank'}")
        elif not self.validation_due(self.progress.step):
            self.validate()
        # A broken model must not push a whole one out.
        self.checkpoints.finish(save=self.fruitless < FRUITLESS)

    @property
    def position(self) -> int:
        """The first sample of the next step."""
        return self.progress.position + (self.begun - self.progress.step) * self.batch

    @property
    def ending(self) -> bool:
        return self.stopped or self.fruitless >= FRUITLESS

    def validation_due(self, step: int) -> bool:
        every = self.job.recipe.validation.every
        return bool(every) and step % every == 0

    def check_fruitful(self) -> None:
        """Raise :class:`WeftError` if the last steps were all skipped."""
        if self.fruitless >= FRUITLESS:
            raise WeftError(
                f"loss or gradient norm were not finite in {self.fruitless} steps in a row, which changed nothing; "
                f"ended at step {self.progress.step}, without saving: lower optimizer.lr, lengthen optimizer.warmup, "
                "or look at the data and the weights it began with"
            )
