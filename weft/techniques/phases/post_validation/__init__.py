"""Updates of a pipeline that do not wait for the global gradient norm: ``optimizer.post_validation``."""

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
    "post-validation",
    rules=(
        Rule(
            "files with post-validation",
            "memory",
            lambda a: "file" in a.memory.away.values(),
            "optimizer.post_validation keeps a copy of the state in memory, and [memory] says it does not fit",
            "leave one of them out",
        ),
        Rule(
            "post-validation without pp",
            "layout",
            lambda a: a.layout.pp == 1,
            "optimizer.post_validation is for pipelines",
            "set layout.pp above 1 or leave it out",
        ),
        Rule(
            "placement with post-validation",
            "layout",
            lambda a: a.layout.placement != "static",
            "optimizer.post_validation knows a step's loads when the next one has been taken, and layout.placement = "
            "{0.layout.placement!r} is planned from them",
            "leave out one of them",
        ),
        Rule(
            "router statistics with post-validation",
            "shape",
            lambda a: a.learns_loads,
            "optimizer.post_validation knows a step's loads when the next one has been taken, too late for routers",
            "set model.bias_rate = 0 and use model.balance = 'sequence'",
        ),
    ),
    title="Optimizer post-validation",
    paper="Qi et al. 2023",
    recipe="zero-bubble.toml",
    proof="tests/parallel/test_pipeline.py",
    figure="the same to the last bit",
)
class PostValidationTechnique(StepTechnique):
    """Updates each pipeline stage without waiting for the gradient norm (Qi et al. 2023, section 4).

    An update is undone if the norm turns out to be above the clipping threshold or not finite.
    """

    fills = STEP
    does = "optimizer.post_validation updates before the norm is known"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller | None:
        if context.model.pipeline is None:
            return None
        from weft.techniques.phases.post_validation.late_norm import PostValidation

        return PostValidation(context)
