"""The islands through which microbatches pass: permutations that all ranks draw from one seed (NoLoCo, 2506.10911)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


# every stage asks for the same ones for each microbatch, forward and backward
@lru_cache(4096)
def drawn_permutation(count: int, seed: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers 0 to ``count - 1`` in a random order, which the numbers ``seed`` decide."""
    return tuple(np.random.default_rng(seed).permutation(count).tolist())


@dataclass(frozen=True)
class DrawnRoutes:
    """Routes of the microbatches of one step through the pipeline stages of several islands. In each microbatch, stage
    ``s`` of every island gets its input from stage ``s - 1`` of a random island, and each output is used once.

    ``islands``: number of islands; ``seed``: seed of the run; ``step``: number of the step, from 0.
    """

    islands: int
    seed: int
    step: int

    def sources(self, stage: int, microbatch: int) -> list[int]:
        """Return for each island the island from which its ``stage`` gets its input of ``microbatch``, which is the
        output of the stage before. The result is a permutation of all islands; for stage 0 each island has itself.
        """
        if stage == 0:
            return list(range(self.islands))
        return [
            *drawn_permutation(self.islands, (self.seed, self.step, stage, microbatch))
        ]

    def source(self, stage: int, island: int, microbatch: int) -> int:
        """Return the island from which ``stage`` of ``island`` gets its input of ``microbatch``, the output of the
        stage before.
        """
        return self.sources(stage, microbatch)[island]

    def target(self, stage: int, island: int, microbatch: int) -> int:
        """Return the island whose ``stage`` gets, in ``microbatch``, the output that ``island`` has computed in the
        stage before.
        """
        return self.sources(stage, microbatch).index(island)

    def origin(self, stage: int, island: int, microbatch: int) -> int:
        """Return the island whose samples ``stage`` of ``island`` computes in ``microbatch``: the island at whose stage
        0 their route began.
        """
        for s in range(stage, 0, -1):
            island = self.source(s, island, microbatch)
        return island
