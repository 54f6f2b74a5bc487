"""Gradients that are decoded from the results of the fastest replicas: ``resilience.code``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register
from weft.train.phases import Phase
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.step import PhaseFiller, StepContext


@register(
    "phases",
    "gradient-code",
    rules=(
        Rule(
            "a code with experts",
            "model",
            lambda a: bool(a.model.mixtures),
            "resilience.code computes samples several times, and routers of model.experts would count them so",
            "leave one of them out",
        ),
    ),
)
class GradientCodeTechnique(StepTechnique):
    """Decodes the sum of all gradients from the first results of ranks, by the code that ``resilience.code`` names.

    The interface of codes is in :mod:`weft.sync.coded`.
    """

    fills = Phase.GRADIENTS | Phase.AGREE
    does = "resilience.code = {0.resilience.code!r} decodes the sum of all gradients from the first answers"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        if context.mesh.size("dp") == 1:
            return None
        from weft.techniques.phases.gradient_code.decoding import Coding

        return Coding(context, recipe.resilience)
