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

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from weft.schedule.actions import Action, Table, Value
from weft.schedule.kinds import Duty, Kind, declare_kind
from weft.schedule.simulate import Costs, by_kind, simulate
from weft.schedule.times import ModelTimes, Times

C = declare_kind(
    Kind("C", "loss", forward=True, cost=lambda a, t: 0.0, parameters=False)
)
G = declare_kind(Kind("G", "gradient sum", cost=lambda a, t: 0.0, parameters=False))
S = declare_kind(
    Kind(
        "S", "output share", forward=True, cost=lambda a, t: t.output.forward / t.shares
    )
)
E = declare_kind(
    Kind(
        "E",
        "embedding share",
        forward=True,
        cost=lambda a, t: t.embedding.forward / t.shares,
    )
)
T = declare_kind(
    Kind(
        "T",
        "output gradient",
        duty=Duty.WEIGHT_GRADIENT,
        cost=lambda a, t: t.output.backward / t.shares,
    )
)
D = declare_kind(
    Kind(
        "D",
        "embedding gradient",
        duty=Duty.WEIGHT_GRADIENT,
        cost=lambda a, t: t.embedding.backward / t.shares,
    )
)

#: What runs first on a rank when several passes could: those that others wait for.
URGENCY = (C, G, S, E, T, D)

#: Passes that nobody waits for fill holes, until so many of them are due on a rank.
LAZY = 2
#: The turn of such a pass, after the three sorts of actions that a rank has in its own order.
LAST = 4


def share_stage(stages: int, rank: int) -> int:
    """The number of the virtual stage that stands for ``rank``'s share of the vocabulary, beside ``stages`` others."""
    return stages + rank


def output_times(product: float, barriers: int) -> Times:
    """Of the whole output layer as passes S and T compute it; ``product``: one of its three matrix products.

    The gradient of the input is made by S, together with the logits, if there is one barrier, else by T.
    """
    return (
        Times(2 * product, 0.0, product)
        if barriers == 1
        else Times(product, product, product)
    )


