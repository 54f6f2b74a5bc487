"""Schedules by name: each builder gives the order of actions of every rank for any number of microbatches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.recipe.conflicts import Asked, refuse
from weft.schedule.actions import Order, Table, assemble
from weft.schedule.build.dualpipe import dualpipe, dualpipe_v
from weft.schedule.build.greedy import zb_1p, zb_2p
from weft.schedule.build.interleaved import breadth_first, depth_first
from weft.schedule.build.plain import gpipe, one_forward_one_backward, zb_h1, zb_h2
from weft.schedule.build.v_shape import v_half, v_min, zb_v
from weft.schedule.times import EQUAL, Times

__all__ = ["BUILDERS", "Builder", "Times", "build"]


#: A number, or an array of them: closed forms take both, so that a planner asks for thousands of layouts at once.
Number = Any


@dataclass(frozen=True)
class Builder:
    """A schedule. ``orders(ranks, microbatches, chunks, times)``: the order of every rank.

    ``bubble(ranks, microbatches, chunks, times)``: the time of a step in which a rank does not compute, in closed form;
    of schedules that fill holes by the clock only for ``2 * ranks`` microbatches or more.
    ``in_flight(ranks, chunks, rank)``: microbatches whose activations a rank holds at once, in units of all its stages,
    if there are as many (infinity: all there are).

    ``falls``: by how many forwards each rank further down runs less ahead of its backwards; what it holds falls with
    that if the little that kept weight gradients need is not counted.

    ``chunks``: stages that a rank holds for a microbatch; ``free``: the caller may choose another number of them;
    ``splits``: backward is divided into I and W (by some: only in part); ``twice``: a stage is held by two ranks.
    """

    orders: Callable[[int, int, int, Times], Sequence[Order]]
    bubble: Callable[[Number, Number, Number, Times], Number]
    in_flight: Callable[[Number, Number, Number], Number]
    about: str
    paper: str
    chunks: int = 1
    free: bool = False
    splits: bool = False
    twice: bool = False
    falls: int = 0


def larger(a: Number, b: Number) -> Number:
    """The larger of two numbers, or of two arrays entry by entry."""
    return (a + b + abs(a - b)) / 2


def _ramp(p: Number, t: Times) -> Number:
    """Filling and draining a pipeline with nothing else to do: a rank waits for a microbatch on all others."""
    return (p - 1) * (t.forward + t.backward)


def _filled(t: Times) -> Number:
    """What is left of a hop down the ranks and back where a forward and a weight gradient fill it."""
    return t.backward_input + larger(t.forward - t.backward_weight, 0)


def _held_back(p: Number, m: Number, most: Number, t: Times) -> Number:
    """What is left where at most ``most`` microbatches fill the wait for the first gradient.

    Each but the first shortens it by its forward, or by its weight gradient at the end, whichever takes less.
    """
    ahead = -larger(-m, -most)
    return larger(
        (p - 1) * _filled(t)
        + (p - ahead) * (t.forward - larger(t.forward - t.backward_weight, 0)),
        0,
    )


def _slots(p: Number, m: Number, t: Times) -> Number:
    """V-Min repeats blocks of six equal slots: whatever is shorter than a slot waits in every microbatch."""
    slot = larger(larger(t.forward, t.backward_input), t.backward_weight)
    return (2 * (p - 1) / 3 - 1 / 6) * (t.forward + t.backward) + m * (
        3 * slot - t.forward - t.backward
    )


#: Forward passes that a table may have at most: above, building it takes minutes and many GB.
LARGEST = 2_000_000

BUILDERS: dict[str, Builder] = {
    "gpipe": Builder(
        lambda p, m, v, t: gpipe(p, m),
        lambda p, m, v, t: _ramp(p, t),
        lambda p, v, r: inf,
        "all forwards, then all backwards", "1811.06965",
    ),
    "1f1b": Builder(
        lambda p, m, v, t: one_forward_one_backward(p, m),
        lambda p, m, v, t: _ramp(p, t),
        lambda p, v, r: p - r,
        "forward and backward in turn, peak P", "2104.04473", falls=1,
    ),
    "interleaved-1f1b": Builder(
        lambda p, m, v, t: depth_first(p, m, v, hide=t.move > 0),
        lambda p, m, v, t: _ramp(p, t) / v,
        lambda p, v, r: (2 * (p - 1 - r) + (v - 1) * p + 1) / v,
        "1F1B over v chunks per rank, depth first", "2104.04473", chunks=2, free=True, falls=1,
    ),
    "breadth-first": Builder(
        lambda p, m, v, t: breadth_first(p, m, v),
        lambda p, m, v, t: _ramp(p, t) / v,
        lambda p, v, r: inf,
        "GPipe over v chunks per rank", "2211.05953", chunks=2, free=True,
    ),
    "zb-h1": Builder(
        lambda p, m, v, t: zb_h1(p, m),
        lambda p, m, v, t: _held_back(p, m, p, t),
        lambda p, v, r: p,
        "1F1B with weight gradients kept back, peak P", "2401.10241", splits=True, falls=1,
    ),
    "zb-h2": Builder(
        lambda p, m, v, t: zb_h2(p, m),
        lambda p, m, v, t: _held_back(p, m, 2 * p - 1, t),
        lambda p, v, r: 2 * p - 1,
        "no bubble if F=B=W, peak 2P-1", "2401.10241", splits=True, falls=2,
    ),
    "zb-1p": Builder(
        lambda p, m, v, t: zb_1p(p, m, t),
        lambda p, m, v, t: _held_back(p, m, p, t),
        lambda p, v, r: p,
        "list-scheduled by the times, peak P", "2401.10241", splits=True,
    ),
    "zb-2p": Builder(
        lambda p, m, v, t: zb_2p(p, m, t),
        lambda p, m, v, t: _held_back(p, m, 2 * p - 1, t),
        lambda p, v, r: 2 * p,
        "the same in the memory of 2P", "2401.10241", splits=True, falls=2,
    ),
    "zb-v": Builder(
        lambda p, m, v, t: zb_v(p, m, t),
        lambda p, m, v, t: (p - 1) * larger(t.backward_input - t.backward_weight, 0),
        lambda p, v, r: p,
        "no bubble if F=B=W, peak P, two chunks per rank", "2401.10241", chunks=2, splits=True,
    ),
    "v-half": Builder(
        lambda p, m, v, t: v_half(p, m, t),
        lambda p, m, v, t: larger(p / 2 - 1 - p % 2 / 3, 1 / 6) * (t.forward + t.backward)
        + p * larger(t.backward_input - t.backward_weight, 0),
        lambda p, v, r: p / 2 + 1 + p % 2 / 2,
        "half of 1F1B's peak and bubble", "2405.15362", chunks=2, splits=True,
    ),
    "v-min": Builder(
        lambda p, m, v, t: v_min(p, m, t),
        lambda p, m, v, t: _slots(p, m, t),
        lambda p, v, r: (p + 4) / 3,
        "a third of 1F1B's peak, two thirds of its bubble", "2405.15362", chunks=2, splits=True,
    ),
    "dualpipe": Builder(
        lambda p, m, v, t: dualpipe(p, m),
        lambda p, m, v, t: (p / 2 - 1) * _filled(t),
        lambda p, v, r: p + 1,
        "two flows from both ends, parameters twice", "2412.19437", splits=True, twice=True,
    ),
    "dualpipe-v": Builder(
        lambda p, m, v, t: dualpipe_v(p, m),
        lambda p, m, v, t: (p - 1) / 2 * _filled(t),
        lambda p, v, r: p + 0.5,
        "DualPipe folded: two chunks per rank", "2412.19437", chunks=2, splits=True,
    ),
}  # fmt: skip


def build(
    name: str,
    ranks: int,
    microbatches: int,
    virtual: int | None = None,
    times: Times = EQUAL,
) -> Table:
    """The table of the schedule ``name``. ``virtual``: chunks per rank, for the looped schedules (default 2).

    ``times`` are used by schedules that fill holes by the clock. Raises :class:`UsageError` for a request that cannot
    be met.
    """
    if ranks < 1:
        raise UsageError(
            f"schedule {name} needs at least 1 rank, got {ranks}; give the size of the pipeline"
        )
    if microbatches < 1:
        raise UsageError(
            f"schedule {name} needs at least 1 microbatch, got {microbatches}; cut the batch into more"
        )
    if virtual is not None and virtual < 1:
        raise UsageError(
            f"schedule {name} needs at least 1 chunk per rank, got {virtual}; the usual number is 2"
        )
    asked = Asked(Layout(pp=ranks, schedule=name, virtual=virtual), schedules=BUILDERS)
    refuse(asked, "layout", "schedules")
    builder, chunks = BUILDERS[name], asked.chunks
    stages = ranks * chunks
    if stages * microbatches > LARGEST:
        raise UsageError(
            f"schedule {name} of {stages:,} stages and {microbatches:,} microbatches is too large for a table (at most "
            f"{LARGEST:,} passes in each direction); ask for fewer of either"
        )
    return assemble(
        name,
        builder.orders(ranks, microbatches, chunks, times),
        stages,
        [range(stages)] * microbatches,
    )
