"""Compose the training step of the techniques that a recipe asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.recipe.conflicts import AskedRecipe
from weft.recipe.step_techniques import asked_techniques, refuse_filled_twice
from weft.train.phases import STEP, Phase
from weft.train.step import PlainStep, Step, StepContext

if TYPE_CHECKING:
    from weft.recipe import Recipe


def build_step(context: StepContext, recipe: Recipe) -> Step:
    """Compose the training step from the techniques that the recipe asks for.

    A step consists of phases, each filled by one object. The plain step fills the phases that no technique fills.
    ``context``: the model, state and mesh that the phases work on, and functions that they call. Raises
    :class:`weft.refusal.Conflict` if two techniques fill the same phase of the step.
    """
    asked = AskedRecipe(**dict(recipe))
    filled = [
        (each, filler)
        for each in asked_techniques(asked)
        if (filler := each.technique.fill(context, recipe)) is not None
    ]
    refuse_filled_twice(asked, [each for each, _ in filled])
    # that they have the methods of these phases is what they declare
    chosen: dict[Phase, Any] = dict.fromkeys(STEP, PlainStep(context))
    chosen[Phase.AFTER] = None
    for each, filler in filled:
        chosen |= dict.fromkeys(each.technique.fills, filler)
    gradients, agree, update, after = (chosen[phase] for phase in Phase)
    clip = recipe.optimizer.clip
    step = Step(
        context.state,
        gradients,
        agree,
        update,
        after,
        [filler for _, filler in filled],
        clip,
    )
    if not context.state.beside:
        return step
    from weft.train.own_critic import with_critic

    return with_critic(step, context, recipe)
