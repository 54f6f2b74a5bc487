"""Updates of an offloaded state that host and device share: ``memory.alternate``."""

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
    "alternating-updates",
    rules=(
        Rule(
            "alternating updates that ask other ranks",
            "layout optimizer",
            lambda a: a.layout.world > 1 and not a.optimizer.elementwise,
            "memory.alternate updates units in an order of each rank's own, and optimizer.kind = {0.optimizer.kind!r} "
            "with state = {0.optimizer.state!r} asks other ranks",
            "use adamw, sgd or lion, or leave memory.alternate out",
        ),
    ),
    title="Updates by turns on the host and on the device, as many there as a simulated table of measured rates says",
    paper="Maurya et al. 2024 (Deep Optimizer States)",
    recipe="offload.toml --set memory.activations=device --set memory.alternate=auto",
    proof="tests/parallel/test_alternating.py",
    figure="no bit depends on it where arithmetic is the same; the chosen number within 5 % of the measured best with "
    "stated rates (`bench/alternating.py`); on an H200 1.068 s a step, and 1.044 without: no gain "
    "(`bench/gpu_offload.py`)",
)
class AlternatingUpdatesTechnique(StepTechnique):
    """Updates some units of an offloaded state on the device while the host updates the others (Maurya et al. 2024)."""

    fills = Phase.UPDATE
    does = "memory.alternate = {0.memory.alternate!r} shares the update of reduced gradients with the device"

    def fill(self, context: StepContext, recipe: Recipe) -> PhaseFiller:
        from weft.techniques.phases.alternating_updates.alternation import Alternation

        return Alternation(context, recipe.memory.alternate)
