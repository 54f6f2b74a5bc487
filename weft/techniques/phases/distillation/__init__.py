"""Distillation: the model learns to imitate one or several trained models, which ``loss.teachers`` names."""

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
    "distillation",
    rules=(
        Rule(
            "teachers with a model that is cut",
            "layout",
            lambda a: a.layout.size("tp", "pp", "cp") > 1 or bool(a.layout.balance),
            "loss.teachers compares whole distributions of whole sequences on each rank, and layout {0.layout} cuts "
            "the model or the sequences",
            "use dp and shard alone, or leave loss.teachers out",
        ),
        Rule(
            "teachers with another loss",
            "loss",
            lambda a: a.loss.kind != "cross-entropy",
            "loss.teachers is mixed with the cross entropy, and loss.kind = {0.loss.kind!r} is another loss",
            "leave one of them out",
        ),
        Rule(
            "teachers with rewards",
            "rl",
            lambda a: a.rl is not None,
            "loss.teachers gives the answers that a model learns, and [rl] lets it learn from its own",
            "leave one of them out",
        ),
    ),
    title="Distillation of an ensemble into one model",
    paper="Hinton et al. 2015; Kim et al. 2025 (pre-training under infinite compute)",
    recipe="ensemble.toml --set \"loss.teachers=['runs/member-1']\"",
    proof="tests/train/test_distillation.py",
    figure="loss and gradients within 1e-12 of the formula; the cross entropy itself when the teachers have no share; "
    "a student as large as a member keeps 120 % of the gain of four over the mean member (`bench/infinite_compute.py`)",
)
class DistillationTechnique(StepTechnique):
    """Adds to the loss the cross entropy with the joint probabilities of teachers (Hinton et al. 2015)."""

    fills = Phase.GRADIENTS
    does = "loss.teachers adds the teachers' probabilities to the loss of each pass"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller:
        from weft.techniques.phases.distillation.teaching import Teaching, open_teachers

        teachers = open_teachers(recipe.loss.teachers, context)
        return Teaching(context, teachers, recipe.loss)
