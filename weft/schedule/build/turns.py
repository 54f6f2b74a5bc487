"""Orders of one rank that several schedules use."""

from weft.schedule.actions import Order


def alternate(kinds: list[str], rank: int, ahead: int, microbatches: int) -> Order:
    """Return the order of one rank in 1F1B: ``ahead`` forwards, then forward and backward in turn, then only backwards.

    ``kinds``: the kind of the forward actions and that of the backward actions, such as ``["F", "B"]``; ``rank``:
    number of the rank, and of the only stage that it holds; ``microbatches``: their number in a step.
    """
    forward, backward = (
        [(kind, rank, m) for m in range(microbatches)] for kind in kinds
    )
    turns = [a for pair in zip(forward[ahead:], backward, strict=False) for a in pair]
    return [*forward[:ahead], *turns, *backward[microbatches - ahead :]]


def split(rank: int, ahead: int, late: int, microbatches: int) -> Order:
    """Return the order of actions of one rank in a schedule whose backward is split into I and W.

    F is the forward, I the gradient of a stage's input, and W the gradient of its weights. The rank first runs
    ``ahead`` forwards, and then I, W and F in turn. The W of a microbatch runs ``late`` turns after its I.

    ``rank``: number of the rank, which is also the number of the only stage that it holds; ``microbatches``: their
    number in a step.
    """
    order = [("F", rank, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches + late):
        order += [("I", rank, m)] * (m < microbatches)
        order += [("W", rank, m - late)] * (m >= late)
        order += [("F", rank, m + ahead)] * (m + ahead < microbatches)
    return order
