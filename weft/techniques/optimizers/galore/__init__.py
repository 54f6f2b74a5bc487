"""GaLore (Zhao et al. 2024): Adam on a projection of a matrix's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from weft.refusal import Rule
from weft.registry import register
from weft.section import Section
from weft.train.rules.update_rule import Timer, UpdateRule

if TYPE_CHECKING:
    import torch

    from weft.layout.parts import Part
    from weft.parallel.state import Held
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums

#: Gradients are factored, and these may not be finite.
DIRECTIONS = Rule(
    "speculation with directions",
    "memory optimizer",
    lambda a: a.memory.speculate != "none",
    "optimizer.kind = {0.optimizer.kind!r} factors gradients, which must be known to be finite, and "
    "memory.speculate updates before they are",
    "leave memory.speculate out, or use another kind",
)


class GaLoreSettings(Section):
    """Settings of GaLore that a recipe gives: number of directions onto which gradients are projected, and how often
    these are computed anew.
    """

    rank: PositiveInt = Field(
        128,
        description=(
            "Number of directions onto which the gradient of each matrix is projected. Fewer directions take less "
            "memory."
        ),
    )
    refresh: PositiveInt = Field(
        200,
        description=(
            "Number of steps between two computations of the directions onto which gradients are projected. "
            "They are computed from the latest gradient."
        ),
    )
    scale: PositiveFloat = Field(
        0.25,
        description=(
            "Number by which the updates of matrices with projected gradients are multiplied, besides the learning "
            "rate."
        ),
    )


@register(
    "optimizer",
    "galore",
    settings=GaLoreSettings,
    rules=(DIRECTIONS,),
    draws={"rank": (3,)},
    title="GaLore",
    paper="Zhao et al. 2024",
    recipe="optimizers.toml --set optimizer.kind=galore --set optimizer.rank=16",
    proof="tests/techniques/test_optimizers.py",
    figure=(
        "Adam's in the whole space to 1e-12; with `rank=16` of `embed=96` 2.5 bytes "
        "per parameter, loss 2.157 (AdamW 2.292) (`bench/optimizers.py`)"
    ),
)
class GaLore(UpdateRule):
    """Adam on gradients that are projected onto their first singular vectors (Zhao et al. 2024).

    ``history``: number of past gradients for the Fisher matrix of Natural GaLore; 0: plain GaLore.
    """

    for_matrices = True
    for_stacks = False
    shaping: ClassVar[tuple[str, ...]] = ("rank",)

    def __init__(self, settings: Optimizer, ranks: RankSums, history: int = 0) -> None:
        from weft.techniques.optimizers.galore.projection import ProjectedAdam

        own = settings.own(GaLoreSettings)
        self.adam = ProjectedAdam(own, settings.betas, settings.eps, ranks, history)

    def slots(self, held: Held) -> dict[str, Part]:
        return self.adam.slots(held)

    def update(
        self,
        held: Sequence[Held],
        grads: Sequence[torch.Tensor],
        lr: float,
        decay: float,
    ) -> None:
        self.adam.update(held, grads, lr, decay)

    def rare_seconds(self, held: Sequence[Held], timed: Timer) -> float:
        """Estimate the mean seconds per update that it takes to compute the singular vectors of ``held``.

        They are computed every ``refresh`` updates. ``timed``: a function that runs a piece of work and returns its
        seconds.
        """
        import torch

        from weft.techniques.optimizers.galore.projection import singular_directions

        square = torch.randn(256, 256, device=held[0].local.device)
        each = timed(lambda: singular_directions(square, 0, 8)) / 256**3
        sizes = [h.logical.shape for h in held if "directions" in h.slots]
        work = sum(m * n * min(m, n) for m, n in sizes)
        return each * work / self.adam.settings.refresh
