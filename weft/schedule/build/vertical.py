"""All microbatches of a stage before the next stage (GreedySnake, 2512.17570)."""

from weft.schedule.actions import Order


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
