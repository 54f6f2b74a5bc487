"""The islands through which microbatches pass: permutations that all ranks draw from one seed (NoLoCo, 2506.10911)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DrawnRoutes:
    """Routes of one step. In each microbatch, the islands' stages ``s - 1`` feed their stages ``s`` one to one.

    ``islands``: their number; ``seed``: seed of the run; ``step``: number of the step, from 0.
    """

    islands: int
    seed: int
    step: int

    def sources(self, stage: int, microbatch: int) -> list[int]:
        """Return for each island the island whose stage before ``stage`` feeds it, a permutation of all islands."""
        if stage == 0:
            return list(range(self.islands))
        drawn = np.random.default_rng([self.seed, self.step, stage, microbatch])
        return [int(island) for island in drawn.permutation(self.islands)]

    def source(self, stage: int, island: int, microbatch: int) -> int:
        """Return the island whose stage before ``stage`` feeds ``stage`` of ``island``."""
        return self.sources(stage, microbatch)[island]

    def target(self, stage: int, island: int, microbatch: int) -> int:
        """Return the island whose ``stage`` is fed by the stage before it of ``island``."""
        return self.sources(stage, microbatch).index(island)

    def origin(self, stage: int, island: int, microbatch: int) -> int:
        """Return the island whose samples ``stage`` of ``island`` computes: where their route began."""
        for s in range(stage, 0, -1):
            island = self.source(s, island, microbatch)
        return island
