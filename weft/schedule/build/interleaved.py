"""Looped schedules: rank ``r`` holds the stages ``r``, ``r + P``, ``r + 2P``, ...; a microbatch goes round v times."""

from weft.schedule.actions import Order


def depth_first(
    ranks: int, microbatches: int, virtual: int, hide: bool = False
) -> list[Order]:
    """Megatron's interleaved 1F1B (Narayanan et al. 2021, 2104.04473), also called depth-first.

    Microbatches go round in groups of ``ranks``. Megatron wants whole groups; here the missing microbatches of the last
    group are left out, which cannot block: what remains keeps its order and depends on nothing that was removed.

    Moves cost ``2 v P - 2`` of their time on the critical path: groups of exactly ``P`` leave nothing to hide them
    behind when the last group's backward changes chunks. ``hide`` keeps one backward of the group before for that
    moment, which saves ``P`` moves and holds one chunk more. These are the figures that 2401.10241 states for 1F1B-I
    (where a chunk is one layer: v = 3 for 1.5B, 4 for 6.2B on 8 ranks), to four decimals.
    """
    groups = -(-microbatches // ranks)
    rounds = [
        (g, c, m)
        for g in range(groups)
        for c in range(virtual)
        for m in range(g * ranks, (g + 1) * ranks)
    ]
    total, back = len(rounds), list(rounds)
    hide = hide and groups > 1
    if hide:
        last_before = (groups - 1) * virtual * ranks - 1
        back.insert(last_before + ranks, back.pop(last_before))
    orders: list[Order] = []
    for r in range(ranks):
        forward = [("F", c * ranks + r, m) for _, c, m in rounds]
        backward = [("B", (virtual - 1 - c) * ranks + r, m) for _, c, m in back]
        ahead = min(2 * (ranks - 1 - r) + (virtual - 1) * ranks + hide, total)
        turns = [
            a for pair in zip(forward[ahead:], backward, strict=False) for a in pair
        ]
        order = [*forward[:ahead], *turns, *backward[total - ahead :]]
        orders.append(
            [(kind, stage, m) for kind, stage, m in order if m < microbatches]
        )
    return orders


def breadth_first(ranks: int, microbatches: int, virtual: int) -> list[Order]:
    """LoopedBFS (Lamy-Poirier 2022, 2211.05953): every microbatch passes a chunk before any enters the next chunk."""
    chunks = range(virtual)
    return [
        [("F", c * ranks + r, m) for c in chunks for m in range(microbatches)]
        + [
            ("B", c * ranks + r, m)
            for c in reversed(chunks)
            for m in range(microbatches)
        ]
        for r in range(ranks)
    ]


def vertical(stages: int, microbatches: int) -> Order:
    """One rank that holds all stages, each for all microbatches before the next (GreedySnake, 2512.17570).

    So every stage's parameters come once for forward and once for backward, however many microbatches there are. The
    last stage takes backward with forward: what its loss leaves for backward, a gradient of the head, is large.
    """
    turns = [(kind, stages - 1, m) for m in range(microbatches) for kind in "FB"]
    forward = [("F", s, m) for s in range(stages - 1) for m in range(microbatches)]
    return [
        *forward,
        *turns,
        *(
            ("B", s, m)
            for s in reversed(range(stages - 1))
            for m in range(microbatches)
        ),
    ]
