"""Updates of each unit within backward: ``optimizer.in_backward``."""

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
    "in-backward",
    rules=(
        Rule(
            "update in backward with clipping",
            "optimizer",
            lambda a: a.optimizer.clip > 0,
            "optimizer.in_backward updates before all gradients are there, and optimizer.clip = {0.optimizer.clip:g} "
            "needs their norm first",
            "set optimizer.clip = 0, or leave in_backward out",
        ),
        Rule(
            "update in backward with pp",
            "layout",
            lambda a: a.layout.pp > 1,
            "optimizer.in_backward is for one backward after the other, and pp={0.layout.pp} interleaves those of its "
            "microbatches",
            "use pp = 1, or leave in_backward out",
        ),
        Rule(
            "update in backward with balance",
            "layout",
            lambda a: bool(a.layout.balance),
            "optimizer.in_backward agrees on the loss before the last backward, which layout.balance = "
            "{0.layout.balance!r} gives every rank at another time",
            "leave one of them out",
        ),
        Rule(
            "update in backward with an offloaded state",
            "memory",
            lambda a: a.memory.offloads_state,
            "optimizer.in_backward frees gradients, and with memory.weights = {0.memory.weights!r} these wait there",
            "leave one of them out",
        ),
    ),
    title="Update within backward, a block's gradients at a time",
    paper="Lv et al. 2023 (LOMO)",
    recipe="optimizers.toml --set optimizer.in_backward=true --set optimizer.clip=0",
    proof="tests/train/test_in_backward.py",
    figure="bit-equal to updates after backward on one device, layouts to 1e-10; gradients of one block and of the "
    "embedding are alive instead of all",
)
class InBackwardTechnique(StepTechnique):
    """Updates each unit during backward, as soon as its gradients are final, and frees them: LOMO (Lv et al. 2023).

    A unit is a group of parameters that are updated together, mostly a block of the model.
    """

    fills = STEP
    does = "optimizer.in_backward updates each unit within backward"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller:
        from weft.techniques.phases.in_backward.unit_updates import InBackward

        return InBackward(context)
