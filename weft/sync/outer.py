"""Nesterov's momentum on the pseudo-gradient, the base of several sync methods (DiLoCo, Douillard et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from weft.section import Section
from weft.sync.sync_method import SyncMethod

if TYPE_CHECKING:
    import torch

    from weft.recipe import Sync
    from weft.sync.sync_method import Slots


class OuterSettings(Section):
    """Settings of the outer update, by which islands change their common parameters at the end of a round."""

    lr: PositiveFloat = Field(
        0.7,
        description=(
            "Learning rate of the outer update, which islands make after each round. The parameters at the "
            "beginning of the round are moved by this number times the islands' mean change in the round, plus "
            "momentum."
        ),
    )
    momentum: float = Field(
        0.9,
        ge=0,
        lt=1,
        description=(
            "Momentum of the outer update: share of the direction of the last outer update that the next one keeps. "
            "0: no momentum."
        ),
    )


class OuterMomentum(SyncMethod):
    """Base of sync methods whose outer update is SGD with Nesterov's momentum (DiLoCo, Douillard et al. 2023).

    Common parameters are those with which all islands began the round. The outer update changes them at the end of the
    round. In place of a gradient it uses the mean over islands of a difference: the parameters at the beginning of the
    round minus those at the end. A slot is a tensor kept for each parameter: ``anchor`` holds the common parameters,
    ``outer`` the momentum.
    """

    slots: tuple[str, ...] = ("anchor", "outer")
    shared: tuple[str, ...] = ("anchor", "outer")

    def __init__(self, settings: Sync) -> None:
        super().__init__(settings)
        outer = settings.own(OuterSettings)
        self.lr, self.momentum = outer.lr, outer.momentum

    def applied(
        self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
    ) -> torch.Tensor:
        slots["outer"].mul_(self.momentum).add_(answer)
        slots["anchor"].sub_(self.lr * (answer + self.momentum * slots["outer"]))
        return slots["anchor"]
