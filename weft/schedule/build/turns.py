"""Orders of one rank that several schedules use."""

from weft.schedule.actions import Order


def alternate(kinds: list[str], rank: int, ahead: int, microbatches: int) -> Order:
    """Return the order of one rank: ``ahead`` forwards, forward and backward in turn, then the remaining backwards.

    ``kinds``: the two kinds of forward and backward.
    """
    forward, backward = (
        [(kind, rank, m) for m in range(microbatches)] for kind in kinds
    )
    turns = [a for pair in zip(forward[ahead:], backward, strict=False) for a in pair]
    return [*forward[:ahead], *turns, *backward[microbatches - ahead :]]


def split(rank: int, ahead: int, late: int, microbatches: int) -> Order:
    """Return the order of one rank with split backward: ``ahead`` forwards, then I, W and F in turn.

    The weight gradient (W) of a microbatch runs ``late`` rounds after the gradient of its input (I).
    """
    order = [("F", rank, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches + late):
        order += [("I", rank, m)] * (m < microbatches)
        order += [("W", rank, m - late)] * (m >= late)
        order += [("F", rank, m + ahead)] * (m + ahead < microbatches)
    return order
