"""Gradients of replicas combined by another rule than the mean: ``resilience.aggregate``."""

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
    "aggregation",
    rules=(
        Rule(
            "too few replicas for so many faulty",
            "layout resilience",
            lambda a: a.layout.dp < a.resilience.replicas_needed,
            "resilience.aggregate = {0.resilience.aggregate!r} with faulty = {0.resilience.faulty} needs "
            "{0.resilience.replicas_needed} replicas, and dp={0.layout.dp}",
            "raise layout.dp, or lower faulty",
        ),
    ),
)
class AggregationTechnique(StepTechnique):
    """Combines the gradients of replicas by the rule that ``resilience.aggregate`` names.

    The computation is in :mod:`weft.sync.robust_aggregation`.
    """

    fills = Phase.AGREE
    does = "resilience.aggregate = {0.resilience.aggregate!r} sees the replicas' gradients one by one"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        if context.mesh.size("dp") == 1:
            return None
        from weft.techniques.phases.aggregation.votes import Voting

        return Voting(context, recipe.resilience)
