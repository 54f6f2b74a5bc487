"""Costs of communication on a probed machine, and the memory of its ranks, as ``weft probe`` measured them.

The closed form of :mod:`weft.planner.cost` knows devices that compute while links move data. On a CPU the ranks share
cores and memory, and a collective is work of the same cores. So here the work of a rehearsed step
(:mod:`weft.rehearse.rehearsed_step`) is timed as it runs, what it sends is looked up in measured curves, and the ranks'
programs run against each other on a clock in which ranks that are busy share the cores. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.rehearse.journal import Event
from weft.rehearse.worker_links import WorkerLinks


@dataclass(frozen=True)
class Setting:
    """Measurements of a machine while ``ranks`` processes with ``threads`` threads each do the same work.

    Attributes:
        ``collectives``: rows ``[bytes, cpu seconds, further seconds]`` by collective and group size, such as
            ``reduce.2``. ``message.2`` has those of a message.
        ``memory``: resident bytes of a rank without tensors (``plain``), resident bytes per byte of tensors
            (``per_byte``), and bytes that are added with ``tp`` or ``cp`` (``functional``), ``dp`` or ``shard``
            (``sharded``), and ``pp`` (``message``).
        ``step``: processor seconds of a small model's step. Rehearsed work is scaled by it, because ranks that are busy
            at once take caches and memory from each other.
    """

    ranks: int
    threads: int
    collectives: Mapping[str, Sequence[Sequence[float]]]
    memory: Mapping[str, float]
    step: float

    def collective(self, e: Event) -> tuple[float, float]:
        """Return ``(cpu seconds of each rank, further seconds)`` that the recorded collective ``e`` takes.

        The further seconds are those for which ranks wait, without need of a core.
        """
        size = len(e.ranks)
        known = sorted(
            int(name.partition(".")[2])
            for name in self.collectives
            if name.startswith(e.name)
        )
        if size <= 1 or not known:
            return 0.0, 0.0
        points = self.collectives[f"{e.name}.{min(known, key=lambda n: abs(n - size))}"]
        return curve(points, e.bytes), max(0.0, curve(points, e.bytes, 2))

    def message(self, size: float) -> tuple[float, float]:
        """Return ``(cpu seconds, further seconds)`` of sending, or of receiving, a message of ``size`` bytes."""
        points = self.collectives["message.2"]
        return curve(points, size) / 2, max(0.0, curve(points, size, 2))

    def resident(self, layout: Layout, peak: float) -> float:
        """Return the peak resident bytes of a rank's process under ``layout``. ``peak``: largest number of bytes of the
        rank's tensors.
        """
        uses = {
            "functional": layout.tp * layout.cp,
            "sharded": layout.dp * layout.shard,
            "message": layout.pp,
        }
        more = sum(
            self.memory.get(kind, 0.0) for kind, size in uses.items() if size > 1
        )
        return self.memory["plain"] + self.memory["per_byte"] * peak + more


@dataclass(frozen=True)
class ProbedMachine:
    """Measurements that ``weft probe`` has made of a machine.

    ``cores``: number of cores. ``settings``: the measurements by number of ranks on the machine. ``links``: the
    links between the ranks of the largest setting, None if they were not measured.
    """

    cores: int
    settings: Mapping[int, Setting]
    links: WorkerLinks | None = None  # of the largest setting

    @classmethod
    def of(cls, calibration: Mapping[str, Any]) -> ProbedMachine:
        """Read the ``calibration`` table of a cluster file that ``weft probe`` has written."""
        if any("step" not in s for s in calibration["settings"].values()):
            raise UsageError(
                "the cluster file is of an older weft probe; run weft probe again"
            )
        settings = {int(n): Setting(**s) for n, s in calibration["settings"].items()}
        table = calibration.get("links")
        return cls(
            int(calibration["cores"]),
            dict(sorted(settings.items())),
            WorkerLinks.of(table) if table else None,
        )

    def uneven(self, ranks: int) -> WorkerLinks | None:
        """Return the links among ``ranks`` ranks if some are much slower than others.

        Returns None if links are alike, or were measured for another number of ranks.
        """
        return (
            self.links
            if self.links is not None and len(self.links) == ranks and self.links.uneven
            else None
        )

    def setting(self, ranks: int) -> Setting:
        """Return the measurements that fit ``ranks`` ranks: those with the smallest number of ranks that is at least
        ``ranks``, else those with the largest number.
        """
        return self.settings[
            min((n for n in self.settings if n >= ranks), default=max(self.settings))
        ]


def curve(points: Sequence[Sequence[float]], x: float, column: int = 1) -> float:
    """Interpolate ``column`` of ``points`` at ``x``, linearly in logarithms; extrapolate beyond the ends.

    ``points``: rows of a table whose column 0 holds the ascending values of ``x``.
    """
    if x <= points[0][0] or len(points) == 1:
        return points[0][column]
    i = min(int(np.searchsorted([p[0] for p in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = (
        (points[j][0], max(points[j][column], 1e-9)) for j in (i - 1, i)
    )
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    if x > x1:
        slope = 1.0  # as many times longer as it is larger
    return float(y1 * (x / x1) ** slope)
