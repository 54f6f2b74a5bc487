"""Seconds of a pass on a device that two phases share: compute by its share, memory by what the other phase leaves.

Compute takes longer the fewer cores (or multiprocessors) a phase has. Reading weights and keys does not, as a part of
the cores uses all of the memory's bandwidth; but both phases read from the same memory (Nexus, 2507.06608).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Demand(NamedTuple):
    """What a pass needs, as seconds on the whole device without another phase: ``compute`` and ``memory``."""

    compute: float
    memory: float


@dataclass(frozen=True)
class PhaseCosts:
    """Costs of the six numbers of a pass's work (:func:`weft.generate.step_work.work_of`), in seconds each.

    ``compute``: share of the whole device's compute. ``memory``: share of its bandwidth. ``saturation``: share of the
    device that uses all bandwidth. ``overlapped``: both are used at the same time, so that the slower one counts (the
    roofline of Williams et al. 2009), and not one after the other.
    """

    compute: Sequence[float]
    memory: Sequence[float]
    saturation: float = 0.5
    overlapped: bool = False

    def demand(self, work: Sequence[float]) -> Demand:
        """Return what a pass of this ``work`` needs."""
        costs = (self.compute, self.memory)
        compute, memory = (
            sum(a * b for a, b in zip(each, work, strict=True)) for each in costs
        )
        return Demand(compute, memory)

    def seconds(self, needs: Demand, share: float, other: float = 0.0) -> float:
        """Return the seconds of a pass with this ``share`` of the device. ``other``: part of the time in which the
        other phase reads memory.
        """
        bandwidth = min(1.0, share / self.saturation) / (1.0 + other)
        compute, memory = needs.compute / share, needs.memory / bandwidth
        return max(compute, memory) if self.overlapped else compute + memory

    def reading(self, needs: Demand, share: float) -> float:
        """Return the part of the time in which a pass with this ``share`` reads memory, from 0 to 1."""
        memory = needs.memory / min(1.0, share / self.saturation)
        whole = self.seconds(needs, share)
        return memory / whole if whole else 0.0

    def both(self, prompts: Demand, texts: Demand, quota: float) -> tuple[float, float]:
        """Return the seconds of a pass over prompts and of one over texts that run beside each other."""
        reads = self.reading(prompts, quota)
        writes = self.reading(texts, 1.0 - quota)
        return (
            self.seconds(prompts, quota, writes),
            self.seconds(texts, 1.0 - quota, reads),
        )
