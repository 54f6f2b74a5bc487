"""The lowest validation loss of a run: whether a new one is lower, and whether the run has waited long enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.checkpoint.best import Best, read_best
from weft.data.cache import digest

if TYPE_CHECKING:
    from pathlib import Path

    from weft.layout.mesh import Mesh
    from weft.recipe import Validation
    from weft.train.setup import Job


def comparable(known: Best, data: str, step: int) -> tuple[Best, str]:
    """Return the best validation with which a run at ``step`` can compare its own, and a note.

    The note says that ``known`` is left out because it is of other data; it is empty in all other cases.
    ``known``: the best validation in the run's folder. ``data``: digest of the data that the run validates on.
    """
    if known.step > step:  # it has gone back to before its best
        return Best(), ""
    if known.step and known.data != data:
        said = "the lowest validation loss so far is of other data for validation, so the run looks for a new one"
        return Best(), said
    return known, ""


def lowest_of_run(job: Job, mesh: Mesh, folder: Path, step: int) -> LowestLoss:
    """Return the lowest validation loss of the run in ``folder``, which is at ``step``. Collective."""
    known = mesh.on_main(lambda: read_best(folder))
    settings = job.recipe.validation
    data = digest(job.corpus.validated, settings.batches, job.recipe.train.batch)
    best, note = comparable(known, data, step)
    return LowestLoss(settings, best, data, known, note)


@dataclass
class LowestLoss:
    """The lowest validation loss so far, ``best``, on data with the digest ``data``.

    ``known``: the best validation in the run's folder. ``note``: why the run has no earlier loss to compare with; empty
    if there is nothing to report. ``improved``: :meth:`news` has not returned the present best yet.
    """

    settings: Validation
    best: Best
    data: str = ""
    known: Best = field(default_factory=Best)
    note: str = ""
    improved: bool = False

    def take(self, step: int, loss: float) -> None:
        """Compare ``loss``, the validation loss after ``step``, with the lowest; a loss at step 0 does not count."""
        if step and loss < self.best.loss:
            self.best, self.improved = Best(step, loss, data=self.data), True

    def news(self) -> Best | None:
        """Return the best validation if no earlier call has returned it and the recipe asks for it, else None."""
        asked = self.settings.keep_best or self.settings.patience
        improved, self.improved = self.improved, False
        return self.best if improved and asked else None

    def why_enough(self, step: int) -> str:
        """Return why the run ends after ``step``, if ``validation.patience`` is used up; else an empty string."""
        patience, every = self.settings.patience, self.settings.every
        if (
            not patience
            or not self.best.step
            or step // every - self.best.step // every < patience
        ):
            return ""
        return (
            f"the run ends early, after step {step}: {patience} validations have not been below {self.best.loss:.4f}, "
            f"that of step {self.best.step} (validation.patience = {patience})"
        )
