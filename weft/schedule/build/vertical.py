"""All microbatches of a stage before the next stage (GreedySnake, 2512.17570)."""

from weft.schedule.actions import Order


def vertical(stages: int, microbatches: int) -> Order:
    """Return the order of one rank that holds all stages and runs each for all microbatches before the next.

    So every stage's parameters are fetched once for forward and once for backward, for any number of microbatches. The
    last stage runs each microbatch's backward right after its forward: until then, the loss holds a gradient of the
    head's weight, which is large.
    """
    ahead = range(stages - 1)
    forward = [("F", s, m) for s in ahead for m in range(microbatches)]
    last = [(kind, stages - 1, m) for m in range(microbatches) for kind in "FB"]
    backward = [("B", s, m) for s in reversed(ahead) for m in range(microbatches)]
    return [*forward, *last, *backward]
