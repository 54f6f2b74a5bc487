"""Schedules with one stage per rank: with an undivided backward, and zero-bubble ones (2401.10241, section 2)."""

from weft.schedule.actions import Order


def gpipe(ranks: int, microbatches: int) -> list[Order]:
    """All forwards, then all backwards (Huang et al. 2019, 1811.06965): peak memory is every microbatch."""
    return [
        [(kind, r, m) for kind in "FB" for m in range(microbatches)]
        for r in range(ranks)
    ]


def one_forward_one_backward(ranks: int, microbatches: int) -> list[Order]:
    """1F1B (Narayanan et al. 2019/2021, 2104.04473): a rank holds as many microbatches as ranks are left below it."""
    return [
        alternate(["F", "B"], r, min(ranks - 1 - r, microbatches), microbatches)
        for r in range(ranks)
    ]


def alternate(kinds: list[str], rank: int, ahead: int, microbatches: int) -> Order:
    """``ahead`` forwards, then forward and backward in turn, then the backwards that are left."""
    forward, backward = (
        [(kind, rank, m) for m in range(microbatches)] for kind in kinds
    )
    turns = [a for pair in zip(forward[ahead:], backward, strict=False) for a in pair]
    return [*forward[:ahead], *turns, *backward[microbatches - ahead :]]


def zb_h1(ranks: int, microbatches: int) -> list[Order]:
    """ZB-H1 (Qi et al. 2023): 1F1B's order and peak; rank ``r`` keeps ``r`` weight gradients back to fill the end."""
    return [split(r, ranks - r, r, microbatches) for r in range(ranks)]


def zb_h2(ranks: int, microbatches: int) -> list[Order]:
    """ZB-H2: forwards also fill the time before the first backward, for a peak of ``2 * ranks - 1``."""
    return [split(r, 2 * (ranks - r) - 1, 2 * r, microbatches) for r in range(ranks)]


def split(rank: int, ahead: int, late: int, microbatches: int) -> Order:
    """``ahead`` forwards, then input gradient, weight gradient, forward in turn, the weights ``late`` rounds behind."""
    order = [("F", rank, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches + late):
        order += [("I", rank, m)] * (m < microbatches)
        order += [("W", rank, m - late)] * (m >= late)
        order += [("F", rank, m + ahead)] * (m + ahead < microbatches)
    return order
