"""How the batches of a step become an update of the state: one interface, whatever technique stands behind it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.data.batch import Batch
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.state import State
from weft.recipe import Optimizer
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

    def summary(self) -> str:
        """What there is to say of all steps at the end of a run; mostly nothing."""


@dataclass
class PlainStepper:
    """Each step is over when it returns. For the other fields see :func:`weft.train.step.train_step`."""

    model: Transformer
    state: State
    mesh: Mesh
    clip: float
    before_update: Callable[[], None] = lambda: None
    inspect: Callable[[dict[str, torch.Tensor]], None] | None = None
    routes: Sequence[Sequence[int]] = ()

    def step(self, batches: Sequence[Batch], lr: float, stop: bool = False) -> list[StepResult]:
        return [train_step(
            self.model, self.state, batches, self.mesh, lr=lr, clip=self.clip, stop=stop, inspect=self.inspect,
            routes=self.routes, before_update=self.before_update,
        )]  # fmt: skip

    def finish(self) -> list[StepResult]:
        return []

    def summary(self) -> str:
        return ""


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
    return PlainStepper(model, state, mesh, settings.clip, before_update, inspect, routes)
