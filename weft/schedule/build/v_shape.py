"""V-shaped schedules: rank ``r`` holds stages ``r`` and ``2P - 1 - r``: a microbatch goes down the ranks and up again.

The building block (Qi et al. 2024, 2405.15362): place F, F', I', I of one microbatch on a grid of six slots per
microbatch and repeat it; memory is then the life of a microbatch on a rank divided by six. Two passes by the clock
follow: weight gradients go into the holes (:func:`fill_holes`), and forwards move up into those that are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.schedule.actions import Key, Order, ScheduleError, assemble
from weft.schedule.simulate import simulate, uniform_costs
from weft.schedule.times import EQUAL, Times

#: A rank waits for a value rather than start a weight gradient if it arrives within this share of the gradient's time.
PATIENCE = (0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Pattern:
    """Times of the passes of one microbatch in a V-shaped schedule, counted in slots of equal length.

    In such a schedule a microbatch passes all ranks down to the last and then up again, so that each rank holds two
    stages. F and I are the forward and the input gradient of a rank's stage on the way down. F' and I' are those of the
    rank's stage on the way up.

    Attributes:
        ``steps``: for each of F, F', I' and I, the number of slots from this pass on one rank to the same pass on the
            next.
        ``turns``: the slots from the last F to the first F', from the last F' to the first I', and from the last I' to
            the first I.
        ``limit``: how many saved activations a rank may hold at once; those of one microbatch at one stage count 1.
        ``pull``: whether forwards may run earlier than the pattern says, to fill idle times.
    """

    steps: tuple[int, int, int, int]
    turns: tuple[int, int, int]
    limit: int
    pull: bool = True


def repeat(
    pattern: Pattern, ranks: int, microbatches: int, times: Times
) -> list[Order]:
    """Return the order of actions of each rank in a schedule where every microbatch follows ``pattern``.

    Weight gradients run in times in which ranks would be idle, if these times are long enough. A simulation tells the
    idle times. If passes take unequally long, several least lengths of an idle time are tried (:data:`PATIENCE`), and
    the fastest order is returned.

    ``times``: times of one microbatch on a rank. ``ranks``, ``microbatches``: numbers of ranks, and of microbatches
    in a step.
    """
    (f0, f1, i1, i0), last = pattern.steps, ranks - 1
    spans = (
        last * step + turn
        for step, turn in zip(pattern.steps, pattern.turns, strict=False)
    )
    begin = (0, *accumulate(spans))  # slot of the first F, F', I', I
    plan: list[list[Key]] = []
    for r in range(ranks):
        up, down, deep = last - r, r, 2 * ranks - 1 - r
        slots = (
            ("F", r, down * f0),
            ("F", deep, up * f1),
            ("I", deep, down * i1),
            ("I", r, up * i0),
        )
        timed = [
            (start + slot + 6 * m, Key(kind, stage, m))
            for m in range(microbatches)
            for start, (kind, stage, slot) in zip(begin, slots, strict=True)
        ]
        plan.append([key for _, key in sorted(timed)])
    orders, _ = fill_holes(plan, pattern, EQUAL, PATIENCE[0])
    if times == EQUAL:
        return orders
    # Seen by the clock of unequal times a plan of equal slots loses its rhythm; keeping it may be the better choice.
    table = assemble("v", orders, 2 * ranks, [range(2 * ranks)] * microbatches)
    makespan = simulate(table, uniform_costs(table, times)).makespan
    for patience in PATIENCE:
        other, span = fill_holes(plan, pattern, times, patience)
        if span < makespan:
            orders, makespan = other, span
    return orders


def fill_holes(
    plan: Sequence[Sequence[Key]], pattern: Pattern, times: Times, patience: float
) -> tuple[list[Order], float]:
    """Insert weight gradients (W) into the idle times of a plan. Returns the order of each rank and the makespan.

    The makespan is the longest time from a rank's first action to the end of its last. A weight gradient also runs when
    a rank is not idle, if a forward needs the memory that it frees.

    ``plan[r]``: forwards and input gradients of rank ``r`` in order; ``pattern``: gives the limit of memory, and says
    whether forwards may move up; ``times``: times of one microbatch on a rank; ``patience``: a rank starts a weight
    gradient only if its next action is further away than this share of a weight gradient's time.
    """
    return _Filling(plan, pattern, times, patience).run()


class _Filling:
    """Fills a plan by the clock, rank by rank; decisions use only actions that have started."""

    def __init__(
        self,
        plan: Sequence[Sequence[Key]],
        pattern: Pattern,
        times: Times,
        patience: float,
    ) -> None:
        self.pattern, self.move = pattern, times.move
        self.patience = patience * (1 + 1e-9)
        self.cost = {
            "F": times.forward / 2,
            "I": times.backward_input / 2,
            "W": times.backward_weight / 2,
        }
        self.last = 2 * len(plan) - 1  # stage
        self.ended: dict[Key, float] = {}
        self.ahead = [list(order) for order in plan]
        self.kept: list[list[Key]] = [[] for _ in plan]  # weight gradients to be done
        self.level = [0] * len(plan)  # chunks held
        self.free = [0.0] * len(plan)
        self.orders: list[list[Key]] = [[] for _ in plan]

    def run(self) -> tuple[list[Order], float]:
        ranks = range(len(self.ahead))
        while live := [r for r in ranks if self.ahead[r] or self.kept[r]]:
            now = min(self.free[r] for r in live)
            due = [r for r in live if self.free[r] == now]
            # a list: all of them take their turn
            if not any([self._step(r, now) for r in due]):
                later = [self.free[r] for r in live if self.free[r] > now]
                if not later:
                    waiting = [order[:1] for order in self.ahead]
                    raise ScheduleError(
                        f"V-shaped schedule of {len(waiting)} ranks blocks at {now}: {waiting}"
                    )
                for r in due:
                    self.free[r] = min(later)
        spans = [
            self.ended[order[-1]] - self.ended[order[0]] + self.cost[order[0].kind]
            for order in self.orders
        ]
        return [*self.orders], max(spans)

    def _step(self, rank: int, now: float) -> bool:
        """Start the next action of ``rank``, if one is better than waiting; return whether it did."""
        ahead, kept = self.ahead[rank], self.kept[rank]
        key = ahead[0] if ahead else None
        start = self._arrival(rank, key) if key else float("inf")
        forward = key is not None and key.kind == "F"
        full = forward and self.level[rank] >= self.pattern.limit
        wait = start - now
        if kept and (full or wait > self.patience * self.cost["W"]):
            key, start = kept.pop(0), now
        elif (
            self.pattern.pull
            and wait > self.patience * self.cost["F"]
            and (place := self._earlier(rank, now))
        ):
            key, start = ahead.pop(place), now
        elif key is None or start == float("inf"):
            return False
        else:
            ahead.pop(0)
        self.orders[rank].append(key)
        self.ended[key] = self.free[rank] = max(now, start) + self.cost[key.kind]
        self.level[rank] += {"F": 1, "I": 0, "W": -1}[key.kind]
        if key.kind == "I":
            kept.append(key._replace(kind="W"))
        return True

    def _earlier(self, rank: int, now: float) -> int:
        """Return the place of the next forward that can run now without memory of those before it, or 0."""
        held = self.level[rank]
        for place, key in enumerate(self.ahead[rank]):
            if held >= self.pattern.limit:
                return 0
            if key.kind == "F" and place and self._arrival(rank, key) <= now:
                return place
            held += 1 if key.kind == "F" else -1
        return 0

    def _arrival(self, rank: int, key: Key) -> float:
        """Return when the input arrives; infinity while it is unknown."""
        if key.kind == "F":
            need = key._replace(stage=key.stage - 1)
        elif key.stage < self.last:
            need = key._replace(stage=key.stage + 1)
        else:
            need = key._replace(kind="F")
        if need.stage < 0:
            return 0.0
        holder = min(need.stage, self.last - need.stage)
        return self.ended.get(need, float("inf")) + self.move * (holder != rank)
