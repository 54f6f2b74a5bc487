"""The interface of techniques that fill phases of the training step.

One technique fills a phase; the plain step (:class:`weft.train.step.PlainStep`) fills the others. So two techniques
that fill one phase exclude each other, and no rule need say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.phases import Phase
    from weft.train.step import PhaseFiller, StepContext


class StepTechnique:
    """A technique that fills phases of a training step; it is made with its settings.

    ``fills``: the phases. ``does``: what the technique does, for an error line, in which ``{0}`` is the recipe.
    ``instead``: what else a user can do than to leave the technique out.
    """

    fills: ClassVar[Phase]
    does: ClassVar[str]
    instead: ClassVar[str] = ""

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        """Return an object with the methods of the phases, or None if there is nothing to do on this mesh."""
        raise NotImplementedError
