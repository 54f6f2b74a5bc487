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
from math import inf
from typing import NamedTuple

from weft.schedule.actions import Action, Table, Value
from weft.schedule.kinds import Duty, Kind, declare_kind
from weft.schedule.simulate import Costs, by_kind, simulate
from weft.schedule.times import ModelTimes, Times


def _share(
    name: str, meaning: str, cost: Callable[[ModelTimes], float], learns: bool = False
) -> str:
    """Declare a pass over a share of the vocabulary; ``cost``: its time for the whole vocabulary."""
    duty = Duty.WEIGHT_GRADIENT if learns else Duty.NONE
    return declare_kind(
        Kind(
            name,
            meaning,
            duty=duty,
            forward=not learns,
            cost=lambda a, times: cost(times) / times.shares,
        )
    )


C = declare_kind(
    Kind("C", "loss", forward=True, cost=lambda a, t: 0.0, parameters=False)
)
G = declare_kind(Kind("G", "gradient sum", cost=lambda a, t: 0.0, parameters=False))
S = _share("S", "output share", lambda t: t.output.forward)
E = _share("E", "embedding share", lambda t: t.embedding.forward)
T = _share("T", "output gradient", lambda t: t.output.backward, learns=True)
D = _share("D", "embedding gradient", lambda t: t.embedding.backward, learns=True)

#: What runs first on a rank when several passes could: those that others wait for.
URGENCY = (C, G, S, E, T, D)

#: Passes that nobody waits for fill holes, until so many of them are due on a rank.
LAZY = 2
#: The turn of such a pass, after the three sorts of actions that a rank has in its own order.
LAST = 4


def share_stage(stages: int, rank: int) -> int:
    """Return the stage number under which a schedule's table refers to the share of the vocabulary that ``rank`` holds.

    The model's stages have the numbers 0 to ``stages - 1``. The shares follow as virtual stages in the order of ranks,
    so that the result is ``stages + rank``.
    """
    return stages + rank


def output_times(product: float, barriers: int) -> Times:
    """Return the times of the output layer for one microbatch, summed over the ranks that share the layer.

    The layer has three matrix products, which each take ``product``: for the logits, for the gradient of its input, and
    for the gradient of its weight. A rank runs its share of them in two passes. The first, S, computes logits, and the
    second, T, the gradient of the weight. The gradient of the input belongs to S if ``barriers`` is 1. It then counts
    as ``forward`` in the result, and ``backward_input`` is 0. It belongs to T if ``barriers`` is 2.

    ``barriers``: how often all ranks must combine their results for each microbatch, 1 or 2.
    """
    if barriers == 1:
        return Times(2 * product, 0.0, product)
    return Times(product, product, product)


