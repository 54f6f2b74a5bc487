"""Every layout of a model on a cluster, scored at once; the best, and why the others are out.

The candidates are one :class:`~weft.planner.cost.Plan` of arrays. What divides wrongly is never made; what does not
fit in memory is kept, so that it can be said what would make it fit.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import UsageError, nearest
from weft.planner.candidates import CHOSEN, Refused, Rules
from weft.planner.cost import CONTEXT, RECOMPUTE, SCHEDULES, Cost, Plan, step_time
from weft.planner.engine import Engine
from weft.planner.machine import Cluster, Machine
from weft.planner.memory import Memory, peak_memory
from weft.planner.shape import Shape

#: Share of device memory that a plan may use: what is left absorbs the error of the memory model.
USABLE = 0.93
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
    engine: Engine
    plans: Plan
    cost: Cost
    memory: Memory
    order: NDArray[np.int64]
    refused: list[Refused]

    @property
    def count(self) -> int:
        return len(self.plans.tp)

    def plan(self, i: int) -> Plan:
        return at(self.plans, i)

    def seconds(self, i: int) -> float:
        return float(self.cost.total[i])

    def gib(self, i: int) -> float:
        return float(self.memory.total[i]) / 2**30

    def rejected(self, count: int) -> list["Rejected"]:
        """The fastest layouts that do not fit: what they lack and the nearest layout that has it."""
        limit = float(self.machine.memory) * USABLE
        total = np.asarray(self.cost.total)
        over = np.flatnonzero(np.asarray(self.memory.total) > limit)
        if len(self.order):
            over = over[total[over] < total[self.order[0]]]
        return [self._rejected(int(i)) for i in over[np.argsort(total[over])][:count]]

    def _rejected(self, i: int) -> "Rejected":
        split = at(self.memory, i)
        largest = max((f.name for f in fields(split)), key=lambda name: float(getattr(split, name)))
        limit = float(self.machine.memory) * USABLE / 2**30
        rejected = Rejected(self.plan(i), self.gib(i), limit, largest, float(getattr(split, largest)) / 2**30)
        if not len(self.order):
            return rejected
        table = np.stack([np.broadcast_to(getattr(self.plans, name), self.count) for name in CHOSEN])
        # The data axes follow from the others: they do not count as changes.
        changes = (table[2:, self.order] != table[2:, [i]]).sum(0)
        best = int(self.order[np.lexsort((np.asarray(self.cost.total)[self.order], changes))[0]])
        new = [
            f"{name}={tell(name, table[k, best])}"
            for k, name in enumerate(CHOSEN)
            if k > 1 and table[k, best] != table[k, i]
        ]
        slower = self.seconds(best) / self.seconds(i) - 1
        return replace(rejected, fix=", ".join(new), fixed_gib=self.gib(best), slower=slower)


@dataclass(frozen=True)
class Rejected:
    """A layout that needs ``gib`` of ``limit`` on its fullest rank, ``held`` GiB of it ``largest``, and the nearest
    layout that fits: what it does otherwise, its GiB and how much slower it is (share)."""

    plan: Plan
    gib: float
    limit: float
    largest: str
    held: float
    fix: str = ""
    fixed_gib: float = 0.0
    slower: float = 0.0

    def __str__(self) -> str:
        text = f"{describe(self.plan)}: the fullest rank needs {self.gib:.0f} of {self.limit:.0f} GiB: "
        text += f"{self.largest} {self.held:.0f}"
        return text + (f"; {self.fix}: {self.fixed_gib:.0f} GiB, {self.slower:+.0%} time" if self.fix else "")


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
    rules = Rules(shape, machine, cluster.count, batch, seq)
    table = np.array(list(rules.candidates()), dtype=float).T
    if not table.size:
        raise UsageError(f"no layout of {cluster.count} devices is possible: " + "; ".join(
            f"{r.rule} ({r.example}; nearest: {r.fix})" for r in rules.refused()))  # fmt: skip
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
    found = Found(
        shape, machine, engine, plans, cost, memory, fit[np.argsort(total[fit], kind="stable")], rules.refused()
    )
    if not len(fit):
        least = int(np.asarray(memory.total).argmin())
        held = ", ".join(f"{f.name} {float(getattr(at(memory, least), f.name)) / 2**30:.0f}" for f in fields(memory))
        raise UsageError(
            f"memory rules out all {found.count} layouts: the leanest ({describe(found.plan(least))}) needs "
            f"{found.gib(least):.0f} of {machine.memory * USABLE / 2**30:.0f} GiB per rank ({held}); take more "
            f"devices, a smaller batch or a shorter sequence"
        )
    return found
