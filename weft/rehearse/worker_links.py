"""Measured links between workers, and the time of transfers over several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: A link that is slower than this share of the fastest is taken to be shared by all that cross there.
SLOW = 0.1


@dataclass(frozen=True)
class WorkerLinks:
    """Measured links between workers, the processes of a probe on which the ranks of a run can be placed.

    ``latency`` and ``bandwidth``: seconds and bytes per second of every ordered pair of workers, ``[n, n]``.
    """

    latency: np.ndarray
    bandwidth: np.ndarray

    @classmethod
    def of(cls, table: Mapping[str, Sequence[Sequence[float]]]) -> WorkerLinks:
        """Read ``table``, the entry ``calibration.links`` of a cluster file that ``weft probe`` has written."""
        return cls(
            np.array(table["latency"], dtype=float),
            np.array(table["bandwidth"], dtype=float),
        )

    def __len__(self) -> int:
        return len(self.latency)

    @property
    def shared(self) -> float:
        """Bandwidth in bytes per second below which a link is taken to be shared by all ranks that cross it."""
        return float(self.bandwidth.max()) * SLOW

    @property
    def uneven(self) -> bool:
        """Whether some link is slower than :attr:`shared`, so that the placement of ranks matters."""
        apart = self.bandwidth[~np.eye(len(self), dtype=bool)]
        return bool(len(apart) and apart.min() < self.shared)

    def pairs(self, groups: np.ndarray, chain: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return ``(bandwidth, latency)`` of the links inside each group of workers, ``[groups, links]`` each.

        ``groups``: the workers of each group, one row per group. Each worker has a link to the next one in its row.
        ``chain``: whether the links end at the last worker; otherwise a further link leads from the last worker to the
        first. All groups are taken to communicate at once. Slow links share their bandwidth: each counts with its part
        of it.
        """
        ends = np.stack([groups, np.roll(groups, -1, 1)], -1)
        if chain:
            ends = ends[:, :-1]
        speed = self.bandwidth[ends[..., 0], ends[..., 1]]
        delay = self.latency[ends[..., 0], ends[..., 1]]
        slow = speed < self.shared
        # a ring of two uses its link both ways, which are two
        both = 2 if groups.shape[1] == 2 and not chain else 1
        return np.where(slow, speed / max(1.0, slow.sum() / both), speed), delay
