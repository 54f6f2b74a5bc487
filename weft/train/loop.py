"""The loop of a run, on every rank."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.data.order import sample_hashes
from weft.data.read_so_far import count_read
from weft.errors import WeftError
from weft.layout.mesh import Mesh, from_all
from weft.train.evaluation import Evaluation
from weft.train.guard import Guard, Regroup
from weft.train.setup import Job
from weft.train.step_values import MOST_SKIPPED

if TYPE_CHECKING:
    from weft.checkpoint.lease import Lease
    from weft.checkpoint.levels import LevelStore
    from weft.checkpoint.run_checkpoints import Checkpoints
    from weft.checkpoint.run_state import Progress
    from weft.sync.presence import Presence
    from weft.train.callbacks import Callbacks
    from weft.train.lowest_loss import LowestLoss
    from weft.train.recorder import Recorder
    from weft.train.step import Step
    from weft.train.step_loader import StepLoader
    from weft.train.step_values import StepResult


@dataclass
class Loop:
    """The training loop of a rank: fetch data, take a step, record it, evaluate and save, until the run ends.

    A run ends when its steps or its data are used up, or when a rank asks for it. It also ends when
    :data:`MOST_SKIPPED` steps in a row were skipped, and when the validation loss no longer falls or is as low as the
    recipe asks for. If islands have losses of their own, an island with such a loss asks all islands to end the run.

    Attributes:
        ``job``: the checked recipe with its opened data.
        ``mesh``: this rank's position among the ranks of the run.
        ``step``: object that takes a training step.
        ``progress``: steps, samples and tokens whose results are final.
        ``begun``: number of steps that have begun; a step's result may become final only in a later step.
        ``recorder``: writes the run's records, and prints.
        ``checkpoints``: saves the state.
        ``evaluation``: runs the validation and the recipe's tasks.
        ``callbacks``: the recipe's callbacks.
        ``signals``: numbers of the received signals that ask the run to end.
        ``lease``: keeps other runs from writing to this run's folders.
        ``guard``: object that is called at every step, to keep the run going when ranks are lost.
        ``lowest``: the lowest validation loss so far.
        ``loader``: makes the batches of this rank.
        ``presence``: which islands take part; None if the run has no islands.
        ``again``: whether the run continues from the state in the ranks' memory, after ranks left or joined.
            Evaluations and checkpoints that were due after the last step are then run first.
        ``stopped``: whether some rank asks to end the run.
        ``skipped_in_a_row``: number of steps that were skipped since the last step that was not.
        ``enough``: why the run ends early, as if it were complete: because of its validation loss, as its samples have
            ended, or as a callback has asked; empty if it does not.
    """

    job: Job
    mesh: Mesh
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
    loader: StepLoader
    presence: Presence | None = None
    again: bool = False
    stopped: bool = False
    skipped_in_a_row: int = 0
    enough: str = ""

    def __post_init__(self) -> None:
        self.batch = self.job.recipe.train.batch
        self.first = self.begun = self.progress.step
        self.steps = self.job.steps(self.progress)
        if self.presence is not None:
            self.presence.wishes = self.wishes
            self.stopped = self.presence.ends is not None

    def run(self) -> None:
        """Train to the end of the run. Collective.

        Raises :class:`Regroup` if the run must go on with other ranks, because ranks are about to leave or to join.
        """
        self.callbacks.call("start")
        if not self.progress.step:
            self.evaluate_and_save(self.evaluation.missing(0), [])
        elif self.again:
            step = self.progress.step
            if self.is_complete():  # this island came as the others had ended
                self.step.conclude()
            self.evaluate_and_save(
                self.evaluation.due(step), self.checkpoints.due(step)
            )
        self.look_back()
        self.recorder.restart_clock()
        while self.begun < self.steps and not self.ending:
            self.lease.check()
            if not self.prepare_samples():
                break
            with self.guard.step(self.begun + 1):
                results = self.recorder.watch(self.begun, self.take_step)
            self.begun += 1
            to_evaluate = self.evaluation.due(self.begun)
            to_save = self.checkpoints.due(self.begun)
            self.stopped = any(result.stop for result in results)
            last = self.stopped or self.begun == self.steps
            if to_save or to_evaluate or last or self.guard.due(self.begun):
                results += self.step.finish()
            self.account(results)
            if self.is_complete():
                self.step.conclude()
            self.guard.after_step()
            self.recorder.end_step(self.step.news())
            self.checkpoints.poll()
            self.evaluate_and_save(to_evaluate, to_save)
            self.look_back()
            if to_evaluate or to_save:
                self.recorder.restart_clock()
        self.end()

    def evaluate_and_save(self, names: list[str], levels: Sequence[LevelStore]) -> None:
        """Run the evaluations ``names``, save a checkpoint to ``levels``, and record the best validation.

        ``names``: ``validation`` or names of tasks. ``levels``: the checkpoint levels (places for checkpoints, each
        with an interval of its own) that are due. If the run ends now, nothing is saved here, because :meth:`end` saves
        the last checkpoint.
        """
        self.evaluate(names)
        if levels and not self.ending:
            self.recorder.reading()
            self.checkpoints.save(levels)
        self.keep_best()

    def prepare_samples(self) -> bool:
        """Make the samples of the next step, if they do not exist yet; return whether the run goes on. Collective."""
        if not self.loader.is_ready(self.position):
            self.account(self.step.finish())  # they may come from the newest weights
            if not self.stopped and not self.loader.make_ready(self.position):
                self.enough = self.loader.over
                self.stopped = not self.enough
                if self.enough:
                    self.recorder.event(self.enough)
        return not self.ending

    def take_step(self) -> list[StepResult]:
        """Fetch the next batches and take a step. Returns the results that have become final, oldest first."""
        with self.recorder.fetching():
            batches = self.loader.step(self.position)
        assert batches is not None  # the run has no more steps than its data
        lr = self.job.learning_rate(self.begun, self.steps)
        return self.step.take(batches, lr, self.wants_to_stop)

    def account(self, results: list[StepResult]) -> None:
        """Count and record the steps whose ``results`` have become final, and call the hook ``after_step``."""
        self.recorder.lap(results)
        for result in results:
            lr = self.job.learning_rate(self.progress.step, self.steps)
            self.check_samples(result)
            # The last step of an epoch has fewer samples; a run that is resumed for another epoch goes on behind them.
            position = self.progress.position
            left = max(0, (self.job.corpus.train.total or sys.maxsize) - position)
            samples = range(position, position + min(self.batch, left))
            count_read(self.progress.loader, self.job.corpus.train, samples)
            self.progress.advance(len(samples), result.tokens, not result.skipped)
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
            self.stopped = self.stopped or result.stop
            self.recorder.step(result, lr)
            self.callbacks.call("after_step", result)

    def check_samples(self, result: StepResult) -> None:
        """Raise :class:`WeftError` unless the step of ``result`` has processed exactly the samples that were next in
        the data's order, each once.
        """
        due = self.loader.island_samples(self.progress.position)
        if result.samples not in (None, (len(due), int(sample_hashes(due).sum()))):
            raise WeftError(
                f"step {self.progress.step + 1} has not seen its samples {due.start} to {due.stop - 1} once each; this "
                "is a defect of Weft: go on from the last checkpoint under another layout, and report it"
            )

    def evaluate(self, names: list[str]) -> None:
        if names:
            values = self.evaluation.run(names, self.progress.step)
            self.callbacks.call("after_evaluation", values)
            if (loss := self.job.judged(values)) is not None:
                self.lowest.take(self.progress.step, loss)

    def keep_best(self) -> None:
        """Record the latest validation as the best one, if no earlier validation had a loss as low.

        With ``validation.keep_best`` a checkpoint of the state is saved as well.
        """
        if (best := self.lowest.news()) is None:
            return
        if self.job.recipe.validation.keep_best:
            self.checkpoints.save_best(best)
        else:
            self.checkpoints.note_best(best)

    def look_back(self) -> None:
        """End the run, and report why, if the validation loss has stopped falling or is as low as the recipe asks
        for.
        """
        if (
            self.begun < self.steps
            and not self.ending
            and (why := self.lowest.why_enough(self.progress.step))
        ):
            if self.presence is not None and not self.job.recipe.sync.of_gradients:
                # the others wait for this island: all end after the same step
                running = self.callbacks.running
                running.stopping = running.stopping or why
                return
            self.enough = why
            self.recorder.event(why)

    def end(self) -> None:
        """Make the last steps' results final, evaluate, save, and report why the run ends.

        Raises :class:`Regroup` if the run must go on with other ranks, because ranks are about to leave or to join.
        """
        self.account(self.step.finish())
        if self.stopped and self.regroups():
            if not self.guard.remembers:
                self.checkpoints.finish(save=True)
            raise Regroup
        if summary := self.step.summary():
            self.recorder.event(summary)
        if self.stopped and not self.ends_complete():
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
        self.recorder.reading()
        # A broken model must not push a whole one out.
        self.checkpoints.finish(save=self.skipped_in_a_row < MOST_SKIPPED)
        self.callbacks.running.checkpoint = self.checkpoints.last
        self.callbacks.call("end")

    def is_complete(self) -> bool:
        """Return whether the run ends now as a complete one. Collective."""
        return self.ends_complete() if self.stopped else self.begun == self.steps

    def ends_complete(self) -> bool:
        """Return whether a callback has asked to end the run, so that the run ends as if it were complete. Collective.

        Returns False if no callback has asked, or if a rank has also received a signal to end. Islands end alike.
        """
        wishes = self.wishes()
        if self.presence is not None:
            wishes = self.presence.all_wishes(wishes)
        whys = [why for _, why in wishes if why]
        if not whys or any(received for received, _ in wishes):
            return False
        self.stopped, self.enough = False, whys[0]
        self.recorder.event(whys[0])
        return True

    def wishes(self) -> list[tuple[bool, str]]:
        """Return for each rank of this island whether it has received a signal to end, and why the run is to end as if
        it were complete (empty if it is not). Collective.
        """
        wish = (bool(self.signals), self.callbacks.running.stopping)
        return from_all(wish, self.mesh.step_group)

    def regroups(self) -> bool:
        """Return whether the loop ends only because ranks leave or join, so that the run goes on with new process
        groups. Collective.

        Returns False if anything else has asked the run to end, and in a run of several islands.
        """
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
        """Index of the first sample of the next step, in the order of the training data."""
        return self.progress.position + (self.begun - self.progress.step) * self.batch

    @property
    def ending(self) -> bool:
        return (
            self.stopped or self.skipped_in_a_row >= MOST_SKIPPED or bool(self.enough)
        )

    def check_skipped(self) -> None:
        """Raise :class:`WeftError` if the last :data:`MOST_SKIPPED` steps were all skipped."""
        if self.skipped_in_a_row >= MOST_SKIPPED:
            raise WeftError(
                f"loss or gradient norm were not finite in {self.skipped_in_a_row} steps in a row, which changed "
                f"nothing; ended at step {self.progress.step}, without saving: lower optimizer.lr, lengthen "
                "optimizer.warmup, "
                "or look at the data and the weights it began with"
            )
