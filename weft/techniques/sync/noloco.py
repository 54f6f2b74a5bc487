"""NoLoCo: random pairs of islands, a modified Nesterov momentum, and no collective (Kolehmainen et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from weft.registry import register
from weft.sync.outer import OuterMomentum, OuterSettings

if TYPE_CHECKING:
    import torch

    from weft.sync.simulated_round import Round
    from weft.sync.sync_method import Slots


class NoLoCoSettings(OuterSettings):
    """Settings of NoLoCo that a recipe gives: learning rate and momentum of the outer update, with the defaults of the
    NoLoCo paper.
    """

    momentum: float = Field(
        0.5,
        ge=0,
        lt=1,
        description=(
            "Momentum of the outer update: share of the direction of the last outer update that the next one keeps. "
            "0: no momentum."
        ),
    )


@register(
    "sync",
    "noloco",
    settings=NoLoCoSettings,
    draws={"momentum": (0.0, 0.3, 0.5)},
    title="NoLoCo: random pairs with a modified Nesterov momentum, no collective",
    paper="Kolehmainen et al. 2025",
    recipe=(
        "islands.toml --layout island=4 --set sync.compress=none --set "
        "sync.update=noloco"
    ),
    proof="tests/sync/test_islands.py",
    figure=(
        "equal to a simulation to 1e-10; twice the parameters to one other island per"
        " round; losses after 400 steps of four islands 3.9 and 5.3 % above DiLoCo's "
        "on two seeds, with momentum 0.7 (chosen on a third) 0.7 and 2.0 %; an "
        "agreement takes 3.0 s with 64 islands and 3.2 with 1,024, a tree all-reduce "
        "16 and 27 (simulated, `bench/noloco.py`); between two sites, both tuned, 0.1"
        " % below DiLoCo's loss on two seeds (`bench/islands.py`)"
    ),
)
class NoLoCo(OuterMomentum):
    """Applies momentum to the mean parameter difference of two islands, and moves their anchors towards each other
    (Kolehmainen et al. 2025).

    An anchor is an island's copy of the parameters at the beginning of a round.
    """

    shared = ()
    following = ("anchor",)
    partners = ("all", "pairs")
    in_pairs = True

    def sent(self, theta: torch.Tensor, slots: Slots) -> torch.Tensor:
        import torch

        return torch.cat((super().sent(theta, slots), slots["anchor"]))

    def applied(
        self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
    ) -> torch.Tensor:
        learned, anchor = answer.chunk(2)
        slots["outer"].mul_(self.momentum).sub_(self.lr * learned).add_(
            self.lr * (anchor - slots["anchor"])
        )
        slots["anchor"].add_(slots["outer"])
        return slots["anchor"]

    def simulate(self, at: Round) -> None:
        import torch

        if not at.is_due:
            return
        learned = {i: -island for i, island in at.differences().items()}
        anchors = {i: island.kept["anchor"].clone() for i, island in at.ones.items()}
        for i, island in at.ones.items():
            pair = sorted(at.near(i))
            mean, middle = (
                torch.stack([of[j] for j in pair]).mean(0) for of in (learned, anchors)
            )
            pushed = self.momentum * island.kept["outer"] + self.lr * mean
            island.kept["outer"].copy_(pushed + self.lr * (middle - anchors[i]))
            island.kept["anchor"].add_(island.kept["outer"])
            island.now.copy_(island.kept["anchor"])
