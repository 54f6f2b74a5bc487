"""Updates during backward that are undone if the step must be clipped: ``memory.speculate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register
from weft.train.phases import STEP
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.step import PhaseFiller, StepContext


@register(
    "phases",
    "speculation",
    rules=(
        Rule(
            "speculation with islands or balance",
            "layout",
            lambda a: a.layout.island > 1 or bool(a.layout.balance),
            "memory.speculate = {0.memory.speculate!r} updates what backward has completed and may take that back, and "
            "layout.island and layout.balance update at other times",
            "leave memory.speculate out, or the others",
        ),
    ),
    title="Updates during backward, before the norm is known, undone if it clips",
    paper="Lian et al. 2025 (SuperOffload); Liao et al. 2024 (Fuyou)",
    recipe="files.toml --set memory.speculate=even",
    proof="tests/train/test_speculation.py",
    figure="the waiting run's bits with steps kept, clipped, skipped and clipped again, also over ranks; with moments "
    "in a file an update adds 0.50 of what it adds when it waits, in memory 0.21 (`bench/tiers.py`)",
)
class SpeculationTechnique(StepTechnique):
    """Updates units during backward, before the gradient norm is known, and undoes updates that had to be clipped.

    A unit is a group of parameters that are updated together. The method is from SuperOffload (Lian et al. 2025) and
    Fuyou (Liao et al. 2024).
    """

    fills = STEP
    does = "memory.speculate = {0.memory.speculate!r} updates units during backward and may undo that"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        from weft.techniques.phases.speculation.early_units import early_units
        from weft.techniques.phases.speculation.early_updates import Speculation

        early = early_units(context.state, recipe.memory, recipe.train.recompute)
        elementwise = recipe.optimizer.elementwise
        return Speculation(context, early, elementwise) if early else None
