"""All microbatches of a stage before the next stage (GreedySnake, 2512.17570)."""

from weft.schedule.actions import Order


def vertical(stages: int, microbatches: int) -> Order:
    """Return the order of actions of one rank that holds all ``stages`` stages and runs them one after the other, each
    for ``microbatches`` microbatches.

    Each stage runs for all microbatches before the next stage begins. So its parameters are fetched only twice in a
    step: once for forward and once for backward. The last stage runs the backward of a microbatch right after its
    forward, because the loss holds a large gradient of the head's weight until then.
    """
    ahead = range(stages - 1)
    forward = [("F", s, m) for s in ahead for m in range(microbatches)]
    last = [(kind, stages - 1, m) for m in range(microbatches) for kind in "FB"]
    backward = [("B", s, m) for s in reversed(ahead) for m in range(microbatches)]
    return [*forward, *last, *backward]
