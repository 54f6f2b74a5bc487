"""Compose the training step of the techniques that a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from weft.recipe.conflicts import AskedRecipe
from weft.recipe.step_techniques import asked_techniques, refuse_filled_twice
from weft.train.phases import STEP, Phase
from weft.train.step import PlainStep, Step, StepContext

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.models.transformer import Transformer
    from weft.parallel.state import State
    from weft.recipe import Recipe
    from weft.sync.presence import Presence


def build_step(
    model: Transformer,
    state: State,
    mesh: Mesh,
    recipe: Recipe,
    before_update: Callable[[], None] = lambda: None,
    inspect: Callable[[dict[str, torch.Tensor]], None] | None = None,
    routes: Sequence[Sequence[int]] = (),
    presence: Presence | None = None,
    begun: int = 0,
    report: Callable[[str, str, Mapping[str, Any]], None] = lambda kind, line, values: (
        None
    ),
) -> Step:
    """Compose the step that the recipe asks for. The other arguments are those of :class:`weft.train.step.StepContext`.

    Raises :class:`weft.recipe.conflicts.Conflict` if two techniques fill one phase.
    """
    context = StepContext(
        model, state, mesh, before_update, inspect, routes, presence, begun, report
    )
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
    return Step(
        state, gradients, agree, update, after, [filler for _, filler in filled], clip
    )
