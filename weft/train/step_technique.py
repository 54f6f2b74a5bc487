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

    ``fills``: the phases that the technique fills. ``does``: a clause for error lines that says what the technique
    does, in which ``{0}`` stands for the recipe. ``instead``: what error lines advise besides leaving the technique
    out; "" for no such advice.
    """

    fills: ClassVar[Phase]
    does: ClassVar[str]
    instead: ClassVar[str] = ""

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        """Return an object with the methods of the technique's phases; None if the technique has no effect on the run's
        mesh.

        ``context``: the model, state and mesh that the phases work on, and functions that they call.
        """
        raise NotImplementedError
