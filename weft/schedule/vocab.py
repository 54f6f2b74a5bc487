"""Vocabulary parallelism (Yeung et al. 2024): embedding and output layer cut over all ranks, as passes in any schedule.

Every rank ``r`` holds a share of the vocabulary, as virtual stage ``S + r`` of a table with ``S`` stages:

====  ==========================================================================================
E     look up the tokens that this share knows; the first stage's forward adds up all shares' parts
S     this share's logits of the last stage's output, their softmax within the share, and statistics
C     on the last stage's rank: the loss from all statistics; with one barrier also the input's gradient
T     the share's weight gradient, once the global statistics are known
G     two barriers only: add up the shares' parts of the input's gradient, which T has made
D     gradient of the embedding's share
====  ==========================================================================================

With one barrier (the paper's algorithm 2) S also makes its part of the input's gradient, up to a factor per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.schedule.actions import Action, Table, Value

#: What runs first on a rank when several passes could: those that others wait for.
URGENCY = ("C", "G", "S", "T", "E", "D")


def with_vocabulary(table: Table, barriers: int, cost: Callable[[Action], float] | None = None) -> Table:
    """Add the vocabulary passes to a table whose first and last stage compute neither embedding nor output layer.

    Every barrier is one more microbatch in flight: backwards of all ranks are moved behind that many more forwards.
    The passes then go where ``cost`` (time per action; without it all actions but C and G take 1) finds the rank
    waiting, or as soon as what they need is there.
    """
    passes = [a for m in range(table.microbatches) for a in _passes(table, m, barriers)]
    chunks = max(1, table.stages // len(table.ranks))
    orders = [_delayed(actions, barriers * chunks) for actions in table.map(lambda a: _linked(table, a)).ranks]
    return replace(table, ranks=_merge(orders, passes, cost or (lambda a: float(a.kind not in "CG"))))


def _passes(table: Table, m: int, barriers: int) -> list[Action]:
    ranks, first, last = range(len(table.ranks)), table.paths[m][0], table.paths[m][-1]
    shares = [table.stages + r for r in ranks]
    # The gradient that the last stage reads is that of a stage after it.
    act, grad, lse = Value("act", last, m), Value("grad", table.stages, m), Value("lse", last, m)
    stats = tuple(Value("stats", s, m) for s in shares)
    parts = tuple(Value("part", s, m) for s in shares)
    hub = next(a.rank for a in table if a.key == ("F", last, m))
    training = any(a.kind in ("B", "I") and a.microbatch == m for a in table)
    made = (lse, grad) if barriers == 1 else (lse,)
    found = [Action(hub, "C", last, m, (), stats, made if training else ())]
    if training and barriers == 2:
        found.append(Action(hub, "G", last, m, (), parts, (grad,)))
    for r, s in zip(ranks, shares, strict=True):
        tape, part = Value("tape", s, m), Value("part", s, m)
        found.append(Action(r, "E", s, m, (), (), (Value("emb", s, m),)))
        found.append(Action(r, "S", s, m, (), (act,), (Value("stats", s, m), *([tape] if training else []))))
        if training:
            found.append(Action(r, "T", s, m, (), (lse, tape), (part,) if barriers == 2 else ()))
            found.append(Action(r, "D", s, m, (), (Value("grad", first, m),), ()))
    return found


def _linked(table: Table, a: Action) -> Action:
    """Connect the first and last stage's actions to the passes."""
    path = table.paths[a.microbatch]
    if a.stage == path[0] and a.kind == "F":
        a = replace(a, reads=tuple(Value("emb", table.stages + r, a.microbatch) for r in range(len(table.ranks))))
    if a.stage == path[0] and a.kind in ("B", "I"):
        a = replace(a, writes=(Value("grad", a.stage, a.microbatch), *a.writes))
    if a.stage == path[-1] and a.kind == "F":
        a = replace(a, writes=(Value("act", a.stage, a.microbatch), *a.writes))
    if a.stage == path[-1] and a.kind in ("B", "I"):
        a = replace(a, reads=(Value("grad", table.stages, a.microbatch), *a.reads))
    return a


def _delayed(actions: Sequence[Action], more: int) -> list[Action]:
    """The same forwards and the same backwards in their orders, every backward ``more`` forwards later."""
    forwards = [a for a in actions if a.kind == "F"]
    out: list[Action] = []
    seen = placed = 0
    for a in actions:
        if a.kind == "F":
            seen += 1
            continue
        while placed < min(seen + more, len(forwards)):
            out.append(forwards[placed])
            placed += 1
        out.append(a)
    return [*out, *forwards[placed:]]


def _merge(
    orders: list[list[Action]], passes: Sequence[Action], cost: Callable[[Action], float]
) -> tuple[tuple[Action, ...], ...]:
    """By the clock: a rank runs a pass that is ready, else the next action of its order, whichever can start first."""
    waiting = [sorted((a for a in passes if a.rank == r), key=_urgency) for r in range(len(orders))]
    at, free = [0] * len(orders), [0.0] * len(orders)
    there: dict[Value, float] = {}
    out: list[list[Action]] = [[] for _ in orders]

    def start(a: Action) -> float:
        """When ``a`` can start, as far as is known: never, if something it reads is not made yet."""
        return max([free[a.rank], *(there.get(v, float("inf")) for v in a.reads)])

    def rank_next(r: int) -> tuple[float, int, Action] | None:
        base = orders[r][at[r]] if at[r] < len(orders[r]) else None
        # Look-ups need nothing: only a few may run ahead of the first stage's forwards.
        ahead = sum(a.kind == "E" for a in out[r])
        options = [(start(a), 0, a) for a in waiting[r] if a.kind != "E" or ahead <= _forwards(out) + 1]
        options += [(start(base), 1, base)] if base is not None else []
        options = [o for o in options if o[0] < float("inf")]
        return min(options, key=lambda o: o[:2], default=None)

    while any(waiting) or any(at[r] < len(orders[r]) for r in range(len(orders))):
        found = [(n[0], n[1], r, n[2]) for r in range(len(orders)) if (n := rank_next(r)) is not None]
        if not found:  # moved backwards wait for each other in a circle: let a forward pass them
            ahead = [(r, i) for r, order in enumerate(orders) for i in range(at[r], len(order))]
            r, i = next((r, i) for r, i in ahead if orders[r][i].kind == "F" and start(orders[r][i]) < float("inf"))
            orders[r].insert(at[r], orders[r].pop(i))
            continue
        begin, is_base, r, a = min(found, key=lambda f: f[:3])
        if is_base:
            at[r] += 1
        else:
            waiting[r].remove(a)
        free[r] = begin + cost(a)
        there.update(dict.fromkeys(a.writes, free[r]))
        out[r].append(a)
    return tuple(map(tuple, out))


def _urgency(a: Action) -> tuple[int, int]:
    return URGENCY.index(a.kind), a.microbatch


def _forwards(out: Sequence[Sequence[Action]]) -> int:
    """Microbatches that have entered the pipeline."""
    return sum(a.kind == "F" and any(v.name == "emb" for v in a.reads) for actions in out for a in actions)
