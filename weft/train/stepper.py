"""How the batches of a step become an update of the state: one interface, whatever technique stands behind it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from weft.data.batch import Batch
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.recipe import Optimizer
from weft.train.in_backward import InBackward
from weft.train.later import PostValidation
from weft.train.step import StepResult, train_step
from weft.train.zeroth import ZerothOrder


class Stepper(Protocol):
    """Takes optimizer steps. Every step has one result, which may become final only while later steps run."""

    def step(self, batches: Sequence[Batch], lr: float, stop: bool = False) -> list[StepResult]:
        """Take a step, and return the results that are final now, oldest first.

        ``stop`` is this rank's wish to end the run; the step's result says whether any rank has it.
        """

    def finish(self) -> list[StepResult]:
        """Make the state that after the last step, and return the results that were still due."""
        return []

    def summary(self) -> str:
        """What there is to say of all steps at the end of a run; mostly nothing."""
        return ""


class PlainStepper(Stepper):
    """Each step is over when it returns. ``take``: :func:`weft.train.step.train_step` with all that stays the same."""

    def __init__(self, take: Callable[..., StepResult]) -> None:
        self.take = take

    def step(self, batches: Sequence[Batch], lr: float, stop: bool = False) -> list[StepResult]:
        return [self.take(batches=batches, lr=lr, stop=stop)]


def build_stepper(
    model: Transformer,
    state: State,
    mesh: Mesh,
    settings: Optimizer,
    before_update: Callable[[], None] = lambda: None,
    inspect: Callable[[dict[str, torch.Tensor]], None] | None = None,
    routes: Sequence[Sequence[int]] = (),
) -> Stepper:
    """The stepper that the recipe's ``settings`` ask for. ``before_update`` returns when the state may change."""
    if settings.estimate == "zeroth-order":
        return ZerothOrder(model, state, mesh, settings, before_update, inspect)
    if settings.post_validation and model.pipeline is not None:
        return PostValidation(model, state, mesh, settings.clip, before_update, inspect)
    if settings.in_backward:
        return InBackward(model, state, mesh, before_update, inspect)
    return PlainStepper(partial(
        train_step, model, state, mesh=mesh, clip=settings.clip, inspect=inspect, routes=routes,
        before_update=before_update,
    ))  # fmt: skip
