"""The lowest validation loss of a run: whether a new one is lower, and whether the run has waited long enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from weft.cache import digest
from weft.checkpoint.best import Best, read_best

if TYPE_CHECKING:
    from pathlib import Path

    from weft.layout.mesh import Mesh
    from weft.recipe import Validation
    from weft.train.setup import Job


def comparable(known: Best, data: str, step: int) -> tuple[Best, str]:
    """Return the best validation that a run at ``step`` may compare its losses with, and a note for the user.

    ``known``: the best validation stored in the run's folder. ``data``: digest of the data that the run validates on.
    An empty :class:`Best` is returned if ``known`` is of a later step than ``step``, or was measured on other data. The
    note is empty unless the data differ.
    """
    if known.step > step:  # it has gone back to before its best
        return Best(), ""
    if known.step and known.data != data:
        said = "the lowest validation loss so far is of other data for validation, so the run looks for a new one"
        return Best(), said
    return known, ""


def lowest_of_run(job: Job, mesh: Mesh, folder: Path, step: int) -> LowestLoss:
    """Return the lowest validation loss so far of the run in ``folder``, which has taken ``step`` steps. Collective.

    The loss is read from the run's folder on the main rank. A loss that cannot be compared with new ones, because it
    was measured on other data or at a later step, does not count.
    """
    known = mesh.on_main(lambda: read_best(folder))
    settings = job.recipe.validation
    data = digest(job.corpus.validated, settings.batches, job.recipe.train.batch)
    best, note = comparable(known, data, step)
    return LowestLoss(settings, best, data, known, note)


@dataclass
class LowestLoss:
    """The lowest validation loss of a run so far.

    Attributes:
        ``settings``: the recipe's section ``[validation]``.
        ``best``: the lowest loss and its step; step 0 if there is none yet.
        ``data``: digest of the data that the run validates on.
        ``known``: the best validation stored in the run's folder when the run was opened.
        ``note``: a line for the user that says why new losses cannot be compared with ``known``; empty if they can.
        ``improved``: whether ``best`` is new since the last call of :meth:`news`.
    """

    settings: Validation
    best: Best
    data: str = ""
    known: Best = field(default_factory=Best)
    note: str = ""
    improved: bool = False

    def take(self, step: int, loss: float) -> None:
        """Make ``loss``, measured after ``step``, the best loss if it is the lowest so far.

        A loss before training (``step`` 0) does not count.
        """
        if step and loss < self.best.loss:
            self.best, self.improved = Best(step, loss, data=self.data), True

    def news(self) -> Best | None:
        """Return the best validation if it is new since the last call, else None.

        None is returned, too, if the recipe sets neither ``validation.keep_best`` nor ``validation.patience``.
        """
        asked = self.settings.keep_best or self.settings.patience
        improved, self.improved = self.improved, False
        return self.best if improved and asked else None

    def why_enough(self, step: int) -> str:
        """Return the reason to end the run after ``step``; an empty string if the run goes on.

        The run ends in two cases: none of the last ``validation.patience`` validations had a lower loss than the best
        one before them, or the best loss is at most ``validation.until``.
        """
        until = self.settings.until
        if until and self.best.step and self.best.loss <= until:
            reached = f"{self.best.loss:.4f}, has reached {until:g} (validation.until)"
            return f"the run ends: its validation loss after step {self.best.step}, {reached}"
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
