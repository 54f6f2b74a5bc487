"""Gradients that are estimated from losses, without backward: ``optimizer.estimate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.refusal import Rule
from weft.registry import register
from weft.train.phases import STEP
from weft.train.step_technique import StepTechnique

if TYPE_CHECKING:
    import torch

    from weft.parallel.state import Held
    from weft.recipe import Recipe
    from weft.train.step import PhaseFiller, StepContext


@register(
    "phases",
    "zeroth-order",
    rules=(
        Rule(
            "zeroth order with other passes",
            "layout",
            lambda a: bool(a.layout.balance or a.layout.skip),
            "optimizer.estimate = 'zeroth-order' evaluates plain passes, and layout.balance and layout.skip are about "
            "others",
            "leave these out",
        ),
        Rule(
            "dropout without backward",
            "adapter",
            lambda a: bool(a.adapter and a.adapter.dropout),
            "adapter.dropout drops where gradients are computed, and optimizer.estimate = 'zeroth-order' computes none",
            "leave one of them out",
        ),
        Rule(
            "dropout of layers without backward",
            "shape",
            lambda a: a.shape.dropout > 0,
            "model.dropout drops where gradients are computed, and optimizer.estimate = 'zeroth-order' computes none",
            "leave one of them out",
        ),
        Rule(
            "drawn modules without backward",
            "shape",
            lambda a: a.shape.small_ffn > 0,
            "model.small_ffn draws where gradients are computed, and optimizer.estimate = 'zeroth-order' computes none",
            "leave one of them out",
        ),
        Rule(
            "balance of experts with zeroth order",
            "shape",
            lambda a: (
                bool(a.shape.mixtures)
                and (a.learns_loads or a.shape.balance_loss + a.shape.z_loss > 0)
            ),
            "optimizer.estimate = 'zeroth-order' sees the model's own loss alone, and routers would never be balanced",
            "set model.balance_loss, model.z_loss and model.bias_rate to 0",
        ),
    ),
    title="MeZO: forward passes only",
    paper="Malladi et al. 2023",
    recipe="optimizers.toml --set optimizer.estimate=zeroth-order --set optimizer.kind=sgd",
    proof="tests/techniques/test_optimizers.py",
    figure="equal to 1e-10; no gradients, no moments",
)
class ZerothOrderTechnique(StepTechnique):
    """Estimates gradients from two losses: of parameters moved a little along a random direction, and against it.

    The method is MeZO (Malladi et al. 2023).
    """

    fills = STEP
    does = "optimizer.estimate = 'zeroth-order' estimates gradients from losses"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller:
        from weft.techniques.phases.zeroth_order.two_points import ZerothOrder

        return ZerothOrder(context, recipe.optimizer)

    def direction(self, held: Held, number: int) -> torch.Tensor:
        """Return this rank's shard of the random direction of the parameter ``held`` in step ``number``.

        A rehearsal calls this method to measure its time.
        """
        from weft.techniques.phases.zeroth_order.two_points import direction

        return direction(held, number)
