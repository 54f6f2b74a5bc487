"""Evaluation between steps: the loss on held-out data, and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from weft.train.step import evaluate

if TYPE_CHECKING:
    from weft.data.tasks import Answered
    from weft.layout.mesh import Mesh
    from weft.models.transformer import Transformer
    from weft.parallel.state import State
    from weft.train.recorder import Recorder
    from weft.train.setup import Job
    from weft.train.step_loader import AskedQuestions

#: The name of validation beside the names of tasks.
VALIDATION = "validation"


@dataclass
class Evaluation:
    """Runs the validation and the recipe's tasks after the steps at which they are due.

    With ``optimizer.use_ema`` the moving averages of the parameters replace the parameters during an evaluation.

    Attributes:
        ``job``: the checked recipe with its opened data.
        ``mesh``: this rank's position among the ranks of the run.
        ``model``: this rank's shard of the model.
        ``state``: this rank's shard of parameters and optimizer state.
        ``recorder``: object that writes the run's records, and prints.
        ``before_change``: function that is called before the averages replace the parameters. It returns when the state
            may change.
        ``interrupted``: function that returns whether this rank is asked to end the run. A task is given up on all
            ranks as soon as that is true on one rank.
        ``validations``: list to which each validation loss is appended.
        ``questions``: evaluations that the run's loader brings, such as the sampling of images, by the name of the
            task. Each takes the place of the opened task of that name.
    """

    job: Job
    mesh: Mesh
    model: Transformer
    state: State
    recorder: Recorder
    before_change: Callable[[], None]
    interrupted: Callable[[], bool]
    validations: list[float]
    questions: Mapping[str, AskedQuestions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._every = {task.name: task.every for task in self.job.tasks}
        self._every |= {name: each.every for name, each in self.questions.items()}
        self._held_out = None
        held_out, every = self.job.corpus.validation, self.job.recipe.validation.every
        if held_out is not None and every:
            self._held_out = self.job.loader(held_out, self.mesh)
            self._every = {VALIDATION: every} | self._every
        self._done: dict[str, int] = {}  # at which step each was evaluated last

    def due(self, step: int) -> list[str]:
        """Return the names of the evaluations that are due after ``step``: ``validation`` and names of tasks."""
        return [
            name for name, every in self._every.items() if every and step % every == 0
        ]

    def missing(self, step: int) -> list[str]:
        """Return the names of the evaluations that this process has not run after ``step``.

        The names are ``validation`` and those of tasks. An evaluation counts as run if its last run was after exactly
        this step.
        """
        return [name for name in self._every if self._done.get(name) != step]

    def run(self, names: list[str], step: int) -> dict[str, float]:
        """Run the evaluations ``names`` after ``step``. Collective.

        Returns by name the validation loss, and the accuracy of each task that was not given up.
        """
        values = {}
        with self._weights():
            for name in names:
                self._done[name] = step
                value = self._validate() if name == VALIDATION else self._ask(name)
                if value is not None:
                    values[name] = value
        return values

    @contextmanager
    def _weights(self) -> Iterator[None]:
        """Return a context in which the parameters are the averages, if ``optimizer.use_ema`` asks for these."""
        if not self.job.recipe.optimizer.use_ema:
            yield
            return
        self.before_change()
        with self.state.averaged():
            yield

    def _validate(self) -> float:
        assert self._held_out is not None
        recipe, total = self.job.recipe, self._held_out.order.total or 0
        every = range(0, total, recipe.train.batch)[: recipe.validation.batches or None]
        loss = evaluate(
            self.model,
            self.state,
            filter(None, map(self._held_out.step, every)),
            self.mesh,
        )
        self.validations.append(loss)
        self.recorder.validation(loss)
        if self.job.corpus.train.legs and not recipe.loss.of_pairs:
            from weft.train.source_losses import losses_by_source

            samples = range(0, min(total, every.stop if every else 0))
            named = losses_by_source(
                self.model, self.state, self.mesh, recipe, self.job.corpus, samples
            )
            self.recorder.log("mix", losses=named)
            self.recorder.reading()
        return loss

    def _ask(self, name: str) -> float | None:
        answered = (
            self.questions[name].ask() if name in self.questions else self._scored(name)
        )
        if answered is None:
            self.recorder.event(
                f"asked to stop: nobody waits for the answers to {name}"
            )
            return None
        self.recorder.task(name, answered)
        return answered.accuracy

    def _scored(self, name: str) -> Answered | None:
        """Return how the model answers the task ``name`` of known answers; None if a rank is asked to end the run."""
        from weft.train.score import scores

        task = next(task for task in self.job.tasks if task.name == name)
        rows, passes = self.job.recipe.rows_per_pass(self.mesh.layout)
        seq_len = self.job.recipe.data.seq_len
        ask = partial(
            scores,
            self.model,
            self.state,
            self.mesh,
            rows=rows,
            passes=passes,
            room=seq_len,
        )
        return task.answered(partial(ask, wanted=lambda: not self.interrupted()))
