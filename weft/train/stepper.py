"""Which technique makes an update of the state of the batches of a step."""

from collections.abc import Callable, Sequence

import torch

from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.recipe import Optimizer
from weft.train.in_backward import InBackward
from weft.train.later import PostValidation
from weft.train.step import Stepper
from weft.train.zeroth import ZerothOrder


def build_stepper(
    model: Transformer,
    state: State,
    mesh: Mesh,
    settings: Optimizer,
    before_update: Callable[[], None] = lambda: None,
    inspect: Callable[[dict[str, torch.Tensor]], None] | None = None,
    routes: Sequence[Sequence[int]] = (),
) -> Stepper:
    """The stepper that the recipe's ``settings`` ask for; arguments as of :class:`weft.train.step.Stepper`."""
    kind = Stepper
    if settings.estimate == "zeroth-order":
        kind = ZerothOrder
    elif settings.post_validation and model.pipeline is not None:
        kind = PostValidation
    elif settings.in_backward:
        kind = InBackward
    return kind(model, state, mesh, settings, before_update, inspect, routes)
