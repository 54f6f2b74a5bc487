"""Local updates with an outer Nesterov momentum (DiLoCo, Douillard et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register
from weft.sync.outer import OuterMomentum, OuterSettings

if TYPE_CHECKING:
    from weft.sync.simulated_round import Round


@register(
    "sync",
    "nesterov",
    settings=OuterSettings,
    draws={"momentum": (0.0, 0.3, 0.9)},
    title="Local updates with an outer Nesterov momentum (DiLoCo)",
    paper="Douillard et al. 2023",
    recipe="islands.toml --set sync.compress=none",
    proof="tests/sync/test_islands.py",
    figure=(
        "equal to all islands simulated in one process to 1e-10 over 5 rounds, also "
        "cut by `shard`; bytes as the formula, 1/20 of data parallelism with `every ="
        " 20`; between two sites at 100 Mbit/s plain data parallelism's loss in a "
        "sixth of its time, 0.7 and 1.0 % above it at equal tokens, torchft's alike "
        "(`bench/islands.py`)"
    ),
)
class Nesterov(OuterMomentum):
    """Applies Nesterov's momentum to the mean of all islands' parameter differences (the pseudo-gradient; Douillard et
    al. 2023).
    """

    def simulate(self, at: Round) -> None:
        from weft.sync.simulated_round import step_anchor

        if at.is_due:
            mean = at.mean(at.differences())
            for island in at.ones.values():
                step_anchor(island, mean, self.lr, self.momentum)
                island.now.copy_(island.kept["anchor"])