def with_vocabulary(
    table: Table, barriers: int, cost: Callable[[Action], float] | None = None
) -> Table:
    """Add the vocabulary passes to a table whose first and last stage compute neither embedding nor output layer.

    ``cost``: time per action (without it, every pass of a stage, and a rank's product of its shares, takes 1). Every
    barrier lets a rank hold one more microbatch, so that it has other work while shares are combined.
    """
    ranks = len(table.ranks)
    whole = Times(ranks, 0.0, ranks)
    cost = cost or by_kind(
        ModelTimes(
            [Times()] * table.stages, whole, output_times(ranks, barriers), ranks
        )
    )
    more = barriers * max(1, table.stages // ranks)
    clock = simulate(table, Costs(cost))
    limits = [round(peak) + more for peak in clock.peaks]
    begins = {
        t.action.microbatch: t.start
        for t in sorted(chain(*clock.timeline), key=lambda t: -t.start)
    }
    entering = sorted(range(table.microbatches), key=lambda m: (begins[m], m))
    passes = [a for m in entering for a in _passes(table, m, barriers)]
    return replace(
        table,
        ranks=_Merge(
            table.map(lambda a: _linked(table, a)), passes, cost, limits
        ).run(),
    )


def _passes(table: Table, m: int, barriers: int) -> list[Action]:
    ranks, first, last = range(len(table.ranks)), table.paths[m][0], table.paths[m][-1]
    shares = [share_stage(table.stages, r) for r in ranks]
    # The gradient that the last stage reads is that of a stage after it.
    act, grad, lse = (
        Value("act", last, m),
        Value("grad", table.stages, m),
        Value("lse", last, m),
    )
    stats = tuple(Value("stats", s, m) for s in shares)
    parts = tuple(Value("part", s, m) for s in shares)
    hub = next(a.rank for a in table if (a.stage, a.microbatch) == (last, m))
    training = any(not a.declared.forward and a.microbatch == m for a in table)
    made = (lse, grad) if barriers == 1 else (lse,)
    found = [Action(hub, C, last, m, (), stats, made if training else ())]
    if training and barriers == 2:
        found.append(Action(hub, G, last, m, (), parts, (grad,)))
    for r, s in zip(ranks, shares, strict=True):
        tape, part = Value("tape", s, m), Value("part", s, m)
        found.append(Action(r, E, s, m, (), (), (Value("emb", s, m),)))
        found.append(
            Action(
                r,
                S,
                s,
                m,
                (),
                (act,),
                (Value("stats", s, m), *([tape] if training else [])),
            )
        )
        if training:
            found.append(
                Action(r, T, s, m, (), (lse, tape), (part,) if barriers == 2 else ())
            )
            found.append(Action(r, D, s, m, (), (Value("grad", first, m),), ()))
    return found


def _linked(table: Table, a: Action) -> Action:
    """Connect the first and last stage's actions to the passes."""
    path, duty = table.paths[a.microbatch], a.declared.duty
    if a.stage == path[0] and Duty.FORWARD in duty:
        a = replace(
            a,
            reads=tuple(
                Value("emb", share_stage(table.stages, r), a.microbatch)
                for r in range(len(table.ranks))
            ),
        )
    if a.stage == path[0] and Duty.INPUT_GRADIENT in duty:
        a = replace(a, writes=(Value("grad", a.stage, a.microbatch), *a.writes))
    if a.stage == path[-1] and Duty.FORWARD in duty:
        a = replace(a, writes=(Value("act", a.stage, a.microbatch), *a.writes))
    if a.stage == path[-1] and Duty.INPUT_GRADIENT in duty:
        a = replace(a, reads=(Value("grad", table.stages, a.microbatch), *a.reads))
    return a


class _Option(NamedTuple):
    """What a rank could do next: the earliest comes first, then the one of the lowest ``turn``, then of ``place``."""

    start: float
    # 0: a pass that others wait for; from 1 on: the rank's own order; LAST: what nobody waits for
    turn: int
    place: int  # of its microbatch among those that enter
    action: Action


class _Merge:
    """By the clock: a rank does what it can do first; at equal times passes, then its own order, then other things.

    Forwards, backwards and weight gradients each keep their order, but may pass each other while a rank would wait, a
    forward only within ``limits`` of saved microbatches. This cannot block: of all that is left, what came first in
    the table can run, as everything before it, whose memory was enough, is done.
    """

    def __init__(
        self,
        table: Table,
        passes: Sequence[Action],
        cost: Callable[[Action], float],
        limits: Sequence[int],
    ) -> None:
        self.table, self.cost, self.limits = table, cost, limits
        ranks = range(len(table.ranks))
        # What is left of every rank's own actions, and of its passes.
        self.order = [list(actions) for actions in table.ranks]
        self.waiting = [
            sorted(
                (a for a in passes if a.rank == r), key=lambda a: URGENCY.index(a.kind)
            )
            for r in ranks
        ]
        self.sort = {a.kind: next(iter(a.declared.duty), Duty.NONE) for a in table}
        self.sorts = len(set(self.sort.values()))
        self.place = {a.microbatch: i for i, a in enumerate(passes)}
        self.free, self.level, self.looked_up = (
            [0.0] * len(ranks),
            [0] * len(ranks),
            [0] * len(ranks),
        )
        self.entered = 0  # microbatches that the first stage has begun
        self.there: dict[Value, float] = {}
        self.readers: dict[Value, set[int]] = defaultdict(set)
        for a in (*table, *passes):
            for value in a.reads:
                self.readers[value].add(a.rank)

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Every rank's actions in the order in which it does them."""
        ranks = range(len(self.order))
        out: list[list[Action]] = [[] for _ in ranks]
        bests = [self._best(r) for r in ranks]
        while any(self.order) or any(self.waiting):
            first = min(
                filter(None, bests), key=lambda o: (o.start, o.turn, o.action.rank)
            )
            out[first.action.rank].append(first.action)
            for other in self._do(first):
                bests[other] = self._best(other)
        return tuple(map(tuple, out))

    def _do(self, option: _Option) -> Iterable[int]:
        """Take the action off what is left; returns the ranks for which something else may be best now."""
        a = option.action
        r = a.rank
        (self.waiting if a in self.waiting[r] else self.order)[r].remove(a)
        self.free[r] = option.start + self.cost(a)
        self.there.update(dict.fromkeys(a.writes, self.free[r]))
        forward, _, weights = a.declared.duties
        self.level[r] += a.stage < self.table.stages and forward - weights
        self.looked_up[r] += a.kind == E
        enters = any(v.name == "emb" for v in a.reads)
        self.entered += enters
        return (
            range(len(self.order))
            if enters
            else {r}.union(*(self.readers[v] for v in a.writes))
        )

    def _best(self, r: int) -> _Option | None:
        possible = (
            o for o in chain(self._own(r), self._added(r)) if o.start < float("inf")
        )
        return min(possible, key=lambda o: (o.start, o.turn, o.place), default=None)

    def _own(self, r: int) -> Iterator[_Option]:
        """The first action of each sort in the rank's own order."""
        seen: set[Duty] = set()
        for a in self.order[r]:
            sort = self.sort[a.kind]
            if sort not in seen and not (
                sort is Duty.FORWARD and self.level[r] >= self.limits[r]
            ):
                yield _Option(
                    self._start(a), 1 + len(seen), self.place[a.microbatch], a
                )
            seen.add(sort)
            if len(seen) == self.sorts:
                return

    def _added(self, r: int) -> Iterator[_Option]:
        """The rank's passes; shares of the embedding are looked up one microbatch ahead."""
        ready = [
            (self._start(a), a)
            for a in self.waiting[r]
            if a.kind != E or self.looked_up[r] <= self.entered + 1
        ]
        late = sum(not a.writes and begin < float("inf") for begin, a in ready) > LAZY
        for begin, a in ready:
            yield _Option(
                begin, 0 if a.writes or late else LAST, self.place[a.microbatch], a
            )

    def _start(self, a: Action) -> float:
        """When ``a`` can start: never, as far as is known, if something it reads is not made yet."""
        return max(
            [self.free[a.rank], *(self.there.get(v, float("inf")) for v in a.reads)]
        )
