"""Schedules with one stage per rank and an undivided backward."""

from weft.schedule.actions import Order


def gpipe(ranks: int, microbatches: int) -> list[Order]:
    """All forwards, then all backwards (Huang et al. 2019, 1811.06965): peak memory is every microbatch."""
    return [[(kind, r, m) for kind in "FB" for m in range(microbatches)] for r in range(ranks)]


def one_forward_one_backward(ranks: int, microbatches: int) -> list[Order]:
    """1F1B (Narayanan et al. 2019/2021, 2104.04473): a rank holds as many microbatches as ranks are left below it."""
    return [alternate(["F", "B"], r, min(ranks - 1 - r, microbatches), microbatches) for r in range(ranks)]


def alternate(kinds: list[str], rank: int, ahead: int, microbatches: int) -> Order:
    """``ahead`` forwards, then forward and backward in turn, then the backwards that are left."""
    forward, backward = ([(kind, rank, m) for m in range(microbatches)] for kind in kinds)
    turns = [a for pair in zip(forward[ahead:], backward, strict=False) for a in pair]
    return [*forward[:ahead], *turns, *backward[microbatches - ahead :]]
