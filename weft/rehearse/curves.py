"""What a rehearsed step costs on a machine at hand: the curves that ``weft probe`` measured, looked up.

The closed form of :mod:`weft.planner.cost` knows devices that compute while links move data. On a CPU the ranks share
cores and memory, a collective is work of the same cores, and small operators cost what starting them costs. So here
every operator of a rehearsed step (:mod:`weft.rehearse.step`) is looked up in measured curves, and the ranks' programs
run against each other on a clock in which ranks that are busy share the cores. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.rehearse.links import Links
from weft.rehearse.step import Event

#: Collectives by what they do: the names under which PyTorch dispatches them.
COLLECTIVES = {
    "all_reduce": "reduce", "allreduce_": "reduce", "allreduce_coalesced_": "reduce",
    "all_gather_into_tensor": "gather", "_allgather_base_": "gather", "allgather_": "gather", "broadcast_": "gather",
    "reduce_scatter_tensor": "scatter", "_reduce_scatter_base_": "scatter",
    "alltoall_": "exchange", "alltoall_base_": "exchange", "all_to_all_single": "exchange",
}  # fmt: skip
#: Of those, the ones of PyTorch's functional collectives or of sharded state: what surrounds them costs differently.
FUNCTIONAL = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "alltoall_")
SHARDED = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")

PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "_linear_pointwise": (0, 1), "bmm": (0, 1)}
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention_backward",
}


@dataclass(frozen=True)
class Setting:
    """What was measured while ``ranks`` processes of ``threads`` threads each were busy with the same.

    ``ops``: ``{name: [[bytes, seconds]]}``; ``products``: ``{"linear" | "back" | "mm": [[rows, out, in, seconds]]}``
    on a full grid; ``attention``: ``[[scores, seconds]]`` by direction; ``collectives``: ``{"reduce.2": [[bytes, cpu
    seconds, seconds besides]]}`` by group size, ``message.2`` alike; ``overhead``: seconds of the framework per
    ``op``, ``functional`` and ``sharded`` collective, ``message`` and ``step``; ``memory``: resident bytes of a rank
    without tensors (``plain``, and more by the same kinds) and ``per_byte`` of tensors; ``slow``: factor on the
    operators of a whole step, beyond what they cost one by one; ``cold``: seconds per byte from memory, as operands of
    products in a step come from there.
    """

    ranks: int
    threads: int
    ops: Mapping[str, Sequence[Sequence[float]]]
    products: Mapping[str, Sequence[Sequence[float]]]
    attention: Mapping[str, Sequence[Sequence[float]]]
    collectives: Mapping[str, Sequence[Sequence[float]]]
    overhead: Mapping[str, float]
    memory: Mapping[str, float]
    slow: float = 1.0
    cold: float = 0.0


@dataclass(frozen=True)
class Local:
    """A probed machine: ``settings`` by the number of ranks on it."""

    cores: int
    settings: Mapping[int, Setting]
    links: Links | None = None  # of the largest setting

    @classmethod
    def of(cls, calibration: Mapping[str, Any]) -> Local:
        """From the ``calibration`` table of a cluster file that ``weft probe`` has written."""
        found = {int(n): Setting(**s) for n, s in calibration["settings"].items()}
        table = calibration.get("links")
        return cls(int(calibration["cores"]), dict(sorted(found.items())), Links.of(table) if table else None)

    def uneven(self, ranks: int) -> Links | None:
        """The links of a run of so many ranks, if some of them are much slower than others."""
        return self.links if self.links is not None and len(self.links) == ranks and self.links.uneven else None

    def setting(self, ranks: int) -> Setting:
        """The measured setting nearest above ``ranks``, else the largest."""
        return self.settings[min((n for n in self.settings if n >= ranks), default=max(self.settings))]


def curve(points: Sequence[Sequence[float]], x: float, column: int = 1) -> float:
    """``column`` at ``x`` (column 0, ascending), between points and beyond them along straight lines in logarithms."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][column]
    i = min(int(np.searchsorted([p[0] for p in points], x)), len(points) - 1)
    (x0, y0), (x1, y1) = ((points[j][0], max(points[j][column], 1e-9)) for j in (i - 1, i))
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    if x > x1:
        slope = 1.0  # as many times longer as it is larger
    return float(y1 * (x / x1) ** slope)


