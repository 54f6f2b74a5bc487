"""Every layout of a model on a cluster, scored at once; the best, and why the others are out.

The candidates are one :class:`~weft.planner.cost.Plan` of arrays. What divides wrongly is never made; what does not
fit in memory is kept, so that it can be said what would make it fit.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import UsageError, nearest
from weft.planner.cost import CONTEXT, RECOMPUTE, SCHEDULES, Cost, Plan, step_time
from weft.planner.engine import Engine
from weft.planner.machine import Cluster, Machine
from weft.planner.memory import Memory, peak_memory
from weft.planner.shape import Shape

#: Share of device memory that a plan may use: what is left absorbs the error of the memory model.
USABLE = 0.93
#: Fields of a plan that the search chooses, in the order in which they are told.
CHOSEN = (
    "dp", "shard", "zero", "tp", "cp", "context", "pp", "schedule", "virtual", "ep", "micro_batch", "recompute",
)  # fmt: skip
_NAMES = {"context": CONTEXT, "schedule": SCHEDULES, "recompute": RECOMPUTE}


@dataclass(frozen=True)
class Pin:
    """A demand of the user: ``field`` ``sign`` ``value``, e.g. ``tp <= 8``."""

    field: str
    sign: str
    value: int

    @classmethod
    def parse(cls, text: str) -> "Pin":
        found = re.fullmatch(
            r"\s*(\w+)\s*(<=|>=|=)\s*([\w-]+)\s*", text.replace("at most", "<=").replace("at least", ">=")
        )
        if not found:
            raise UsageError(f"--pin {text!r} is not of the form field=value, field<=value or field>=value")
        field, sign, value = found.groups()
        if field not in CHOSEN:
            raise UsageError(f"--pin {text!r}: unknown field {field!r}; {nearest(field, CHOSEN)}")
        names = _NAMES.get(field, ())
        if names and value not in names:
            raise UsageError(f"--pin {text!r}: {field} cannot be {value!r}; {nearest(value, names)}")
        if not names and not value.isdigit():
            raise UsageError(f"--pin {text!r}: {value!r} is not a number")
        return cls(field, sign, names.index(value) if names else int(value))

    def holds(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        return {"=": values == self.value, "<=": values <= self.value, ">=": values >= self.value}[self.sign]

    def __str__(self) -> str:
        return f"{self.field} {self.sign} {tell(self.field, self.value)}"


@dataclass(frozen=True)
class Found:
    """All candidates with their costs (arrays), and the order of those that fit, fastest first."""

    shape: Shape
    machine: Machine
    plans: Plan
    cost: Cost
    memory: Memory
    order: NDArray[np.int64]

    @property
    def count(self) -> int:
        return len(self.plans.tp)

    def plan(self, i: int) -> Plan:
        return at(self.plans, i)

    def seconds(self, i: int) -> float:
        return float(self.cost.total[i])

    def gib(self, i: int) -> float:
        return float(self.memory.total[i]) / 2**30

    def utilisation(self, i: int) -> float:
        """Model flops over the peak of the chosen precision."""
        plan = self.plan(i)
        flops = self.shape.flops_per_token(plan.seq) * plan.batch * plan.seq
        return float(flops / (self.seconds(i) * plan.world * self.machine.peak))

    def rejected(self, count: int) -> list[str]:
        """The fastest layouts that do not fit: what they lack and the nearest layout that has it."""
        limit = float(self.machine.memory) * USABLE
        total = np.asarray(self.cost.total)
        over = np.flatnonzero(np.asarray(self.memory.total) > limit)
        if len(self.order):
            over = over[total[over] < total[self.order[0]]]
        over = over[np.argsort(total[over])][:count]
        return [self._why(int(i)) for i in over]

    def _why(self, i: int) -> str:
        split = at(self.memory, i)
        largest = max((f.name for f in fields(split)), key=lambda name: float(getattr(split, name)))
        size = float(getattr(split, largest)) / 2**30
        text = f"{describe(self.plan(i))}: the fullest rank needs {self.gib(i):.0f} of "
        text += f"{float(self.machine.memory) * USABLE / 2**30:.0f} GiB: {largest} {size:.0f}"
        if not len(self.order):
            return text
        table = np.stack([np.broadcast_to(getattr(self.plans, name), self.count) for name in CHOSEN])
        # The data axes follow from the others: they do not count as changes.
        changes = (table[2:, self.order] != table[2:, [i]]).sum(0)
        best = int(self.order[np.lexsort((np.asarray(self.cost.total)[self.order], changes))[0]])
        new = [
            f"{name}={tell(name, table[k, best])}"
            for k, name in enumerate(CHOSEN)
            if k > 1 and table[k, best] != table[k, i]
        ]
        slower = 100 * (self.seconds(best) / self.seconds(i) - 1)
        return f"{text}; {', '.join(new)}: {self.gib(best):.0f} GiB, {slower:+.0f} % time"


def at(columns: Any, i: int) -> Any:
    """One row of a dataclass of arrays."""
    return replace(columns, **{f.name: float(np.ravel(v)[i if np.size(v) > 1 else 0])
                               for f in fields(columns) for v in [getattr(columns, f.name)]})  # fmt: skip


def tell(name: str, value: float) -> str:
    return _NAMES[name][int(value)] if name in _NAMES else f"{value:.0f}"


def describe(plan: Plan) -> str:
    """A layout in one line, without what is off."""
    parts = [f"{name}={tell(name, getattr(plan, name))}" for name in ("pp", "dp", "shard", "cp", "ep", "tp")
             if getattr(plan, name) > 1]  # fmt: skip
    if plan.shard > 1:
        parts.append(f"zero={plan.zero:.0f}")
    if plan.cp > 1:
        parts.append(tell("context", plan.context))
    if plan.pp > 1:
        parts.append(tell("schedule", plan.schedule) + (f" v={plan.virtual:.0f}" if plan.virtual > 1 else ""))
    parts.append(f"micro_batch={plan.micro_batch:.0f}")
    if plan.recompute:
        parts.append(f"recompute={tell('recompute', plan.recompute)}")
    return " ".join(parts)


def search(
    shape: Shape, cluster: Cluster, engine: Engine, batch: int, seq: int, bits: int = 16, pins: Sequence[Pin] = ()
) -> Found:
    """Score every layout. Raises :class:`UsageError` saying which demand rules out everything and what is nearest."""
    machine = cluster.machine(bits)
    table = np.array(list(_candidates(shape, machine, cluster.count, batch, seq)), dtype=float).T
    if not table.size:
        raise UsageError(
            f"no layout of {cluster.count} devices divides {batch} sequences, {shape.layers:.0f} layers and "
            f"{shape.kv_heads:.0f} key/value heads; the nearest batch is a multiple of the devices"
        )
    for pin in pins:
        kept = pin.holds(table[CHOSEN.index(pin.field)])
        if not kept.any():
            values = sorted({tell(pin.field, v) for v in table[CHOSEN.index(pin.field)]}, key=lambda t: (len(t), t))
            raise UsageError(f"pin {pin} rules out every layout that is left; {pin.field} can be {', '.join(values)}")
        table = table[:, kept]
    plans = Plan(**dict(zip(CHOSEN, table, strict=True)), batch=batch, seq=seq, bits=bits)
    cost = step_time(shape, machine, plans, engine)
    memory = peak_memory(shape, plans, engine)
    total = np.asarray(cost.total)
    fit = np.flatnonzero(np.asarray(memory.total) <= machine.memory * USABLE)
    found = Found(shape, machine, plans, cost, memory, fit[np.argsort(total[fit], kind="stable")])
    if not len(fit):
        least = int(np.asarray(memory.total).argmin())
        held = ", ".join(f"{f.name} {float(getattr(at(memory, least), f.name)) / 2**30:.0f}" for f in fields(memory))
        raise UsageError(
            f"memory rules out all {found.count} layouts: the leanest ({describe(found.plan(least))}) needs "
            f"{found.gib(least):.0f} of {machine.memory * USABLE / 2**30:.0f} GiB per rank ({held}); take more "
            f"devices, a smaller batch or a shorter sequence"
        )
    return found


def _divisors(n: int, most: float = math.inf) -> list[int]:
    return [d for d in range(1, int(min(n, most)) + 1) if n % d == 0]


def _candidates(shape: Shape, machine: Machine, count: int, batch: int, seq: int) -> Iterator[tuple[float, ...]]:
    """Rows of :data:`CHOSEN`: everything that divides."""
    heads, kv, layers = int(shape.heads), int(shape.kv_heads), int(shape.layers)
    domain = int(machine.domain)
    for tp in _divisors(count, min(domain, kv, 64)):
        if heads % tp or kv % tp:
            continue
        for pp in _divisors(count // tp, layers):
            for cp in _divisors(count // tp // pp, max(1, seq // 1024)):
                data = count // tp // pp // cp
                if seq % (cp * tp) or batch % data:
                    continue
                share = batch // data
                micro = [b for b in (1, 2, 4, 8, 16, 32) if share % b == 0 and b * seq // cp <= 65536] or [1]
                contexts = [0, 1] if cp > 1 and kv // tp % cp == 0 else [0]
                inside = max(1, domain // (tp * cp))
                sharding = [(data, 1, 0)] if data == 1 else [(1, data, 1), (1, data, 3)]
                if 1 < inside < data and data % inside == 0:
                    sharding.append((data // inside, inside, 3))
                experts = [e for e in _divisors(int(shape.experts or 1), data * cp * tp) if (data * cp * tp) % e == 0]
                for b in micro:
                    for schedule, virtual in _schedules(pp, share // b, layers):
                        for dp, shard, zero in sharding:
                            for context in contexts:
                                for ep in experts:
                                    for recompute in range(3):
                                        yield (
                                            dp,
                                            shard,
                                            zero,
                                            tp,
                                            cp,
                                            context,
                                            pp,
                                            schedule,
                                            virtual,
                                            ep,
                                            b,
                                            recompute,
                                        )


def _schedules(pp: int, microbatches: int, layers: int) -> list[tuple[int, int]]:
    """``(schedule, virtual)`` worth looking at for a pipeline of ``pp`` ranks."""
    if pp == 1:
        return [(0, 1)]
    if microbatches < pp:
        return [(0, 1)]
    looped = [
        v
        for v in (2, 3, 4, 6, 8)
        if layers // (pp * v) >= 1 and (layers % (pp * v) == 0 or (layers + 2) % (pp * v) == 0)
    ]
    interleaved = SCHEDULES.index("interleaved-1f1b")
    return [(0, 1), (SCHEDULES.index("zb-h1"), 1), *((interleaved, v) for v in looped if microbatches % pp == 0)]
