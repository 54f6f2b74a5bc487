"""Choose the stepper: which technique turns the batches of a step into an update of the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from weft.train.step import Stepper

if TYPE_CHECKING:
    from weft.layout.mesh import Mesh
    from weft.models.transformer import Transformer
    from weft.parallel.state import State
    from weft.recipe import Recipe
    from weft.sync.presence import Presence
    from weft.sync.streams import Streams


def build_stepper(
    model: Transformer,
    state: State,
    mesh: Mesh,
    recipe: Recipe,
    before_update: Callable[[], None] = lambda: None,
    inspect: Callable[[dict[str, torch.Tensor]], None] | None = None,
    routes: Sequence[Sequence[int]] = (),
    streams: Streams | None = None,
    presence: Presence | None = None,
    begun: int = 0,
) -> Stepper:
    """The stepper that the recipe asks for; the other arguments are those of :class:`weft.train.step.Stepper`.

    ``streams``: to the other islands, if there are any, ``presence``: which of them are there, if not always all, and
    ``begun``: how many steps have been taken before.
    """
    settings, sync = recipe.optimizer, recipe.sync
    given = model, state, mesh, settings, before_update, inspect, routes
    stepper = _kind_of(model, state, mesh, recipe, streams)(*given)
    if streams is None or sync.of_gradients:
        return stepper
    from weft.sync.presence import Presence
    from weft.train.islands import Apart

    return Apart(
        *given,
        inner=stepper,
        presence=presence or Presence(streams),
        how=sync,
        steps=begun,
    )


def _kind_of(
    model: Transformer,
    state: State,
    mesh: Mesh,
    recipe: Recipe,
    streams: Streams | None,
) -> Callable[..., Stepper]:
    """The stepper by which an island's ranks step; of those that a run does not use none is imported."""
    settings, resilience = recipe.optimizer, recipe.resilience
    if settings.estimate == "zeroth-order":
        from weft.train.zeroth import ZerothOrder

        return ZerothOrder
    if settings.post_validation and model.pipeline is not None:
        from weft.train.later import PostValidation

        return PostValidation
    if settings.in_backward:
        from weft.train.in_backward import InBackward

        return InBackward
    if state.early:
        from weft.train.speculation import Speculation

        return Speculation
    if streams is not None and recipe.sync.of_gradients:
        from weft.train.islands import Together

        return partial(Together, streams=streams)
    if resilience.combines and mesh.size("dp") > 1:
        if resilience.code:
            from weft.train.coding import Coding

            return partial(Coding, resilience=resilience)
        from weft.train.voting import Voting

        return partial(Voting, resilience=resilience)
    return Stepper
