"""A machine at hand: step time and memory of a layout from what ``weft probe`` measured on it.

The closed form of :mod:`weft.planner.cost` knows devices that compute while links move data. On a CPU the ranks share
cores and memory, a collective is work of the same cores, and small operators cost what starting them costs. So here
every operator of a rehearsed step (:mod:`weft.train.rehearse`) is looked up in measured curves, and the ranks' programs
run against each other on a clock in which ranks that are busy share the cores. Times are seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

#: Collectives by what they do: the names under which PyTorch dispatches them.
COLLECTIVES = {
    "all_reduce": "reduce", "allreduce_": "reduce", "allreduce_coalesced_": "reduce",
    "all_gather_into_tensor": "gather", "_allgather_base_": "gather", "allgather_": "gather", "broadcast_": "gather",
    "reduce_scatter_tensor": "scatter", "_reduce_scatter_base_": "scatter",
    "alltoall_": "exchange", "alltoall_base_": "exchange", "all_to_all_single": "exchange",
}  # fmt: skip
#: Of those, the ones that PyTorch's functional collectives or FSDP2 make: what surrounds them costs differently.
FUNCTIONAL = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "alltoall_")
SHARDED = ("_allgather_base_", "_reduce_scatter_base_")

PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "_linear_pointwise": (0, 1), "bmm": (0, 1)}
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention_backward",
}


class Happening(Protocol):
    """An event of a rehearsal (:class:`weft.train.rehearse.Event`, which the planner does not import)."""

    @property
    def kind(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def number(self) -> int: ...
    @property
    def turned(self) -> bool: ...


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

    @classmethod
    def of(cls, calibration: Mapping[str, Any]) -> Local:
        """From the ``calibration`` table of a cluster file that ``weft probe`` has written."""
        found = {int(n): Setting(**s) for n, s in calibration["settings"].items()}
        return cls(int(calibration["cores"]), dict(sorted(found.items())))

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

    def op(self, e: Happening) -> float:
        """Seconds of an operator inside a step."""
        return self.setting.overhead["op"] + self.work(e) * self.setting.slow

    def work(self, e: Happening) -> float:
        """Seconds of an operator inside a step beyond those of starting it."""
        fetched = self.setting.cold * e.bytes if e.name in PRODUCTS else 0.0
        return max(0.0, self.alone(e) - self.least) + fetched

    def alone(self, e: Happening) -> float:
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

    def collective(self, e: Happening) -> tuple[float, float]:
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


@dataclass(frozen=True)
class Do:
    """A piece of a rank's program: ``cpu`` seconds of work, after ``key`` has happened, before ``wait`` seconds.

    ``kind``: ``work``, ``meet`` (with ``members``), ``post`` or ``take`` a message.
    """

    kind: str
    cpu: float
    wait: float = 0.0
    key: tuple[Any, ...] = ()
    members: tuple[int, ...] = ()


def program(rank: int, events: Sequence[Happening], clerk: Clerk) -> list[Do]:
    """What ``rank`` does in a step, with its costs."""
    found: list[Do] = []
    cpu = clerk.setting.overhead["step"]
    met: dict[tuple[int, ...], int] = defaultdict(int)
    sent: dict[tuple[int, ...], int] = defaultdict(int)
    asked: dict[int, Do] = {}

    def flush() -> None:
        nonlocal cpu
        if cpu:
            found.append(Do("work", cpu))
            cpu = 0.0

    for e in events:
        if e.kind == "op":
            cpu += clerk.op(e)
        elif e.kind == "later":
            cpu += clerk.collective(e)[0]
        elif e.kind == "collective":
            flush()
            work, wait = clerk.collective(e)
            met[e.ranks] += 1
            found.append(Do("meet", work, wait, (e.ranks, met[e.ranks]), e.ranks))
        elif e.kind in ("send", "recv"):
            peer, tag = e.ranks
            ends = (rank, peer, tag) if e.kind == "send" else (peer, rank, tag)
            sent[ends] += 1
            work, wait = clerk.message(e.bytes)
            cpu += clerk.setting.overhead["message"]
            if e.kind == "send":
                flush()
                found.append(Do("post", work, wait, (*ends, sent[ends])))
            else:
                asked[e.number] = Do("take", work, 0.0, (*ends, sent[ends]))
        elif e.kind == "wait" and e.name == "recv" and e.number in asked:
            flush()
            found.append(asked.pop(e.number))
    flush()
    return found


def run(programs: Sequence[Sequence[Do]], cores: float, threads: int = 1) -> float:
    """Seconds until all ranks are through, if those that are busy share the cores evenly.

    :mod:`weft.schedule.simulate` has a device per rank and moves that cost no compute, and so no way to say this.
    """
    count = len(programs)
    at, left = [0] * count, [0.0] * count
    begun = [False] * count
    until = [0.0] * count  # asleep before
    arrived: dict[Any, set[int]] = defaultdict(set)
    there: dict[Any, float] = {}  # messages, and when they arrive
    now = 0.0
    while True:
        moved = True
        while moved:
            moved = False
            for r in range(count):
                while at[r] < len(programs[r]) and until[r] <= now and left[r] <= 0:
                    do = programs[r][at[r]]
                    if begun[r]:  # its work is done
                        if do.kind == "post":
                            there[do.key] = now + do.wait
                        elif do.wait:
                            until[r] = now + do.wait
                        at[r], begun[r], moved = at[r] + 1, False, True
                        continue
                    if do.kind == "meet":
                        if r not in arrived[do.key]:
                            arrived[do.key].add(r)
                            moved = True
                        if len(arrived[do.key]) < len(do.members):
                            break
                    if do.kind == "take" and there.get(do.key, math.inf) > now + 1e-12:
                        break
                    begun[r], left[r], moved = True, max(do.cpu, 1e-12), True
        busy = [r for r in range(count) if left[r] > 0]
        if not busy and all(at[r] >= len(programs[r]) for r in range(count)):
            return max([now, *until])
        rate = min(1.0, cores / (threads * len(busy))) if busy else 1.0
        ahead = [now + left[r] / rate for r in busy] + [t for t in until if t > now]
        ahead += [t for t in there.values() if t > now + 1e-12]
        if not ahead:
            stuck = [(r, programs[r][at[r]]) for r in range(count) if at[r] < len(programs[r])]
            raise ValueError(f"these ranks wait for each other: {stuck}")
        then = min(ahead)
        for r in busy:
            left[r] -= (then - now) * rate
            if left[r] < 1e-12:
                left[r] = 0.0
        now = then


@dataclass(frozen=True)
class Prediction:
    """``seconds`` of a step; ``memory``: peak resident bytes per rank; ``busy``: cpu seconds per rank.

    ``parts``: seconds of all ranks together, by cause, as if each had a core.
    """

    seconds: float
    memory: tuple[float, ...]
    busy: tuple[float, ...]
    parts: Mapping[str, float]


def predict(local: Local, rehearsed: Sequence[tuple[Sequence[Happening], int]]) -> Prediction:
    """From every rank's rehearsed events and its peak bytes of tensors."""
    world = len(rehearsed)
    setting = local.setting(world)
    clerk = Clerk(setting)
    programs = [program(r, events, clerk) for r, (events, _) in enumerate(rehearsed)]
    parts: dict[str, float] = defaultdict(float)
    for events, _ in rehearsed:
        for e in events:
            if e.kind == "op":
                kind = "products" if e.name in PRODUCTS else "attention" if e.name in ATTENTION else "memory"
                parts["launch"] += setting.overhead["op"]
                parts[kind] += clerk.op(e) - setting.overhead["op"]
            elif e.kind == "collective":
                parts["collectives"] += sum(clerk.collective(e))
            elif e.kind in ("send", "recv"):
                parts["messages"] += sum(clerk.message(e.bytes)) + setting.overhead["message"]
    seconds = run(programs, local.cores, setting.threads)
    busy = tuple(sum(do.cpu for do in p) for p in programs)
    memory = tuple(resident(setting, events, peak) for events, peak in rehearsed)
    return Prediction(seconds, memory, busy, dict(parts))


def resident(setting: Setting, events: Sequence[Happening], peak: float) -> float:
    """Most bytes resident of a rank whose tensors take ``peak`` bytes at most."""
    known = setting.memory
    uses = {
        "sharded": any(e.name in SHARDED for e in events),
        "functional": any(e.name in FUNCTIONAL and len(e.ranks) > 1 and e.bytes > 2**10 for e in events),
        "message": any(e.kind == "send" for e in events),
    }
    return known["plain"] + known["per_byte"] * peak + sum(known.get(kind, 0.0) for kind, used in uses.items() if used)
