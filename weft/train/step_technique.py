"""The interface of techniques that fill phases of the training step.

A phase is filled by one technique, or else by the plain step (:class:`weft.train.step.PlainStep`). Two techniques that
fill the same phase therefore exclude each other, without a rule that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.phases import Phase
    from weft.train.step import PhaseFiller, StepContext


class StepTechnique:
    """Base class of techniques that fill phases of a training step; a technique is built from its recipe settings.

    ``fills``: the phases. ``does``: what the technique does, for an error line, in which ``{0}`` is the recipe.
    ``instead``: another remedy for that error line than to leave the technique out; empty if there is none.
    """

    fills: ClassVar[Phase]
    does: ClassVar[str]
    instead: ClassVar[str] = ""

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        """Return an object with the methods of the phases, or None if there is nothing to do on the run's mesh."""
        raise NotImplementedError