class Grid:
    """Seconds of a product by ``(rows, out, in)``: linear in logarithms on a grid, constant rate beyond it."""

    def __init__(self, points: Sequence[Sequence[float]]) -> None:
        self.axes = [sorted({p[i] for p in points}) for i in range(3)]
        known = {tuple(p[:3]): p[3] for p in points}
        shape = [len(axis) for axis in self.axes]
        self.rate = np.zeros(shape)  # log of multiplications per second
        for at in np.ndindex(*shape):
            key = tuple(axis[i] for axis, i in zip(self.axes, at, strict=True))
            self.rate[at] = math.log(math.prod(key) / known[key])

    def __call__(self, *size: float) -> float:
        rate = self.rate
        for axis, x in zip(self.axes, size, strict=True):
            logs = np.log(axis)
            at = float(np.interp(math.log(max(x, 1)), logs, np.arange(len(axis))))
            i = min(int(at), len(axis) - 2) if len(axis) > 1 else 0
            share = at - i
            rate = rate[i] * (1 - share) + rate[min(i + 1, len(axis) - 1)] * share
        return math.prod(size) / math.exp(float(rate))


@dataclass
class Clerk:
    """Looks up what an event costs in one setting."""

    setting: Setting
    grids: dict[str, Grid] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grids = {name: Grid(points) for name, points in self.setting.products.items()}
        # What any operator costs in a loop of its own: that much of starting it is in the curves.
        self.least = min(points[0][1] for points in self.setting.ops.values())

    def op(self, e: Event) -> float:
        """Seconds of an operator inside a step."""
        return self.setting.overhead["op"] + self.work(e) * self.setting.slow

    def work(self, e: Event) -> float:
        """Seconds of an operator inside a step beyond those of starting it."""
        fetched = self.setting.cold * e.bytes if e.name in PRODUCTS else 0.0
        return max(0.0, self.alone(e) - self.least) + fetched

    def alone(self, e: Event) -> float:
        """Seconds of an operator by itself."""
        if e.name in PRODUCTS and all(len(e.shapes) > i for i in PRODUCTS[e.name]):
            a, b = (e.shapes[i] for i in PRODUCTS[e.name])
            if e.name == "_linear_pointwise":
                weight = e.shapes[-1] if len(e.shapes) > 2 else b
                return self.grids["back" if e.turned else "linear"](a[0], weight[0], a[1])
            batch = a[0] if len(a) == 3 else 1
            return batch * self.grids["mm"](a[-2], b[-1], a[-1])
        if e.name in ATTENTION:
            backward = e.name.endswith("backward")
            q, k = e.shapes[1 if backward else 0], e.shapes[2 if backward else 1]
            scores = q[0] * q[1] * q[2] * max(k[2], 1) * q[3]
            return curve(self.setting.attention[ATTENTION[e.name]], scores)
        points = self.setting.ops.get(e.name) or self.setting.ops.get(e.name.rstrip("_")) or self.setting.ops["mul"]
        return curve(points, e.bytes)

    def collective(self, e: Event) -> tuple[float, float]:
        """``(cpu seconds of each rank, seconds besides)`` of a collective."""
        kind, size = COLLECTIVES.get(e.name, "reduce"), len(e.ranks)
        known = sorted(int(name.partition(".")[2]) for name in self.setting.collectives if name.startswith(kind))
        if size <= 1 or not known:
            return self.setting.overhead["op"], 0.0
        nearest = min(known, key=lambda n: abs(n - size))
        points = self.setting.collectives[f"{kind}.{nearest}"]
        around = "functional" if e.name in FUNCTIONAL else "sharded" if e.name in SHARDED else "op"
        return curve(points, e.bytes) + self.setting.overhead[around], max(0.0, curve(points, e.bytes, 2))

    def message(self, size: float) -> tuple[float, float]:
        points = self.setting.collectives["message.2"]
        return curve(points, size) / 2, max(0.0, curve(points, size, 2))
