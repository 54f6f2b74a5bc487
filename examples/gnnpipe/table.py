"""The table of GNNPipe: graph layers over ranks, chunks of nodes as microbatches that read each other's state."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from weft.schedule.actions import Action, Table, Value, assemble
from weft.schedule.kinds import KINDS, Duty, Kind, declare_kind

# A stage's passes read what those of the stages beside it write, as any pipeline's do, and the state of other chunks.
FORWARD = declare_kind(
    Kind(
        "GF",
        "forward of a chunk",
        "#2563eb",
        Duty.FORWARD,
        forward=True,
        flow=KINDS["F"].flow,
    )
)
BACKWARD = declare_kind(
    Kind("GB", "backward of a chunk", "#15803d", Duty.BACKWARD, flow=KINDS["B"].flow)
)


def chunk_order(chunks: int, epoch: int, seed: int | None) -> list[int]:
    """In which order an epoch's chunks pass the stages: shuffled, so that none stays the stalest, or as numbered."""
    order = list(range(chunks))
    if seed is not None:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def graph_table(
    ranks: int,
    order: Sequence[int],
    near: Mapping[int, Collection[int]] | None = None,
    backward: bool = True,
) -> Table:
    """One epoch of layer-pipelined graph training (Chen, Chen & Qian 2023, arXiv:2308.10087), one stage per rank.

    Forward in ``order``, backward in reverse. A chunk's forward also reads ``layer_in``, the inputs that its stage's
    layers have had, of the chunks before it in which it has neighbours (``near[chunk]``; default: in all). ``late``
    sums what flows back over these reads: a chunk's share is whole when the backward of every later chunk is over,
    hence the reverse order. What a chunk reads of chunks after it is of the epoch before and not in this table. Both
    values stay on their rank. ``backward``: False for inference.
    """
    actions = [(FORWARD, c) for c in order] + [
        (BACKWARD, c) for c in reversed(order) if backward
    ]
    orders = [[(kind, rank, c) for kind, c in actions] for rank in range(ranks)]

    def add_state(a: Action) -> Action:
        s, c, i = a.stage, a.microbatch, order.index(a.microbatch)
        if a.kind == FORWARD:
            state = [
                Value("layer_in", s, e)
                for e in order[:i]
                if near is None or e in near[c]
            ]
            return replace(
                a, reads=(*a.reads, *state), writes=(*a.writes, Value("layer_in", s, c))
            )
        late = [Value("late", s, e) for e in order[i + 1 : i + 2]]
        return replace(
            a,
            reads=(*a.reads, *late),
            writes=(*a.writes, *([Value("late", s, c)] if i else [])),
        )

    return assemble("gnnpipe", orders, ranks, [range(ranks)] * len(order)).map(
        add_state
    )
