"""The mean of the parameters of all islands, or of neighbouring islands, whose parameters may differ (gossip)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.sync_method import SyncMethod

if TYPE_CHECKING:
    import torch

    from weft.recipe import Sync
    from weft.sync.simulated_round import Round
    from weft.sync.sync_method import Slots


@register(
    "sync",
    "average",
    title=(
        "Gossip: parameters averaged with neighbours on a ring or in a graph, or in "
        "random pairs"
    ),
    paper="Lian et al. 2017; Xiao & Boyd 2004",
    recipe=(
        "islands.toml --layout island=4 --set sync.compress=none --set "
        "sync.update=average --set sync.partner=pairs"
    ),
    proof="tests/sync/test_islands.py",
    figure="equal to a simulation to 1e-10; bytes as the formula",
)
class Average(SyncMethod):
    """Replaces each island's parameters by the mean of all islands' parameters (Lian et al. 2017; Xiao & Boyd 2004). If
    ``sync.partner`` is not ``all``, each island averages only with its partners, and keeps no anchor (a copy of the
    parameters at the beginning of the round).
    """

    partners = ("all", "ring", "pairs", "graph")
    is_mean = True

    def __init__(self, settings: Sync) -> None:
        super().__init__(settings)
        if settings.partner != "all":
            self.slots = self.shared = ()

    def sent(self, theta: torch.Tensor, slots: Slots) -> torch.Tensor:
        return super().sent(theta, slots) if self.slots else theta.clone()

    def applied(
        self, theta: torch.Tensor, slots: Slots, answer: torch.Tensor, islands: int
    ) -> torch.Tensor:
        return slots["anchor"].sub_(answer) if self.slots else answer

    def simulate(self, at: Round) -> None:
        import torch

        if not at.is_due:
            return
        before = {i: island.now.clone() for i, island in at.ones.items()}
        for i, island in at.ones.items():
            if self.settings.partner == "graph":
                for j in at.near(i):
                    island.now.add_(self.weight(i, j) * (before[j] - before[i]))
            else:
                near = [before[j] for j in sorted(at.near(i))]
                island.now.copy_(torch.stack(near).mean(0))
            if self.slots:
                island.kept["anchor"].copy_(island.now)

    def weight(self, i: int, j: int) -> float:
        """Return the weight of island ``j`` in the average that its neighbour ``i`` takes (Metropolis weights).

        The weight is ``1 / (1 + e)``, where ``e`` is the number of edges in ``sync.graph`` that the island with more of
        them has.
        """
        edges = {frozenset(edge) for edge in self.settings.graph}
        return 1 / max(sum(k in edge for edge in edges) + 1 for k in (i, j))
