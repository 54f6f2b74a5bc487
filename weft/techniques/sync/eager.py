"""Eager updates: an island's own difference of this round, the other islands' of the last (Kale et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.outer import OuterMomentum, OuterSettings

if TYPE_CHECKING:
    import torch

    from weft.sync.simulated_round import Round
    from weft.sync.sync_method import Slots


@register(
    "sync",
    "eager",
    settings=OuterSettings,
    draws={"momentum": (0.0, 0.3, 0.9)},
    title="Eager updates: the own difference of now, the others' of the last round",
    paper="Kale et al. 2025",
    recipe=(
        "islands.toml --set sync.compress=none --set sync.update=eager --set "
        "sync.momentum=0.5"
    ),
    proof="tests/sync/test_islands.py",
    figure="equal to a simulation to 1e-10; bytes as the formula",
)
class Eager(OuterMomentum):
    """Applies Nesterov's momentum to a mean of parameter differences, for which no island waits (Kale et al. 2025).

    In the mean, the island's own difference is that of this round; the other islands' differences are those of the last
    round.
    """

    slots = ("anchor", "outer", "own")
    shared = ()
    following = ("anchor",)
    late = True

    def applied(
        self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
    ) -> torch.Tensor:
        own = self.sent(theta, slots)
        both = answer + (own - slots["own"]) / islands
        slots["own"].copy_(own)
        return super().applied(theta, slots, both, islands)

    def simulate(self, at: Round) -> None:
        import torch

        from weft.sync.simulated_round import step_anchor

        if not at.is_due:
            return
        now = at.differences()
        nothing = torch.zeros_like(next(iter(now.values()))), len(at.ones)
        mean, count = at.past.pop() if at.past else nothing
        at.past.append((at.mean(now), len(at.near(min(at.ones)))))
        # the own difference of now in the place of the last
        for i, island in at.ones.items():
            late = mean + (now[i] - island.kept["own"]) / count
            step_anchor(island, late, self.lr, self.momentum)
            island.now.copy_(island.kept["anchor"])
            island.kept["own"].copy_(now[i])
