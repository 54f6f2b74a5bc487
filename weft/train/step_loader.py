"""The interface of whoever makes the batches of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from weft.data.batch import Batch
    from weft.data.tasks import Answered


class AskedQuestions(NamedTuple):
    """Evaluation that a loader brings: questions that the trained model answers during the run.

    ``every``: steps between two evaluations; 0: only at the beginning and at the end of the run. ``ask``: function that
    runs the evaluation and returns its result; None if a rank is asked to end the run meanwhile.
    """

    every: int
    ask: Callable[[], Answered | None]


class RunRecords(Protocol):
    """Interface of a recorder to which loaders write records and lines about a run.

    ``folder``: the run's folder.
    """

    folder: Path

    def event(self, text: str) -> None:
        """Print the line ``text``, and record it as an event of the run."""

    def log(self, kind: str, step: int | None = None, /, **values: Any) -> None:
        """Write a record of the kind ``kind`` with ``values`` for ``step``, by default the last final step."""

    def reinforcement(self, phase: int, figures: Mapping[str, Any]) -> None:
        """Record and show ``figures`` of the rollout phase with the number ``phase``: numbers by name, such as
        ``reward``.
        """


class StepLoader(Protocol):
    """Interface of a loader: it makes the batches on which this rank trains, step by step."""

    @property
    def over(self) -> str:
        """Reason why no samples are left, once :meth:`make_ready` has returned False for that reason; before that, an
        empty text.
        """

    def is_ready(self, position: int) -> bool:
        """Return whether the samples of the step that starts at sample ``position`` exist already."""

    def make_ready(self, position: int) -> bool:
        """Make the samples of the step that starts at sample ``position``, which do not exist yet. Collective.

        The weights are those after all earlier steps. Returns False if a rank is asked to end the run meanwhile, or if
        there are no further samples.
        """

    def questions(self) -> Mapping[str, AskedQuestions]:
        """Return the evaluations that the loader brings, by the task's name; empty if it brings none."""

    def step(self, position: int) -> Sequence[Batch] | None:
        """Return the batches of the step that starts at sample ``position``, one per pass; None at the data's end."""

    def island_samples(self, position: int) -> range:
        """Return the indices, in the training order, of the samples that this rank's island uses in one step.

        ``position``: index of the first sample of the step.
        """
