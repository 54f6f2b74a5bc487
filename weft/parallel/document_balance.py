"""Plans which ranks compute which documents of a step, in which passes (hybrid data parallelism).

Short documents stay on single ranks, long ones get a group of ranks for one pass, and ranks run unequal numbers of
passes; the loss is divided by the real tokens of the step, so the result is that of any other packing. Plans balance
time, which is quadratic in a document's length, and not tokens. :func:`greedy` follows ByteScale (Ge et al. 2025,
2502.21231), :func:`flexsp` chooses group sizes per micro-batch by integer programming (Wang et al. 2024, 2412.01523).
"""

import heapq
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from weft.data.batch import Pass, Plan
from weft.errors import UsageError, WeftError
from weft.layout.axes import DATA_AXES
from weft.layout.layout import Layout
from weft.recipe import ModelShape
from weft.shapes.shape import shape_of

#: What moving a byte between ranks takes, in floating-point operations: an H100 at 40 % over links of 400 GB/s.
FLOPS_PER_BYTE = 1000
#: A document gets more ranks than its memory asks for when it takes longer than this share of the ideal step.
SPREADS = (0.5, 1.0, np.inf)
#: Bound of the search for group sizes. Nodes, not seconds: all ranks must come to the same plan.
NODES = 200


class DocumentTimes(NamedTuple):
    """Constants of a formula for the time that ranks take for a document; all have the same unit of time.

    A document of ``s`` tokens on ``d`` ranks takes ``(linear * s + max(quadratic * s**2, move * s * (d - 1))) / d``.

    Attributes:
        ``quadratic``: time of attention for a pair of tokens.
        ``linear``: all other computing time of a token.
        ``move``: time to receive a token's keys and values from another rank, which overlaps with attention.
        ``fixed``: time of a pass that does not depend on its documents.
    """

    quadratic: float
    linear: float
    move: float = 0.0
    fixed: float = 0.0

    def time(self, tokens: np.ndarray, ranks: np.ndarray | int) -> np.ndarray:
        """Return the time of documents of ``tokens`` tokens, each on ``ranks`` ranks; arrays broadcast."""
        s = np.asarray(tokens, float)
        moved = self.move * (np.asarray(ranks) - 1)
        return (self.linear + np.maximum(self.quadratic * s, moved)) * s / ranks


class PlanError(WeftError):
    """Raised for a plan that would lose a document, not fit, or hang; the message names the document or the rank."""


def costs_of(model: ModelShape) -> DocumentTimes:
    """Return the modelled times of a document's tokens, and of pairs of its tokens, in floating-point operations.

    A :class:`DocumentTimes` says how the time of a document of any length follows from them. They count forward and
    backward, with attention scores recomputed. ``model``: shape of the model.
    """
    shape = shape_of(model)
    full = shape.layers * (1 - shape.linear)  # layers whose attention is quadratic
    linear = 6 * (shape.layers * shape.active_weights + shape.table)
    # bf16: keys and values twice, their gradients back
    moved = 2 * 3 * 2 * shape.kv_heads * shape.score_dim * full
    quadratic = 7 * shape.heads * shape.score_dim * full
    # A pass of few tokens is bound by reading the weights: worth about 256 tokens.
    return DocumentTimes(quadratic, linear, moved * FLOPS_PER_BYTE, 256 * linear)


def greedy(
    lengths: np.ndarray, capacity: int, ranks: int, costs: DocumentTimes
) -> Plan:
    """Plan which of ``ranks`` ranks compute each document, in which passes (ByteScale, Ge et al. 2025, 2502.21231).

    ``lengths``: tokens of each document; ``capacity``: tokens that a rank can hold in a pass; ``costs``: constants
    of the formula for a document's time.

    Plans are made for several limits of a document's time, and the fastest plan is returned. A limit is a share of the
    ideal time of the step. A document gets as many ranks as its memory needs, and more if it would otherwise take
    longer than the limit. A document on several ranks goes to the ranks that will be free soonest. They compute it
    together in one pass, for which some of them may have to wait. Documents that need one rank first fill this waiting
    time. The remaining ones go to the least busy ranks, longest document first.
    """
    need = _ranks_needed(lengths, capacity, ranks)
    plans = [
        _plan_with_spread(lengths, need, capacity, ranks, costs, spread, even)
        for spread in SPREADS
        for even in (False, True)
    ]
    return min(
        dict.fromkeys(plans), key=lambda plan: max(finish_times(plan, lengths, costs))
    )