def with_vocabulary(
    table: Table, barriers: int, cost: Callable[[Action], float] | None = None
) -> Table:
    """Add passes over shares of the vocabulary to a table whose stages compute neither embedding nor output layer.

    Every rank holds an equal share of the embedding and of the output layer, and runs passes over it for each
    microbatch. ``barriers``: how often the ranks must combine their results for each microbatch, 1 or 2
    (:func:`output_times`). Meanwhile a rank works on other microbatches. For this, it may hold ``barriers`` more
    microbatches at once than in ``table``.

    ``cost``: function that returns the time of an action. With None, every pass of a stage takes 1. A matrix product
    with a rank's share of the embedding or output layer takes 1, too.
    """
    ranks = len(table.ranks)
    if cost is None:
        whole = Times(ranks, 0.0, ranks), output_times(ranks, barriers)
        cost = by_kind(ModelTimes([Times()] * table.stages, *whole, ranks))
    more = barriers * max(1, table.stages // ranks)
    clock = simulate(table, Costs(cost))
    limits = [round(peak) + more for peak in clock.peaks]
    begins: dict[int, float] = {}
    for t in chain(*clock.timeline):
        m = t.action.microbatch
        begins[m] = min(t.start, begins.get(m, t.start))
    entering = sorted(range(table.microbatches), key=lambda m: (begins[m], m))
    passes = [a for m in entering for a in _passes(table, m, barriers)]
    linked = table.map(lambda a: _linked(table, a))
    return replace(table, ranks=_Merge(linked, passes, cost, limits).run())


def _passes(table: Table, m: int, barriers: int) -> Iterator[Action]:
    """Generate the vocabulary passes of microbatch ``m``."""
    first, last = table.paths[m][0], table.paths[m][-1]
    shares = [share_stage(table.stages, r) for r in range(len(table.ranks))]
    act, lse = Value("act", last, m), Value("lse", last, m)
    # The gradient that the last stage reads is that of a stage after it.
    grad = Value("grad", table.stages, m)
    stats = tuple(Value("stats", s, m) for s in shares)
    parts = tuple(Value("part", s, m) for s in shares)
    hub = next(a.rank for a in table if (a.stage, a.microbatch) == (last, m))
    training = any(not a.declared.forward and a.microbatch == m for a in table)
    ends = (lse, grad) if barriers == 1 else (lse,)
    yield Action(hub, C, last, m, (), stats, ends if training else ())
    if training and barriers == 2:
        yield Action(hub, G, last, m, (), parts, (grad,))
    for r, s in enumerate(shares):
        tape = (Value("tape", s, m),) if training else ()
        yield Action(r, E, s, m, (), (), (Value("emb", s, m),))
        yield Action(r, S, s, m, (), (act,), (stats[r], *tape))
        if training:
            part = (parts[r],) if barriers == 2 else ()
            yield Action(r, T, s, m, (), (lse, *tape), part)
            yield Action(r, D, s, m, (), (Value("grad", first, m),))


def _linked(table: Table, a: Action) -> Action:
    """Connect an action of the first or last stage to the vocabulary passes."""
    path, m, duties = table.paths[a.microbatch], a.microbatch, a.declared.duties
    reads, writes = a.reads, a.writes
    if a.stage == path[0] and duties.forward:
        shares = (share_stage(table.stages, r) for r in range(len(table.ranks)))
        reads = tuple(Value("emb", share, m) for share in shares)
    if a.stage == path[0] and duties.input_gradient:
        writes = (Value("grad", a.stage, m), *writes)
    if a.stage == path[-1] and duties.forward:
        writes = (Value("act", a.stage, m), *writes)
    if a.stage == path[-1] and duties.input_gradient:
        reads = (Value("grad", table.stages, m), *reads)
    return replace(a, reads=reads, writes=writes)


class _Option(NamedTuple):
    """An action that a rank could run next. The earliest start comes first, then the lowest turn, then place."""

    start: float
    # 0: a pass that others wait for; from 1 on: the rank's own order; LAST: what nobody waits for
    turn: int
    place: int  # of its microbatch among those that enter
    action: Action


class _Merge:
    """Merges vocabulary passes into a table by the clock: a rank runs the action that can start first.

    At equal times urgent passes come first, then the rank's own order, then other passes. Forwards, backwards and
    weight gradients each keep their order, but may overtake each other while a rank would wait, a forward only within
    ``limits`` of saved microbatches. Merging cannot block: the first action in the table that is left can always run,
    as every action before it is done and the table's memory was enough for it.
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
        urgent_first = sorted(passes, key=lambda a: URGENCY.index(a.kind))
        self.waiting = [[a for a in urgent_first if a.rank == r] for r in ranks]
        self.sort = {a.kind: next(iter(a.declared.duty), Duty.NONE) for a in table}
        self.sorts = len(set(self.sort.values()))
        self.place = {a.microbatch: i for i, a in enumerate(passes)}
        self.free = [0.0] * len(ranks)
        self.level, self.looked_up = [0] * len(ranks), [0] * len(ranks)
        self.entered = 0  # microbatches that the first stage has begun
        self.there: dict[Value, float] = {}
        self.readers: dict[Value, set[int]] = defaultdict(set)
        for a in (*table, *passes):
            for value in a.reads:
                self.readers[value].add(a.rank)

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Return every rank's actions in the order in which the rank runs them."""
        ranks = range(len(self.order))
        out: list[list[Action]] = [[] for _ in ranks]
        bests = [self._best(r) for r in ranks]
        while any(self.order) or any(self.waiting):
            options = filter(None, bests)
            first = min(options, key=lambda o: (o.start, o.turn, o.action.rank))
            out[first.action.rank].append(first.action)
            for other in self._do(first):
                bests[other] = self._best(other)
        return tuple(map(tuple, out))

    def _do(self, option: _Option) -> Iterable[int]:
        """Take an action off the lists; return the ranks whose best option may have changed."""
        a = option.action
        r = a.rank
        (self.waiting if a in self.waiting[r] else self.order)[r].remove(a)
        self.free[r] = option.start + self.cost(a)
        self.there.update(dict.fromkeys(a.writes, self.free[r]))
        duties = a.declared.duties
        if a.stage < self.table.stages:
            self.level[r] += duties.forward - duties.weight_gradient
        self.looked_up[r] += a.kind == E
        if any(v.name == "emb" for v in a.reads):
            self.entered += 1
            return range(len(self.order))
        return {r}.union(*(self.readers[v] for v in a.writes))

    def _best(self, r: int) -> _Option | None:
        options = chain(self._own(r), self._added(r))
        possible = (option for option in options if option.start < inf)
        return min(possible, key=lambda o: (o.start, o.turn, o.place), default=None)

    def _own(self, r: int) -> Iterator[_Option]:
        """Generate the first action of each sort in the rank's own order."""
        seen: set[Duty] = set()
        for a in self.order[r]:
            sort = self.sort[a.kind]
            full = sort is Duty.FORWARD and self.level[r] >= self.limits[r]
            if sort not in seen and not full:
                place = self.place[a.microbatch]
                yield _Option(self._start(a), 1 + len(seen), place, a)
            seen.add(sort)
            if len(seen) == self.sorts:
                return

    def _added(self, r: int) -> Iterator[_Option]:
        """Generate the rank's vocabulary passes; shares of the embedding are looked up one microbatch ahead."""
        ready = [
            (self._start(a), a)
            for a in self.waiting[r]
            if a.kind != E or self.looked_up[r] <= self.entered + 1
        ]
        late = sum(not a.writes and start < inf for start, a in ready) > LAZY
        for start, a in ready:
            turn = 0 if a.writes or late else LAST
            yield _Option(start, turn, self.place[a.microbatch], a)

    def _start(self, a: Action) -> float:
        """Return when ``a`` can start: infinity while a value that it reads is not written."""
        return max(self.free[a.rank], *(self.there.get(v, inf) for v in a.reads), 0.0)
