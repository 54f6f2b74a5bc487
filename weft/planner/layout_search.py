"""Scores every layout of a model on a cluster at once: the best layouts, and why others are excluded.

The candidates are one :class:`~weft.planner.cost.Plan` of arrays. Layouts that break a rule of divisibility are not
created. Layouts that do not fit in memory are kept, to explain what would make them fit.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.errors import UsageError, nearest
from weft.planner.candidates import (
    ADDED,
    CHOSEN,
    FIRST,
    SET,
    Refused,
    Rules,
    join_splits,
    take,
    variants,
)
from weft.planner.cost import (
    AWAY,
    CONTEXT,
    EMBEDDING,
    FILE,
    HOST,
    IN_PARTS,
    OVERLAP,
    RECOMPUTE,
    Cost,
    Plan,
    schedules,
    step_time,
)
from weft.planner.engine_constants import EngineConstants
from weft.planner.machine import Cluster, Machine
from weft.planner.memory import RankMemory, peak_memory
from weft.planner.tiers import planned_time, room_away
from weft.recipe import PLACES
from weft.shapes.shape import Shape

#: Share of device memory that a plan may use: what is left absorbs the error of the memory model.
USABLE = 0.93
#: What a plan with an addition may take of the time of the best without; less where its times were never measured.
WORTH = {"secondary": 0.98} | dict.fromkeys((*AWAY, *IN_PARTS), 0.9)
#: How many kinds of layouts a recipe may refuse until whoever looks for the fastest ones gives up, and until each
#: further user of a search does; an answer takes about a millisecond.
MOST_REFUSED, MOST_BESIDE = 1000, 200
NAMES = {
    "context": CONTEXT,
    "schedule": schedules(),
    "recompute": RECOMPUTE,
    "embedding": EMBEDDING,
    "overlap": OVERLAP,
} | dict.fromkeys(AWAY, PLACES)


@dataclass(frozen=True)
class Pin:
    """A user's demand on the layout: ``field`` ``sign`` ``value``, e.g. ``tp <= 8``.

    ``field``: a field of :class:`Plan`. ``sign``: ``=``, ``<=`` or ``>=``. ``value``: a number, or the index of a name,
    such as that of a schedule.
    """

    field: str
    sign: str
    value: int

    @classmethod
    def parse(cls, text: str) -> "Pin":
        signs = text.replace("at most", "<=").replace("at least", ">=")
        match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|=)\s*([\w-]+)\s*", signs)
        if not match:
            raise UsageError(
                f"--pin {text!r} is not of the form field=value, field<=value or field>=value"
            )
        field, sign, value = match.groups()
        if field not in CHOSEN:
            raise UsageError(
                f"--pin {text!r}: unknown field {field!r}; {nearest(field, CHOSEN)}"
            )
        names = NAMES.get(field, ())
        if names and value not in names:
            raise UsageError(
                f"--pin {text!r}: {field} cannot be {value!r}; {nearest(value, names)}"
            )
        if not names and not value.isdigit():
            raise UsageError(f"--pin {text!r}: {value!r} is not a number")
        number = names.index(value) if names else int(value)
        if (
            field == "tiles" and number == 1
        ):  # a weight that is whole, as memory.tiles says it
            number = 0
        return cls(field, sign, number)

    def holds(self, values: NDArray[np.float64]) -> NDArray[np.bool_]:
        return {
            "=": values == self.value,
            "<=": values <= self.value,
            ">=": values >= self.value,
        }[self.sign]

    def __str__(self) -> str:
        return f"{self.field} {self.sign} {pin_text(self.field, self.value)}"


#: Demands that ask for whole copies of the state.
WHOLE = (Pin("zero", "=", 0), Pin("zero", "<=", 0), Pin("shard", "=", 1), Pin("shard", "<=", 1))  # fmt: skip


@dataclass
class AskBudget:
    """How often the recipe's rules may refuse what one user of a search asks about. ``purpose``: what the user looks
    for. ``most``: this number at the beginning. ``left``: what is left of it.
    """

    purpose: str
    most: int
    left: int


@dataclass(frozen=True)
class SearchResult:
    """All candidate layouts of a search, scored.

    Attributes:
        ``shape``, ``machine``, ``engine``: the model, the machine and the program's constants.
        ``plans``: the layouts, as one plan of arrays ``[candidates]``.
        ``cost``, ``memory``: seconds of a step, and bytes on the fullest rank, as arrays ``[candidates]``.
        ``order``: indices of the candidates that fit in memory, fastest first.
        ``refused``: rules of divisibility that exclude further layouts.
        ``refusal``: function that says why ``weft train`` would refuse a plan, given the plan and its
            ``vocab_barriers``; empty if it takes the plan.
        ``alike``: for each candidate the number of its group, ``[candidates]``; the rules answer alike about all of a
            group. None: each candidate is a group of its own.
        ``answers``: for each group that the rules were asked about, why ``weft train`` refuses it; empty if it does
            not.
        ``budget``: of the present user of the search.
        ``unasked``: budgets of the users who would have had to ask the rules more often than they may.
    """

    shape: Shape
    machine: Machine
    engine: EngineConstants
    plans: Plan
    cost: Cost
    memory: RankMemory
    order: NDArray[np.int64]
    refused: list[Refused]
    refusal: Callable[..., str] = lambda plan, barriers=0: ""
    alike: NDArray[np.int64] | None = None
    answers: dict[int, str] = field(default_factory=dict)
    budget: AskBudget = field(
        default_factory=lambda: AskBudget("layouts", MOST_REFUSED, MOST_REFUSED)
    )
    unasked: list[AskBudget] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.plans.tp)

    def plan(self, i: int) -> Plan:
        return at(self.plans, i)

    def seconds(self, i: int) -> float:
        return float(self.cost.total[i])

    def gib(self, i: int) -> float:
        return float(self.memory.total[i]) / 2**30

    def takes(self, i: int) -> bool:
        """Return whether ``weft train`` accepts the layout with the index ``i`` in :attr:`plans` together with the
        other settings of the user's recipe.

        Each user of the search (:meth:`for_purpose`) asks the recipe until it has refused a number of groups of
        layouts. For this user all others then count as refused, which :meth:`unasked_line` says.
        """
        group = i if self.alike is None else int(self.alike[i])
        if group not in self.answers:
            if not self.budget.left:
                if self.budget not in self.unasked:
                    self.unasked.append(self.budget)
                return False
            self.answers[group] = self.refusal(self.plan(i))
            self.budget.left -= bool(self.answers[group])
        return not self.answers[group]

    def for_purpose(self, purpose: str, first: bool = False) -> "SearchResult":
        """Return the search for a user that looks for ``purpose``. All users share the answers. ``first``: whether the
        recipe may refuse :data:`MOST_REFUSED` groups of layouts for this user, and not :data:`MOST_BESIDE` only.
        """
        most = MOST_REFUSED if first else MOST_BESIDE
        return replace(self, budget=AskBudget(purpose, most, most))

    def unasked_line(self) -> str:
        """Return a line that says in which looks the recipe was not asked about all layouts; "" if in none."""
        if not self.unasked:
            return ""
        ends = ", ".join(
            f"for {asked.purpose} after {asked.most:,} refused kinds"
            for asked in self.unasked
        )
        return f"the recipe refuses so many layouts that searches ended early: {ends}; --pin settings that it takes"

    def none_taken(self) -> str:
        """Return the line that says that the recipe takes none of the layouts that fit, and why."""
        groups = set(
            self.order.tolist()
            if self.alike is None
            else self.alike[self.order].tolist()
        )
        fastest = (
            f"fastest {len(self.answers):,} kinds of the "
            if groups - self.answers.keys()
            else ""
        )
        why, _ = Counter(filter(None, self.answers.values())).most_common(1)[0]
        return (
            f"the recipe takes none of the {fastest}{len(self.order):,} layouts that fit, such as "
            f"{describe(self.plan(int(self.order[0])))}; most often because {why}"
        )

    def first_taken(self, candidates: Iterable[int]) -> int | None:
        """Return the first of ``candidates``, indices of layouts, that ``weft train`` accepts (:meth:`takes`); None if
        it accepts none.
        """
        return next((int(i) for i in candidates if self.takes(int(i))), None)

    def rejected(self, count: int) -> list["Rejected"]:
        """Return up to ``count`` layouts that are faster than the best layout, but do not fit in memory.

        The fastest comes first. Each has the memory that it needs, and the most similar layout that fits.
        """
        total = np.asarray(self.cost.total)
        large = np.asarray(self.memory.total) > float(self.machine.memory) * USABLE
        over = np.flatnonzero(large & (total < total[self.order[0]]))
        quickest = (int(i) for i in over[np.argsort(total[over])])
        asking = self.for_purpose("faster layouts that do not fit")
        taken = islice(filter(asking.takes, quickest), count)
        return [asking._rejected(i) for i in taken]

    def _rejected(self, i: int) -> "Rejected":
        held, size = max(vars(at(self.memory, i)).items(), key=lambda part: part[1])
        columns = {name: getattr(self.plans, name) for name in SET}
        changes = np.sum(
            [column[self.order] != column[i] for column in columns.values()], axis=0
        )
        alike = self.order[
            np.lexsort((np.asarray(self.cost.total)[self.order], changes))
        ]
        best = self.first_taken(alike)
        if best is None:
            best = int(alike[0])
        new = [
            f"{name}={pin_text(name, column[best])}"
            for name, column in columns.items()
            if column[best] != column[i]
        ]
        slower, limit = (
            self.seconds(best) / self.seconds(i) - 1,
            float(self.machine.memory) * USABLE / 2**30,
        )
        return Rejected(
            self.plan(i),
            self.gib(i),
            limit,
            held,
            size / 2**30,
            ", ".join(new),
            self.gib(best),
            slower,
        )


@dataclass(frozen=True)
class Rejected:
    """A layout that does not fit in memory, with the most similar layout that fits.

    Attributes:
        ``plan``: the layout that does not fit.
        ``gib``: GiB that its fullest rank needs.
        ``limit``: GiB that are available.
        ``largest``: the purpose that takes most memory on that rank.
        ``held``: GiB that this purpose takes.
        ``fix``: the settings in which the layout that fits differs.
        ``fixed_gib``: GiB that the fullest rank of the layout that fits needs.
        ``slower``: share of time by which the layout that fits is slower.
    """

    plan: Plan
    gib: float
    limit: float
    largest: str
    held: float
    fix: str
    fixed_gib: float
    slower: float

    def __str__(self) -> str:
        text = f"{describe(self.plan)}: the fullest rank needs {self.gib:.0f} of {self.limit:.0f} GiB: "
        text += f"{self.largest} {self.held:.0f}"
        return text + (
            f"; {self.fix}: {self.fixed_gib:.0f} GiB, {self.slower:+.0%} time"
            if self.fix
            else ""
        )


def at(columns: Any, i: int) -> Any:
    """Return a copy of the dataclass ``columns`` with entry ``i`` of every array in place of the array."""
    return replace(columns, **{f.name: float(np.ravel(v)[i if np.size(v) > 1 else 0])
                               for f in fields(columns) for v in [getattr(columns, f.name)]})  # fmt: skip


def pin_text(name: str, value: float) -> str:
    return NAMES[name][int(value)] if name in NAMES else f"{value:.0f}"


def describe(plan: Plan) -> str:
    """Return one line that describes the layout ``plan``, without the features that it does not use."""
    parts = [f"{name}={pin_text(name, getattr(plan, name))}" for name in ("pp", "dp", "shard", "cp", "ep", "tp")
             if getattr(plan, name) > 1]  # fmt: skip
    if plan.shard > 1 or plan.zero >= 3:
        parts.append(
            f"zero={plan.zero:.0f}"
            + (f" secondary={plan.secondary:.0f}" if plan.secondary else "")
        )
    if plan.cp > 1:
        parts.append(pin_text("context", plan.context))
    if plan.pp > 1:
        parts.append(
            pin_text("schedule", plan.schedule)
            + (f" v={plan.virtual:.0f}" if plan.virtual > 1 else "")
        )
    parts = parts or ["one rank"]
    parts.append(f"micro_batch={plan.micro_batch:.0f}")
    if plan.overlap:
        parts.append(f"overlap={pin_text('overlap', plan.overlap)}")
    if plan.outer:
        parts.append("dp over the sites")
    if plan.recompute:
        parts.append(f"recompute={pin_text('recompute', plan.recompute)}")
    return " ".join(
        [*parts, *(f"{kind}={place}" for kind, place in plan.memory.items())]
    )


def search(
    shape: Shape,
    cluster: Cluster,
    engine: EngineConstants,
    batch: int,
    seq: int,
    bits: int = 16,
    pins: Sequence[Pin] = (),
) -> SearchResult:
    """Score every layout for training the model ``shape`` on ``cluster``.

    A step has ``batch`` sequences of ``seq`` tokens. ``bits``: width of the operands of matrix products. ``engine``:
    constants of the training program. ``pins``: the user's demands. Raises :class:`UsageError` if no layout meets them
    or none fits in memory. The error names the demand that excludes all layouts, and the values that are possible.
    """
    machine = cluster.machine(bits)
    rows = tuple(pin.value for pin in pins if pin.field == "micro_batch" and pin.value)
    replicas = any(pin in WHOLE for pin in pins)
    rules = Rules(shape, machine, cluster.count, batch, seq, rows, replicas)
    added = [pin for pin in pins if pin.field in ADDED]
    wanted = {pin.field: pin.value for pin in added if pin.sign == "="}
    asked = {wanted.get(kind, 0) for kind in AWAY} - {0}
    # who asks for files has a disk; nobody has told how large
    if FILE in asked and not machine.disk_bytes:
        machine = replace(machine, disk_bytes=np.inf)
    plans = _pinned(rules.candidates(bits), [pin for pin in pins if pin.field in FIRST])
    plans, cost, memory = _scored(shape, machine, engine, plans)
    limit = machine.memory * USABLE
    fits, seconds = np.asarray(memory.total) <= limit, np.asarray(cost.total)
    best = seconds[fits].min() if fits.any() else np.inf
    cheap = {
        "secondary": seconds - cost.dp <= WORTH["secondary"] * best,
        "away": seconds <= WORTH["weights"] * best,
        "overlap": (seconds - cost.tp <= WORTH["overlap"] * best) & (engine.weaves > 0),
    }
    near, far = [HOST] * bool(machine.host_memory), [FILE] * bool(machine.disk_bytes)
    more, enough = take(plans, []), False
    for places in (near, near + far):  # a disk is for what nothing else has room for
        if places is near or FILE in asked or not (fits.any() or enough):
            more = variants(
                plans, machine, fits, cheap, wanted, places, bool(shape.tied)
            )
            more, enough = _leanest(shape, machine, engine, more)
    if len(more.tp):
        taken = _scored(shape, machine, engine, more).cost.total
        worth = np.ones(len(more.tp), dtype=bool)
        # what rests away must beat the best that does not, with whatever else is added to that
        near_by = np.asarray(taken)[(more.moves == 0) & enough]
        nearest_best = min(best, near_by.min(initial=np.inf))
        parts = any(wanted.get(name) for name in ("tiles", "embedding"))
        for name in ADDED:
            if name not in wanted and not (name in AWAY and (asked or parts)):
                least = nearest_best if name in AWAY else best
                worth &= (getattr(more, name) == 0) | (taken <= WORTH[name] * least)
        plans = join_splits([plans, take(more, worth)])
    if len(more.tp) or added:
        plans, cost, memory = _scored(shape, machine, engine, _pinned(plans, added))
    fit = np.flatnonzero(np.asarray(memory.total) <= limit)
    order = fit[np.argsort(np.asarray(cost.total)[fit], kind="stable")]
    result = SearchResult(
        shape, machine, engine, plans, cost, memory, order, rules.refused()
    )
    if not len(fit):
        least = int(np.asarray(memory.total).argmin())
        held = ", ".join(
            f"{name} {float(size) / 2**30:.0f}"
            for name, size in vars(at(memory, least)).items()
        )
        raise UsageError(
            f"memory rules out all {result.count} layouts: the leanest ({describe(result.plan(least))}) needs "
            f"{result.gib(least):.0f} of {machine.memory * USABLE / 2**30:.0f} GiB per rank ({held}); take more "
            f"devices, a smaller batch or a shorter sequence"
        )
    return result


def _pinned(plans: Plan, pins: Sequence[Pin]) -> Plan:
    """Return the plans that meet every pin."""
    for pin in pins:
        column = getattr(plans, pin.field)
        kept = pin.holds(column)
        if pin.field == "micro_batch" and pin.sign == "=":
            # as in a recipe: a rank takes no more than its share of the batch
            kept = column == np.minimum(pin.value, plans.batch // plans.data)
        if not kept.any():
            values = sorted(
                {pin_text(pin.field, v) for v in column}, key=lambda t: (len(t), t)
            )
            raise UsageError(
                f"pin {pin} rules out every layout that is left; {pin.field} can be {', '.join(values)}"
            )
        plans = take(plans, kept)
    return plans


class ScoredPlans(NamedTuple):
    """Layouts with their scores, as arrays ``[plans]``.

    ``cost``: seconds of a step by cause. ``memory``: bytes on the fullest rank by purpose.
    """

    plans: Plan
    cost: Cost
    memory: RankMemory


def _scored(
    shape: Shape, machine: Machine, engine: EngineConstants, plans: Plan
) -> ScoredPlans:
    """Score ``plans``, after choosing for each the axis that crosses between sites (``outer``)."""
    turning = (plans.pp > 1) & (plans.dp > 1)
    # which of the two crosses between the sites
    if turning.any() and machine.site < np.max(plans.world):
        turned = replace(plans, outer=1.0 * turning)
        usual, other = (
            step_time(shape, machine, way, engine).total for way in (plans, turned)
        )
        plans = replace(plans, outer=1.0 * (other < 0.999 * usual))
    return ScoredPlans(
        plans,
        planned_time(shape, machine, plans, engine),
        peak_memory(shape, plans, engine),
    )


def _leanest(
    shape: Shape, machine: Machine, engine: EngineConstants, plans: Plan
) -> tuple[Plan, bool]:
    """Return the plans that fit in device memory, host memory and disk, and True; if none fits, the leanest plan and
    False.
    """
    held = np.asarray(peak_memory(shape, plans, engine).total)
    host, file = room_away(shape, plans, engine)
    room = np.asarray(
        (host <= machine.host_memory * USABLE) & (file <= machine.disk_bytes * USABLE)
    )
    fits = room & (held <= machine.memory * USABLE)
    return take(
        plans, fits if fits.any() else np.flatnonzero(room)[held[room].argsort()[:1]]
    ), bool(fits.any())