def _ranks_needed(lengths: np.ndarray, capacity: int, ranks: int) -> np.ndarray:
    """Return the ranks that the memory of every document needs. Raises :class:`UsageError` for one that cannot fit."""
    if len(lengths) and (longest := int(lengths.max())) > capacity * ranks:
        raise UsageError(
            f"a document of {longest} tokens does not fit {ranks} ranks of {capacity} tokens each; "
            "raise train.micro_batch or the number of ranks"
        )
    if (lengths < 1).any():
        raise UsageError(
            f"document {int(np.argmin(lengths))} of the step is empty; leave out empty documents"
        )
    return -(-lengths // capacity)


def _plan_with_spread(
    lengths: np.ndarray,
    need: np.ndarray,
    capacity: int,
    ranks: int,
    costs: DocumentTimes,
    spread: float,
    even: bool,
) -> Plan:
    """Plan with the fewest ranks for each document that compute it within ``spread`` times the ideal step.

    The ideal step is the work of all documents over all ranks. ``need``: the ranks that a document's memory needs,
    which it gets in any case. ``even``: sizes of groups are powers of two, so that groups fill all ranks.
    """
    alone = costs.time(lengths, 1) + costs.fixed * lengths / capacity
    limit = spread * (alone.sum() / ranks or 1.0)
    width = need.copy()
    slow = np.flatnonzero((alone > limit) | (need > 1))
    # the fewest ranks that are fast enough, or else those that are fastest
    if len(slow):
        degrees = np.arange(1, ranks + 1)
        times = costs.time(lengths[slow, None], degrees) + costs.fixed
        times[(degrees < need[slow, None]) | (degrees > lengths[slow, None])] = np.inf
        enough = np.isfinite(times) & (times <= limit)
        width[slow] = np.where(enough.any(1), enough.argmax(1), times.argmin(1)) + 1
    if even:
        rounded = np.minimum(1 << np.ceil(np.log2(width)).astype(int), ranks)
        width = np.where(rounded <= lengths, rounded, width)
    groups = np.flatnonzero(width > 1)
    groups = groups[np.lexsort((groups, -lengths[groups], -width[groups]))]
    busy, shared, holes = np.zeros(ranks), list[Pass](), list[tuple[float, int, int]]()
    for i, document in enumerate(groups.tolist()):
        before, ranks_needed = busy.copy(), int(width[document])
        group = _place_on_free_ranks((document,), ranks_needed, busy, lengths, costs)
        shared.append(group)
        start = max(before[list(group.peers)])
        holes += [
            (float(start - before[rank]), rank, i)
            for rank in group.peers
            if before[rank] < start
        ]
    short = np.flatnonzero(width == 1)
    short = short[np.argsort(alone[short], kind="stable")]
    waiting, rest = _fill_waits(
        short.tolist(), alone, holes, lengths, capacity, costs.fixed
    )
    passes = [p for i, group in enumerate(shared) for p in (*waiting[i], group)]
    passes += _to_least_busy(rest, alone, busy, lengths, capacity)
    return _by_rank(passes, ranks)


def _place_on_free_ranks(
    documents: tuple[int, ...],
    width: int,
    busy: np.ndarray,
    lengths: np.ndarray,
    costs: DocumentTimes,
) -> Pass:
    """Place ``documents`` in a pass on the ``width`` ranks that are free first; all wait for the last of them.

    ``busy``: the time until which each rank computes; changed in place.
    """
    peers = np.sort(np.argsort(busy, kind="stable")[:width])
    seconds = costs.time(lengths[list(documents)], width).sum() + costs.fixed
    busy[peers] = busy[peers].max() + seconds
    return Pass(tuple(peers.tolist()), documents)


def _fill_waits(
    short: list[int],
    times: np.ndarray,
    holes: list[tuple[float, int, int]],
    lengths: np.ndarray,
    capacity: int,
    fixed: float,
) -> tuple[dict[int, list[Pass]], list[int]]:
    """Fill the time in which a rank waits for a group with short documents.

    ``short``: documents by rising time. ``holes``: how long a rank waits, which rank, for which group. Returns the
    passes by the number of the group, and the documents that are left.
    """
    left = [float(times[d]) for d in short]
    passes: dict[int, list[Pass]] = defaultdict(list)
    for room, rank, group in sorted(holes, reverse=True):
        room, documents = room - fixed, list[int]()
        while (at := bisect_right(left, room)) > 0:
            room -= left.pop(at - 1)
            documents.append(short.pop(at - 1))
        passes[group] += _packed(documents, rank, lengths, capacity)
    return passes, short


def _to_least_busy(
    short: list[int],
    times: np.ndarray,
    busy: np.ndarray,
    lengths: np.ndarray,
    capacity: int,
) -> list[Pass]:
    """Place documents, longest first, on the rank that is least busy by then; return passes of one rank each."""
    heap = [(time, rank) for rank, time in enumerate(busy.tolist())]
    heapq.heapify(heap)
    by_rank: list[list[int]] = [[] for _ in heap]
    for document in reversed(short):
        time, rank = heap[0]
        heapq.heapreplace(heap, (time + float(times[document]), rank))
        by_rank[rank].append(document)
    return [
        p
        for rank, documents in enumerate(by_rank)
        for p in _packed(documents, rank, lengths, capacity)
    ]


def _packed(
    documents: list[int], rank: int, lengths: np.ndarray, capacity: int
) -> list[Pass]:
    """Pack documents into passes of a rank of at most ``capacity`` tokens, each into the first pass with room."""
    packs: list[list[int]] = []
    rooms: list[int] = []
    for document, size in zip(documents, lengths[documents].tolist(), strict=True):
        at = next((i for i, left in enumerate(rooms) if left >= size), len(rooms))
        if at == len(rooms):
            rooms.append(capacity)
            packs.append([])
        rooms[at] -= size
        packs[at].append(document)
    return [Pass((rank,), tuple(pack)) for pack in packs]


def _by_rank(passes: Iterable[Pass], ranks: int) -> Plan:
    """Make the plan in which every rank runs its own of ``passes``, in their order.

    A rank ends with a pass that it shares with nobody, if need be an empty one: gradients are reduced in it.
    """
    plan: list[list[Pass]] = [[] for _ in range(ranks)]
    for p in passes:
        for rank in p.peers:
            plan[rank].append(p)
    for rank, run in enumerate(plan):
        if not run or len(run[-1].peers) > 1:
            run.append(Pass((rank,), ()))
    return tuple(map(tuple, plan))


def in_rounds(plan: Plan) -> Plan:
    """Return ``plan`` with empty passes inserted, so that all ranks run equally many passes.

    A pass that several ranks share then has the same index on all of them. So all ranks meet in every pass, as expert
    parallelism (``ep``) needs; the price is that every rank waits for the longest pass at each index.
    """
    in_step: list[list[Pass]] = [[] for _ in plan]

    def idle_until(rank: int, start: int) -> None:
        in_step[rank] += [Pass((rank,), ())] * (start - len(in_step[rank]))

    for p in _runnable_order(plan):
        start = max(len(in_step[rank]) for rank in p.peers)
        for rank in p.peers:
            idle_until(rank, start)
            in_step[rank].append(p)
    rounds = max(map(len, in_step))
    for rank in range(len(plan)):
        idle_until(rank, rounds)
    return tuple(map(tuple, in_step))


def finish_times(plan: Plan, lengths: np.ndarray, costs: DocumentTimes) -> list[float]:
    """Return the time at which each rank has finished its passes of ``plan``, in the unit of ``costs``.

    ``lengths``: tokens of each document. Raises :class:`PlanError` if ranks would wait for each other for ever.
    """
    clock, seconds = [0.0] * len(plan), dict[Pass, float]()
    for p in _runnable_order(plan):
        if p not in seconds:
            computed = costs.time(lengths[list(p.documents)], len(p.peers)).sum()
            seconds[p] = float(computed) + costs.fixed
        end = max(clock[rank] for rank in p.peers) + seconds[p]
        for rank in p.peers:
            clock[rank] = end
    return clock


def _runnable_order(plan: Plan) -> list[Pass]:
    """Order the passes as they can run: each as soon as it is next on all its ranks. Raises :class:`PlanError`."""
    queues, done = {rank: deque(run) for rank, run in enumerate(plan)}, []
    ready = list(queues)

    def absent(p: Pass) -> list[int]:
        return [r for r in p.peers if not queues.get(r) or queues[r][0] != p]

    while ready:
        rank = ready.pop()
        while queues[rank] and not absent(p := queues[rank][0]):
            done.append(p)
            for r in p.peers:
                queues[r].popleft()
            ready += [r for r in p.peers if r != rank]
    for rank, left in queues.items():
        if left:
            raise PlanError(
                f"the plan would hang: rank {rank} waits in the pass of documents {_shortened(left[0].documents)} "
                f"for rank {absent(left[0])[0]}, which runs another or none at that point"
            )
    return done


def _shortened(documents: tuple[int, ...]) -> str:
    return ", ".join(map(str, documents[:4])) + (", ..." if len(documents) > 4 else "")


def check_document_plan(plan: Plan, lengths: np.ndarray, capacity: int) -> None:
    """Raise :class:`PlanError` unless every document is computed once, every pass fits, and no rank waits for ever.

    ``plan``: which ranks compute each document, in which passes. ``lengths``: tokens of each document; ``capacity``:
    tokens that a rank can hold in a pass.
    """
    for rank, run in enumerate(plan):
        for p in run:
            if rank not in p.peers or len(set(p.peers)) < len(p.peers):
                raise PlanError(f"rank {rank} runs a pass of the ranks {p.peers}")
            tokens = int(lengths[list(p.documents)].sum())
            if -(-tokens // len(p.peers)) > capacity or 0 < tokens < len(p.peers):
                raise PlanError(
                    f"the pass of documents {_shortened(p.documents)} has {tokens} tokens for {len(p.peers)} ranks "
                    f"of {capacity} tokens"
                )
            if len(p.peers) > 1 and not tokens:
                raise PlanError(f"the ranks {p.peers} share a pass without documents")
        if not run or len(run[-1].peers) > 1:
            raise PlanError(
                f"rank {rank} does not end with a pass of its own, in which to reduce gradients"
            )
    seen = Counter(document for p in _runnable_order(plan) for document in p.documents)
    for document in range(len(lengths)):
        if seen[document] != 1:
            raise PlanError(f"document {document} is computed {seen[document]} times")


# --- FlexSP ---


def flexsp(
    lengths: np.ndarray,
    capacity: int,
    ranks: int,
    costs: DocumentTimes,
    buckets: int = 8,
    nodes: int = NODES,
) -> Plan:
    """Plan micro-batches of documents and, in each, groups of ranks, by integer programming (FlexSP, 2412.01523).

    A group is the ranks that compute the same documents together (Wang et al. 2024). Documents are sorted by length and
    cut into micro-batches. Plans are made with the fewest micro-batches that memory allows, with one more and with two
    more; the fastest plan is returned. Raises :class:`UsageError` without scipy, whose HiGHS solves the program.

    Args:
        ``lengths``: tokens of each document.
        ``capacity``: tokens that a rank can hold in a pass.
        ``ranks``: number of ranks.
        ``costs``: constants of the formula for a document's time.
        ``buckets``: number of different lengths that the integer program distinguishes at most; lengths are rounded up
            to one of them.
        ``nodes``: limit of the program's search tree.
    """
    _ranks_needed(lengths, capacity, ranks)
    order = np.argsort(-lengths, kind="stable")
    fewest = max(1, -(-int(lengths.sum()) // (capacity * ranks)))
    plans: list[Plan] = []
    count = fewest
    while len(lengths) and (count < fewest + 3 or not plans):
        busy, passes = np.zeros(ranks), list[Pass]()
        for chunk in _micro_batches(order, lengths, count):
            groups = _optimal_groups(
                chunk, lengths, capacity, ranks, costs, buckets, nodes
            )
            if groups is None:
                break
            groups.sort(key=lambda g: -costs.time(lengths[list(g[1])], g[0]).sum())
            passes += [
                _place_on_free_ranks(documents, width, busy, lengths, costs)
                for width, documents in groups
            ]
        else:
            shared_first = sorted(passes, key=lambda p: len(p.peers) == 1)
            plans.append(_by_rank(shared_first, ranks))
        count = count + 1 if count < fewest + 3 else min(2 * count, len(lengths))
    return min(
        plans,
        key=lambda plan: max(finish_times(plan, lengths, costs)),
        default=_by_rank((), ranks),
    )


def _micro_batches(
    order: np.ndarray, lengths: np.ndarray, count: int
) -> list[np.ndarray]:
    """Cut documents, ``order`` by length, into at most ``count`` micro-batches of about equally many tokens."""
    middle = np.cumsum(lengths[order]) - lengths[order] / 2
    where = (middle * count / lengths.sum()).astype(int)
    parts = np.split(order, np.flatnonzero(np.diff(where)) + 1)
    return [part for part in parts if len(part)]


def bucket(lengths: np.ndarray, count: int) -> list[np.ndarray]:
    """Divide documents into at most ``count`` buckets of similar length; return the indices of each bucket's documents.

    ``lengths``: tokens of each document. Planning later rounds each length up to the longest of its bucket; dynamic
    programming finds the buckets for which this adds the fewest tokens.
    """
    order = np.argsort(lengths, kind="stable")
    tops, counts = np.unique(lengths, return_counts=True)
    n = len(tops)
    ends, sums = np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(counts * tops))
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]  # a bucket of the values i to j
    waste = np.where(
        i <= j, tops[j] * (ends[j + 1] - ends[i]) - (sums[j + 1] - sums[i]), np.inf
    )
    best, cuts = waste[0], list[np.ndarray]()
    for _ in range(min(count, n) - 1):
        through = np.append(0, best[:-1])[:, None] + waste
        cuts.append(through.argmin(0))
        best = through.min(0)
    edges = [n]
    for cut in reversed(cuts):
        edges.append(int(cut[edges[-1] - 1]) if edges[-1] else 0)
    edges.append(0)
    return [order[ends[a] : ends[b]] for b, a in pairwise(edges) if b > a]


def _optimal_groups(
    chunk: np.ndarray,
    lengths: np.ndarray,
    capacity: int,
    ranks: int,
    costs: DocumentTimes,
    buckets: int,
    nodes: int,
) -> list[tuple[int, tuple[int, ...]]] | None:
    """Return the groups ``(ranks, documents)`` of one micro-batch that end the earliest, or None if it does not fit.

    A mixed-integer program chooses how many documents of each bucket each group takes, and which groups there are, such
    that the last group ends as early as possible. Every document counts as long as the longest of its bucket.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError:
        raise UsageError(
            "balance = 'flexsp' needs scipy; pip install scipy, or use 'greedy'"
        ) from None
    members = [chunk[b] for b in bucket(lengths[chunk], buckets)]
    tops = np.array([lengths[m].max() for m in members])
    counts = np.array([*map(len, members)])
    sizes = sorted({*(1 << i for i in range(ranks.bit_length())), ranks})
    groups = np.array([d for d in sizes for _ in range(min(ranks // d, len(chunk)))])
    k, p = len(tops), len(groups)
    times = costs.time(tops[:, None], groups[None, :])
    # Variables: A[k, p] row by row, whether each group is in use, the end of the last one. Times in units of the ideal.
    unit = float((costs.time(tops, 1) * counts).sum()) / ranks or 1.0
    on, last = k * p + np.arange(p), k * p + p
    a, g = np.arange(k * p), np.tile(np.arange(p), k)
    same = np.flatnonzero(np.diff(groups) == 0)
    parts = [  # rows, columns, values, lower and upper bounds of the rows
        (a // p, a, np.ones(k * p), counts, counts),
        (np.append(g, np.arange(p)), np.append(a, on), np.append(np.repeat(tops, p), -capacity * groups),
         np.full(p, -np.inf), np.zeros(p)),
        (np.concatenate((g, np.arange(p), np.arange(p))), np.concatenate((a, on, np.full(p, last))),
         np.concatenate((times.ravel() / unit, np.full(p, costs.fixed / unit), np.full(p, -1.0))),
         np.full(p, -np.inf), np.zeros(p)),
        (np.zeros(p, int), on, groups, np.zeros(1), np.full(1, ranks)),
        (np.tile(np.arange(len(same)), 2), np.append(on[same], on[same + 1]),
         np.repeat([1.0, -1.0], len(same)), np.zeros(len(same)), np.ones(len(same))),
    ]  # fmt: skip
    rules = [
        LinearConstraint(
            coo_array((v, (r, c)), shape=(len(low), last + 1)).tocsr(), low, high
        )
        for r, c, v, low, high in parts
        if len(low)
    ]
    upper = np.concatenate((np.repeat(counts, p), np.ones(p), [np.inf])).astype(float)
    # no group larger than a document has tokens
    upper[a] = np.where(tops[a // p] >= groups[g], upper[a], 0)
    goal = np.append(np.zeros(last), 1.0)
    integer = np.append(np.ones(last), 0)
    options = {"node_limit": nodes, "mip_rel_gap": 0.01}
    best = milp(
        goal,
        integrality=integer,
        bounds=Bounds(0, upper),
        constraints=rules,
        options=options,
    ).x
    if best is None:
        return None
    chosen = np.round(best[: k * p]).astype(int).reshape(k, p)
    # by bucket the documents of each group
    split = [
        np.split(m, np.cumsum(row)[:-1]) for m, row in zip(members, chosen, strict=True)
    ]
    taken = [np.concatenate(parts).tolist() for parts in zip(*split, strict=True)]
    return [
        (int(d), tuple(documents))
        for d, documents in zip(groups, taken, strict=True)
        if documents
    ]


#: Planners by the name that a layout gives them.
PLANNERS: dict[str, Callable[[np.ndarray, int, int, DocumentTimes], Plan]] = {
    "greedy": greedy,
    "flexsp": flexsp,
}


def make_plan(
    name: str,
    lengths: Sequence[int] | np.ndarray,
    capacity: int,
    ranks: int,
    costs: DocumentTimes,
) -> Plan:
    """Make the plan of a step with the planner named ``name``, and check it; raise :class:`PlanError` if it cannot run.

    ``lengths``: tokens of each document; ``capacity``: tokens that a rank can hold in a pass; ``ranks``: number of data
    ranks; ``costs``: constants of the formula for a document's time.
    """
    lengths = np.asarray(lengths, np.int64)
    plan = PLANNERS[name](lengths, capacity, ranks, costs)
    check_document_plan(plan, lengths, capacity)
    return plan


def step_planner(
    layout: Layout, costs: DocumentTimes
) -> Callable[[np.ndarray, int], Plan]:
    """Return the planner that ``layout.balance`` names: a function that returns the checked plan of a step.

    The function's arguments are the documents' lengths in tokens, and the tokens that a rank can hold in a pass.
    ``costs``: constants of the formula for a document's time.
    """

    def planned(lengths: np.ndarray, capacity: int) -> Plan:
        ranks = layout.size(*DATA_AXES)
        plan = make_plan(layout.balance, lengths, capacity, ranks, costs)
        return in_rounds(plan) if layout.ep > 1 else plan

    return planned
