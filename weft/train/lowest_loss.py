"""The lowest validation loss of a run: whether a new one is lower, and whether the run has waited long enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.checkpoint.best import Best

if TYPE_CHECKING:
    from weft.recipe import Validation


def comparable(known: Best, data: str, step: int) -> tuple[Best, str]:
    """What a run that is at ``step``, and validates on ``data``, can compare its losses with; and what to say of it."""
    if known.step > step:  # it has gone back to before its best
        return Best(), ""
    if known.step and known.data != data:
        said = "the lowest validation loss so far is of other data for validation, so the run looks for a new one"
        return Best(), said
    return known, ""


@dataclass
class LowestLoss:
    """The ``best`` validation so far, on ``data`` of this digest. ``improved``: nobody has asked for it yet."""

    settings: Validation
    best: Best
    data: str = ""
    improved: bool = False

    def take(self, step: int, loss: float) -> None:
        """A validation after ``step``, which is not a model's first: whether that is better says nothing of the run."""
        if step and loss < self.best.loss:
            self.best, self.improved = Best(step, loss, data=self.data), True

    def news(self) -> Best | None:
        """The best validation, if there is a new one that is to be kept or to be remembered."""
        asked = self.settings.keep_best or self.settings.patience
        improved, self.improved = self.improved, False
        return self.best if improved and asked else None

    def why_enough(self, step: int) -> str:
        """Why the run ends after ``step``, if it has waited long enough for a lower loss; else nothing."""
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
