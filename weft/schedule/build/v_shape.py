"""V-shaped schedules: rank ``r`` holds stages ``r`` and ``2P - 1 - r``: a microbatch goes down the ranks and up again.

The building block (Qi et al. 2024, 2405.15362): place F, F', I', I of one microbatch on a grid of six slots per
microbatch and repeat it; memory is then the life of a microbatch on a rank divided by six. Two passes by the clock
follow: weight gradients go into the holes (:func:`fill`), and forwards move up into those that are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from weft.schedule.actions import Key, Order, ScheduleError, assemble
from weft.schedule.simulate import simulate, uniform
from weft.schedule.times import EQUAL, Times

#: A rank waits for a value rather than start a weight gradient if it arrives within this share of the latter's time.
PATIENCE = (0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Pattern:
    """``steps``: slots from one rank to the next for F, F', I', I; ``turns``: slots from the last F to F' and so on.

    ``limit``: chunks that a rank may hold; ``pull``: forwards may run before their place to fill holes.
    """

    steps: tuple[int, int, int, int]
    turns: tuple[int, int, int]
    limit: int
    pull: bool = True


def zb_v(ranks: int, microbatches: int, times: Times) -> list[Order]:
    """ZB-V (2401.10241, section 6): no bubble if F = I = W, peak ``ranks``."""
    return repeat(Pattern((3, 3, 3, 3), (1, 1, 1), 2 * ranks), ranks, microbatches, times)


def v_half(ranks: int, microbatches: int, times: Times) -> list[Order]:
    """V-Half (2405.15362): under half of 1F1B's bubble, peak ``ranks / 2 + 1``, or ``(ranks + 3) / 2`` if odd."""
    odd = ranks % 2
    turns = (1, 1, 2) if odd else (4, 1, 5)  # other turns put two actions into one slot
    return repeat(Pattern((1, 2, 1, 2), turns, ranks + 2 + odd), ranks, microbatches, times)


def v_min(ranks: int, microbatches: int, times: Times) -> list[Order]:
    """V-Min (2405.15362): a third of 1F1B's peak, ``(ranks + 4) / 3`` at most, and two thirds of its bubble."""
    turns = (1, 1, 1) if ranks % 3 else (3, 1, 3)
    return repeat(Pattern((1, 1, 1, 1), turns, -(-2 * ranks // 3) + 2, pull=False), ranks, microbatches, times)


def repeat(pattern: Pattern, ranks: int, microbatches: int, times: Times) -> list[Order]:
    """The pattern for every microbatch; of several fillings, the best for these times."""
    (f0, f1, i1, i0), last = pattern.steps, ranks - 1
    spans = (last * f0 + pattern.turns[0], last * f1 + pattern.turns[1], last * i1 + pattern.turns[2])
    begin = (0, *accumulate(spans))  # slot of the first F, F', I', I
    plan: list[list[Key]] = []
    for r in range(ranks):
        up, down, deep = last - r, r, 2 * ranks - 1 - r
        slots = (("F", r, down * f0), ("F", deep, up * f1), ("I", deep, down * i1), ("I", r, up * i0))
        timed = [
            (start + slot + 6 * m, Key(kind, stage, m))
            for m in range(microbatches)
            for start, (kind, stage, slot) in zip(begin, slots, strict=True)
        ]
        plan.append([key for _, key in sorted(timed)])
    orders, _ = fill(plan, pattern, EQUAL, PATIENCE[0])
    if times == EQUAL:
        return orders
    # Seen by the clock of unequal times a plan of equal slots loses its rhythm; keeping it may be the better choice.
    table = assemble("v", orders, 2 * ranks, [range(2 * ranks)] * microbatches)
    makespan = simulate(table, uniform(table, times)).makespan
    for patience in PATIENCE:
        other, span = fill(plan, pattern, times, patience)
        if span < makespan:
            orders, makespan = other, span
    return orders


def fill(plan: Sequence[Sequence[Key]], pattern: Pattern, times: Times, patience: float) -> tuple[list[Order], float]:
    """The plan's F and I with W in the holes, or where memory is needed; and the makespan or a little more.

    Everything is decided by the clock, rank by rank, with nothing known of actions that have not started.
    """
    ranks = len(plan)
    cost = {"F": times.forward / 2, "I": times.backward_input / 2, "W": times.backward_weight / 2}
    ended: dict[Key, float] = {}
    ahead = [list(order) for order in plan]
    kept: list[list[Key]] = [[] for _ in plan]  # weight gradients to be done
    level = [0] * ranks  # chunks held
    free = [0.0] * ranks
    orders: list[list[Key]] = [[] for _ in plan]

    def arrival(rank: int, key: Key) -> float:
        """When the input is there; infinity while nobody knows."""
        if key.kind == "F":
            need = key._replace(stage=key.stage - 1)
        elif key.stage < 2 * ranks - 1:
            need = key._replace(stage=key.stage + 1)
        else:
            need = key._replace(kind="F")
        holder = min(need.stage, 2 * ranks - 1 - need.stage)
        return ended.get(need, float("inf")) + times.move * (holder != rank) if need.stage >= 0 else 0.0

    def earlier(rank: int, now: float) -> int:
        """Place of the next forward that could run now without taking memory from those before it, or 0."""
        held = level[rank]
        for place, key in enumerate(ahead[rank]):
            if held >= pattern.limit:
                return 0
            if key.kind == "F" and place and arrival(rank, key) <= now:
                return place
            held += 1 if key.kind == "F" else -1
        return 0

    def step(rank: int, now: float) -> bool:
        key = ahead[rank][0] if ahead[rank] else None
        start = arrival(rank, key) if key else float("inf")
        full = key is not None and key.kind == "F" and level[rank] >= pattern.limit
        if kept[rank] and (full or start - now > patience * cost["W"] * (1 + 1e-9)):
            key, start = kept[rank].pop(0), now
        elif pattern.pull and start - now > patience * cost["F"] * (1 + 1e-9) and (place := earlier(rank, now)):
            key, start = ahead[rank].pop(place), now
        elif key is None or start == float("inf"):
            return False
        else:
            ahead[rank].pop(0)
        orders[rank].append(key)
        ended[key] = free[rank] = max(now, start) + cost[key.kind]
        level[rank] += {"F": 1, "I": 0, "W": -1}[key.kind]
        if key.kind == "I":
            kept[rank].append(key._replace(kind="W"))
        return True

    while live := [r for r in range(ranks) if ahead[r] or kept[r]]:
        now = min(free[r] for r in live)
        due = [r for r in live if free[r] == now]
        if not any([step(r, now) for r in due]):  # a list: all of them take their turn
            later = [free[r] for r in live if free[r] > now]
            if not later:
                raise ScheduleError(f"V-shaped schedule of {ranks} ranks blocks at {now}: {[a[:1] for a in ahead]}")
            for r in due:
                free[r] = min(later)
    begun = [ended[order[0]] - cost[order[0].kind] for order in orders]
    return [*orders], max(ended[order[-1]] - begin for order, begin in zip(orders, begun, strict=True))
