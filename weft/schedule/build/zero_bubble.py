"""Zero-bubble schedules with one stage per rank, by hand (Qi et al. 2023, 2401.10241, section 2)."""

from weft.schedule.actions import Order


def zb_h1(ranks: int, microbatches: int) -> list[Order]:
    """ZB-H1: 1F1B's order and peak; rank ``r`` keeps ``r`` weight gradients back to fill the end."""
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
