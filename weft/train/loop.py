"""The run: everything between ``weft train`` and its last checkpoint, on every rank."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.checkpoint.best import Best, read_best
from weft.checkpoint.levels import open_levels
from weft.checkpoint.run_checkpoints import Checkpoints
from weft.data.order import marks
from weft.errors import WeftError
from weft.layout.mesh import Mesh, from_all
from weft.observe.metrics import read_metrics
from weft.train.build_step import build_step
from weft.train.callbacks import Callbacks, Running
from weft.train.evaluation import VALIDATION, Evaluation
from weft.train.guard import Guard, Regroup
from weft.train.opening import (
    build_state,
    lowest_so_far,
    nothing_left,
    open_folders,
    opening_notes,
    with_reference,
)
from weft.train.recorder import Recorder
from weft.train.rule_optimizer import learning_rate
from weft.train.setup import Job

if TYPE_CHECKING:
    from weft.checkpoint.lease import Lease
    from weft.checkpoint.run_state import Progress
    from weft.checkpoint.storage import Storage
    from weft.recipe import Recipe
    from weft.train.lowest_loss import LowestLoss
    from weft.train.step import Step
    from weft.train.step_values import StepResult

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

    @property
    def best(self) -> Best:
        """The lowest validation loss, after which step that was, and with ``keep_best`` the checkpoint of it."""
        return read_best(self.run)

    def metrics(self, kind: str = "train") -> list[dict[str, Any]]:
        """The records of a ``kind`` (``train``, ``validation``, ...) as they are in ``metrics.jsonl``, by step."""
        return read_metrics(self.run).get(kind, [])


class Ending(NamedTuple):
    """How a run has ended for one rank.

    ``outcome`` is None if others have brought the run to its end. ``concludes``: this rank is to write the report.
    """

    recipe: Recipe
    outcome: Outcome | None
    concludes: bool


def train(
    job: Job,
    mesh: Mesh,
    out: Path | None = None,
    resume: str | None = None,
    guard: Guard | None = None,
) -> Outcome:
    """Train to the end of the recipe, of the data, or to a signal; save, and say how it went. Runs on every rank.

    ``guard`` (default: one for ``out`` and ``resume``) opens the run and is told of every step; with one that survives
    the loss of ranks, :class:`Regroup` may be raised.
    """
    recipe, guard = job.recipe, guard or Guard(out, resume)
    if mesh.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    with ExitStack() as stack:
        lease = stack.enter_context(guard.lease())
        run = open_folders(job, mesh, guard, lease)
        job, notes = with_reference(job, mesh)
        recorder: Recorder  # which there is by the first pass
        model, state = build_state(
            job, mesh, run,
            passed=lambda done, of: recorder.passes(done, of),
            report=lambda chosen: recorder.activations(chosen),
        )  # fmt: skip
        resumed = guard.fill(run, job, state, mesh)
        progress, steps = resumed.progress, job.steps(resumed.progress)
        about = job.about | {"steps": steps}
        mesh.on_main(lambda: open_levels(run.levels, run.folder, run.fresh))
        known, lowest, note = lowest_so_far(job, mesh, run, progress.step)
        signals = stack.enter_context(guard.signals())
        recorder = stack.enter_context(Recorder(job, mesh, run.folder, progress, about))
        resumed.report(recorder)
        for text in (*notes, note, *opening_notes(job, mesh, state, steps)):
            if text:
                recorder.event(text)
        checkpoints = stack.enter_context(Checkpoints(
            run.levels, state, progress, about, job.files, job.shape, mesh, recorder, run.folder, known,
            strict=recipe.checkpoint.on_error == "stop", timeout=recipe.train.timeout,
        ))  # fmt: skip

        def before_update() -> None:
            checkpoints.wait_for_copy()
            guard.before_update()

        presence = stack.enter_context(guard.presence(mesh, recipe))
        if presence is not None:
            from weft.train.islands import put_in_ring

            if said := put_in_ring(presence.streams, state, recipe.sync):
                recorder.event(said)
        step = build_step(
            model, state, mesh, recipe, before_update, presence=presence, begun=progress.step, report=recorder.report,
        )  # fmt: skip
        evaluation = Evaluation(
            job, mesh, model, state, recorder, before_update, lambda: bool(signals), guard.validations
        )  # fmt: skip
        running = Running(recipe, run.folder, mesh, model, state, progress, recorder)
        callbacks = Callbacks(recipe.callbacks, running)
        guard.begin(state, mesh, resumed, recorder)
        if progress.step >= steps and not (run.fresh or run.in_memory):
            recorder.event(nothing_left(job, progress.step))
        loop = Loop(
            job, mesh, steps, step, progress, recorder, checkpoints, evaluation, callbacks, signals, lease, guard,
            lowest, again=run.in_memory,
        )  # fmt: skip
        loop.run()
    loop.check_fruitful()
    interrupted = [signal.SIGTERM, *signals][-1] if loop.stopped else 0
    return Outcome(
        run.folder, checkpoints.last, progress, evaluation.validations, interrupted
    )


@dataclass
class Loop:
    """Data, step, agree, record, save: over and over, until the recipe is done, the data ends or a rank wants to stop.

    ``steps``: of the whole run. ``begun`` counts the steps that have begun; those whose results are final are in
    ``progress``. ``fruitless`` counts how many of the last steps in a row were skipped. ``again``: the run goes on from
    the memory of ranks, and the evaluation and the checkpoint that were due after its last step may not have been made.
    ``enough``: why the run ends early, if the validation loss gets no lower.
    """

    job: Job
    mesh: Mesh
    steps: int
    step: Step
    progress: Progress
    recorder: Recorder
    checkpoints: Checkpoints
    evaluation: Evaluation
    callbacks: Callbacks
    signals: list[int]
    lease: Lease
    guard: Guard
    lowest: LowestLoss
    again: bool = False
    stopped: bool = False
    fruitless: int = 0
    enough: str = ""

    def __post_init__(self) -> None:
        corpus, recipe = self.job.corpus, self.job.recipe
        self.batch, self.first, self.begun = (
            recipe.train.batch,
            self.progress.step,
            self.progress.step,
        )
        self.loader = self.job.loader(corpus.train, self.mesh)

    def run(self) -> None:
        self.callbacks.call("start")
        if not self.progress.step:
            self.evaluate(self.evaluation.missing(0))
        elif self.again:
            self.evaluate(self.evaluation.due(self.progress.step))
            if to_save := self.checkpoints.due(self.progress.step):
                self.checkpoints.save(to_save)
            self.keep_best()
        self.look_back()
        self.recorder.restart_clock()
        while self.begun < self.steps and not self.ending:
            self.lease.check()
            with self.guard.step(self.begun + 1):
                results = self.recorder.watch(self.begun, self.take_step)
            self.begun += 1
            to_save, to_evaluate = (
                self.checkpoints.due(self.begun),
                self.evaluation.due(self.begun),
            )
            self.stopped = any(result.stop for result in results)
            last = self.stopped or self.begun == self.steps
            if to_save or to_evaluate or last or self.guard.due(self.begun):
                results += self.step.finish()
            self.account(results)
            for news in self.step.news():
                self.recorder.event(news)
            self.guard.after_step()
            self.recorder.end_step()
            self.checkpoints.poll()
            self.evaluate(to_evaluate)
            if to_save and not self.ending:
                self.checkpoints.save(to_save)
            self.keep_best()
            self.look_back()
            if to_evaluate or to_save:
                self.recorder.restart_clock()
        self.end()

    def take_step(self) -> list[StepResult]:
        """Fetch the next batches and take a step with them; the results that are final now."""
        with self.recorder.fetching():
            batches = self.loader.step(self.position)
        assert batches is not None  # the run has no more steps than its data
        lr = learning_rate(self.job.recipe.optimizer, self.begun, self.steps)
        return self.step.take(batches, lr, self.wants_to_stop)

    def account(self, results: list[StepResult]) -> None:
        """Count and record the steps that have become final."""
        self.recorder.lap(results)
        for result in results:
            lr = learning_rate(
                self.job.recipe.optimizer, self.progress.step, self.steps
            )
            self.check_samples(result)
            # The last step of an epoch has fewer samples; a run that is resumed for another epoch goes on behind them.
            left = max(
                0, (self.job.corpus.train.total or sys.maxsize) - self.progress.position
            )
            self.progress.advance(
                min(self.batch, left), result.tokens, not result.skipped
            )
            self.fruitless = self.fruitless + 1 if result.skipped else 0
            self.stopped = self.stopped or result.stop
            self.recorder.step(result, lr)
            self.callbacks.call("after_step", result)

    def check_samples(self, result: StepResult) -> None:
        """Raise :class:`WeftError` if the next final step has not seen each of its samples once, and no other."""
        due = self.loader.island_samples(self.progress.position)
        if result.samples not in (None, (len(due), int(marks(due).sum()))):
            raise WeftError(
                f"step {self.progress.step + 1} has not seen its samples {due.start} to {due.stop - 1} once each; this "
                "is a defect of Weft: go on from the last checkpoint under another layout, and report it"
            )

    def evaluate(self, names: list[str]) -> None:
        if names:
            values = self.evaluation.run(names, self.progress.step)
            self.callbacks.call("after_evaluation", values)
            if VALIDATION in values:
                self.lowest.take(self.progress.step, values[VALIDATION])

    def keep_best(self) -> None:
        """Keep, or remember, the state that has been validated just now, if none was better."""
        if (best := self.lowest.news()) is None:
            return
        if self.job.recipe.validation.keep_best:
            self.checkpoints.save_best(best)
        else:
            self.checkpoints.note_best(best)

    def look_back(self) -> None:
        """End the run, and say why, if enough validations have brought nothing better."""
        if (
            self.begun < self.steps
            and not self.ending
            and (why := self.lowest.why_enough(self.progress.step))
        ):
            self.enough = why
            self.recorder.event(why)

    def end(self) -> None:
        """Make the last steps final, evaluate, save, and say why the run ends.

        Raises :class:`Regroup` if it does not end, but ranks were about to leave or to join.
        """
        self.account(self.step.finish())
        if self.stopped and self.regroups():
            if not self.guard.remembers:
                self.checkpoints.finish(save=True)
            raise Regroup
        if summary := self.step.summary():
            self.recorder.event(summary)
        if self.stopped and not self.complete():
            who = (
                signal.Signals(self.signals[-1]).name
                if self.signals
                else "another rank"
            )
            self.recorder.event(f"stopped by {who}")
        else:
            if self.first < self.begun == self.steps != self.job.recipe.train.steps:
                self.recorder.event(
                    f"the data ended after {self.job.corpus.train.total:,} samples"
                )
            self.evaluate(self.evaluation.missing(self.progress.step))
            self.keep_best()
        # A broken model must not push a whole one out.
        self.checkpoints.finish(save=self.fruitless < FRUITLESS)
        self.callbacks.running.checkpoint = self.checkpoints.last
        self.callbacks.call("end")

    def complete(self) -> bool:
        """Whether it was a callback that asked the run to stop, so that it ends as if it were complete. Collective."""
        wishes = from_all(
            (bool(self.signals), self.callbacks.running.stopping), self.mesh.step_group
        )
        whys = [why for _, why in wishes if why]
        if not whys or any(received for received, _ in wishes):
            return False
        self.stopped = False
        self.recorder.event(f"ended by a callback: {whys[0]}")
        return True

    def regroups(self) -> bool:
        """Whether the run stopped only for ranks that want to leave or to join, and is to go on. Collective."""
        return self.mesh.islands == 1 and not any(
            from_all(self.wants_to_end, self.mesh.step_group)
        )

    @property
    def wants_to_end(self) -> bool:
        return bool(self.signals or self.callbacks.running.stopping)

    @property
    def wants_to_stop(self) -> bool:
        return self.wants_to_end or self.guard.regroup

    @property
    def position(self) -> int:
        """The first sample of the next step."""
        return self.progress.position + (self.begun - self.progress.step) * self.batch

    @property
    def ending(self) -> bool:
        return self.stopped or self.fruitless >= FRUITLESS or bool(self.enough)

    def check_fruitful(self) -> None:
        """Raise :class:`WeftError` if the last steps were all skipped."""
        if self.fruitless >= FRUITLESS:
            raise WeftError(
                f"loss or gradient norm were not finite in {self.fruitless} steps in a row, which changed nothing; "
                f"ended at step {self.progress.step}, without saving: lower optimizer.lr, lengthen optimizer.warmup, "
                "or look at the data and the weights it began with"
            )
