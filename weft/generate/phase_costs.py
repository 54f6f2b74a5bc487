"""Seconds of a pass on a device that two phases share: compute by its share, memory by what the other phase leaves.

Compute takes longer the fewer cores (or multiprocessors) a phase has. Reading weights and keys does not, as a part of
the cores uses all of the memory's bandwidth; but both phases read from the same memory (Nexus, 2507.06608).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Demand(NamedTuple):
    """What a forward pass needs if it has the whole device for itself: ``compute`` and ``memory`` are the seconds of
    its arithmetic and of its memory accesses.
    """

    compute: float
    memory: float


@dataclass(frozen=True)
class PhaseCosts:
    """Model of the time of a forward pass that has only a share of a device, because another phase runs beside it. The
    work of a pass is six numbers (:func:`weft.generate.step_work.work_of`). ``compute``: for each of the six
    numbers, the seconds of arithmetic that one unit of it takes on the whole device. ``memory``: likewise the
    seconds of memory accesses, at full bandwidth. ``saturation``: share of the device that suffices to use all
    bandwidth. ``overlapped``: arithmetic and memory accesses run at the same time, so that the slower one counts
    (the roofline of Williams et al. 2009); otherwise their times are added.
    """

    compute: Sequence[float]
    memory: Sequence[float]
    saturation: float = 0.5
    overlapped: bool = False

    def demand(self, work: Sequence[float]) -> Demand:
        """Return the seconds of arithmetic and of memory accesses that a pass with the six numbers ``work`` needs."""
        costs = (self.compute, self.memory)
        compute, memory = (
            sum(a * b for a, b in zip(each, work, strict=True)) for each in costs
        )
        return Demand(compute, memory)

    def seconds(self, needs: Demand, share: float, other: float = 0.0) -> float:
        """Return the seconds of a pass that may use the fraction ``share`` of the device. ``needs``: seconds that it
        needs with the whole device (:meth:`demand`). ``other``: fraction of the time in which the other phase reads
        memory.
        """
        bandwidth = min(1.0, share / self.saturation) / (1.0 + other)
        compute, memory = needs.compute / share, needs.memory / bandwidth
        return max(compute, memory) if self.overlapped else compute + memory

    def reading(self, needs: Demand, share: float) -> float:
        """Return the fraction of its time, from 0 to 1, in which a pass reads memory. ``share``: fraction of the device
        that it may use. ``needs``: seconds that it needs with the whole device (:meth:`demand`).
        """
        memory = needs.memory / min(1.0, share / self.saturation)
        whole = self.seconds(needs, share)
        return memory / whole if whole else 0.0

    def both(self, prompts: Demand, texts: Demand, quota: float) -> tuple[float, float]:
        """Return the seconds of a pass over prompts and of a pass over texts that run beside each other. ``quota``:
        fraction of the device for the prompts; the texts have the rest.
        """
        reads = self.reading(prompts, quota)
        writes = self.reading(texts, 1.0 - quota)
        return (
            self.seconds(prompts, quota, writes),
            self.seconds(texts, 1.0 - quota, reads),
        )
