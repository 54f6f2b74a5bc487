"""CO2: exchange a round late, with a penalty for staleness and a clipped momentum (Sun et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, PositiveFloat

from weft.registry import register
from weft.sync.outer import OuterMomentum, OuterSettings

if TYPE_CHECKING:
    import torch

    from weft.recipe import Sync
    from weft.sync.simulated_round import Round
    from weft.sync.sync_method import Slots


class CO2Settings(OuterSettings):
    """Settings of CO2 that a recipe gives: penalty and clipping, and learning rate and momentum of the outer update.
    The defaults are those of the CO2 paper.
    """

    lr: PositiveFloat = Field(
        1.0,
        description=(
            "Learning rate of the outer update, which islands make after each round. The parameters at the "
            "beginning of the round are moved by this number times the islands' mean change in the round, plus "
            "momentum."
        ),
    )
    momentum: float = Field(
        0.2,
        ge=0,
        lt=1,
        description=(
            "Momentum of the outer update: share of the direction of the last outer update that the next one keeps. "
            "0: no momentum."
        ),
    )
    penalty: PositiveFloat = Field(
        1.0,
        description=(
            "Number by which the islands' mean change is divided because it is used a round late. Larger numbers "
            "make smaller updates. 1: it is not divided."
        ),
    )
    clip: PositiveFloat = Field(
        1.0,
        description=(
            "Largest absolute value of an element of the outer update's momentum. Larger elements are cut to it."
        ),
    )


@register(
    "sync",
    "co2",
    settings=CO2Settings,
    draws={"momentum": (0.0, 0.3), "penalty": (1.0, 2.0), "clip": (1.0, 1e-4)},
    title="CO2: exchange a round late, penalty for staleness, momentum that is clipped",
    paper="Sun et al. 2024",
    recipe="islands.toml --set sync.compress=none --set sync.update=co2",
    proof="tests/sync/test_islands.py",
    figure=(
        "equal to a simulation to 1e-10, with a clip that clips; bytes as the "
        "formula; no step waits at 100 Mbit/s, loss 7.6 % above at equal tokens "
        "(`bench/islands.py`)"
    ),
)
class CO2(OuterMomentum):
    """Applies an outer momentum to the mean, over islands, of how far parameters have moved in a round (Sun et al.
    2024).

    This mean arrives one round late: after each round, islands use the mean of the round before. It is then divided by
    the setting ``penalty``. Each element of the momentum is clipped to the setting ``clip``.
    """

    late = True

    def __init__(self, settings: Sync) -> None:
        super().__init__(settings)
        own = settings.own(CO2Settings)
        self.penalty, self.clip = own.penalty, own.clip

    def applied(
        self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
    ) -> torch.Tensor:
        momentum = slots["outer"].mul_(self.momentum).add_(answer / self.penalty)
        momentum.clamp_(-self.clip, self.clip)
        slots["anchor"].sub_(self.lr * momentum)
        return slots["anchor"]

    def simulate(self, at: Round) -> None:
        import torch

        if not at.is_due:
            return
        mean = at.mean(at.differences())
        late = at.past.pop() if at.past else torch.zeros_like(mean)
        at.past.append(mean)
        for island in at.ones.values():
            pushed = self.momentum * island.kept["outer"] + late / self.penalty
            island.kept["outer"].copy_(pushed.clip(-self.clip, self.clip))
            island.kept["anchor"].sub_(self.lr * island.kept["outer"])
            island.now.copy_(island.kept["anchor"])
