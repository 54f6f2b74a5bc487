"""Orders of one rank that several schedules use."""

from weft.schedule.actions import Order


def alternate(kinds: list[str], rank: int, ahead: int, microbatches: int) -> Order:
    """Return ``ahead`` forwards, then forward and backward in turn, then the remaining backwards."""
    forward, backward = (
        [(kind, rank, m) for m in range(microbatches)] for kind in kinds
    )
    turns = [a for pair in zip(forward[ahead:], backward, strict=False) for a in pair]
    return [*forward[:ahead], *turns, *backward[microbatches - ahead :]]


def split(rank: int, ahead: int, late: int, microbatches: int) -> Order:
    """Return ``ahead`` forwards, then I, W and F in turn, where weight gradients are ``late`` rounds behind."""
    order = [("F", rank, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches + late):
        order += [("I", rank, m)] * (m < microbatches)
        order += [("W", rank, m - late)] * (m >= late)
        order += [("F", rank, m + ahead)] * (m + ahead < microbatches)
    return order
