"""Choose the stepper: which technique turns the batches of a step into an update of the state."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.recipe import Recipe
from weft.sync.presence import Presence
from weft.sync.streams import Streams
from weft.train.coding import Coding
from weft.train.in_backward import InBackward
from weft.train.islands import Apart, Together
from weft.train.later import PostValidation
from weft.train.speculation import Speculation
from weft.train.step import Stepper
from weft.train.voting import Voting
from weft.train.zeroth import ZerothOrder


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
    settings, resilience, sync = recipe.optimizer, recipe.resilience, recipe.sync
    kind: Callable[..., Stepper] = Stepper
    if resilience.combines and mesh.size("dp") > 1:
        kind = partial(Coding if resilience.code else Voting, resilience=resilience)
    if streams is not None and sync.of_gradients:
        kind = partial(Together, streams=streams)
    if settings.estimate == "zeroth-order":
        kind = ZerothOrder
    elif settings.post_validation and model.pipeline is not None:
        kind = PostValidation
    elif settings.in_backward:
        kind = InBackward
    elif state.early:
        kind = Speculation
    given = model, state, mesh, settings, before_update, inspect, routes
    found = kind(*given)
    if streams is None or sync.of_gradients:
        return found
    return Apart(
        *given,
        inner=found,
        presence=presence or Presence(streams),
        how=sync,
        steps=begun,
    )
