"""Natural GaLore (Das 2024): GaLore whose gradients are multiplied by the inverse of an empirical Fisher matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from weft.registry import register
from weft.techniques.optimizers.galore import DIRECTIONS, GaLore, GaLoreSettings

if TYPE_CHECKING:
    from weft.recipe import Optimizer
    from weft.train.rules.rank_sums import RankSums


class NaturalGaLoreSettings(GaLoreSettings):
    """Settings of Natural GaLore that a recipe gives: those of GaLore, and the number of gradients for its Fisher
    matrix.
    """

    history: PositiveInt = Field(
        4,
        description=(
            "Number of latest projected gradients that are kept to estimate a Fisher matrix. Gradients are "
            "multiplied by the inverse of this matrix. Each kept gradient takes as much memory as a moment."
        ),
    )


@register(
    "optimizer",
    "natural-galore",
    settings=NaturalGaLoreSettings,
    rules=(DIRECTIONS,),
    draws={"rank": (3,), "history": (2,)},
    title="Natural GaLore",
    paper="Das 2024",
    recipe="optimizers.toml --set optimizer.kind=natural-galore",
    proof="tests/techniques/test_optimizers.py",
    figure=(
        "Woodbury's inverse equals the dense one to 1e-8; history of 4: 4.9 bytes per"
        " parameter; loss 2.604 (AdamW 2.292), worse than GaLore's "
        "(`bench/optimizers.py`)"
    ),
)
class NaturalGaLore(GaLore):
    """GaLore that multiplies projected gradients by the inverse empirical Fisher matrix of the last few gradients (Das
    2024).
    """

    shaping = ("rank", "history")

    def __init__(self, settings: Optimizer, ranks: RankSums) -> None:
        super().__init__(settings, ranks, settings.own(NaturalGaLoreSettings).history)
