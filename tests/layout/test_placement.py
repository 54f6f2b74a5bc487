"""The cutting rule: for any parameter and any layout, every element is held once per replica, and all else follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.layout.axes import CUTS, DATA_AXES, MODEL_AXES
from weft.layout.boundary import (
    I,
    P,
    R,
    V,
    gradient_types,
    parameter_types,
    state_types,
)
from weft.layout.dims import Box, Dim, part
from weft.layout.layout import Layout
from weft.layout.placement import Place, Placement, pieces_of_experts

NAMES = (*CUTS, "embed", "head_dim")
SIZES = st.sampled_from([1, 1, 2, 3, 4])
EXPERTS = [Dim("expert", 4), Dim("ffn", 6), Dim("embed", 5)]


def fill(counts: np.ndarray, box: Box) -> None:
    counts[tuple(slice(lo, hi) for lo, hi in box)] += 1


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    axes = {axis: draw(SIZES) for axis in ("pp", "dp", "shard", "cp", "tp")}
    used = [axis for axis, size in axes.items() if size > 1]
    order = " ".join(draw(st.permutations(used))) if used else ""
    shares = [1, draw(st.integers(1, 5)), 2, 1][: axes["tp"]] if axes["tp"] > 1 else []
    ep = draw(st.sampled_from([1, 2, 3, 4, 6]))
    uneven = draw(st.booleans())
    try:
        return Layout(**axes, ep=ep, order=order, tp_shares=shares if uneven else ())
    except UsageError:
        assume(False)
        raise


@st.composite
def dims(draw: st.DrawFn) -> list[Dim]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4))
    return [
        Dim(name, draw(st.integers(1, 9)), draw(st.sampled_from([1, 1, 2])))
        for name in names
    ]


def held_by_all(
    layout: Layout, of: list[Dim], whole: bool, stages: tuple[int, ...]
) -> list[tuple[Place, Placement]]:
    """What each rank of the ``stages`` holds."""
    places = [Place.of(layout, rank) for rank in range(layout.world)]
    return [
        (p, p.hold(p.logical(of, 1.0, whole), stages))
        for p in places
        if p.rank("pp") in stages
    ]


@settings(deadline=None, max_examples=100)
@given(layout=layouts(), of=dims(), whole=st.booleans(), tied=st.booleans())
# left half of the weight to nobody once
@example(layout=Layout(tp=2), of=EXPERTS, whole=False, tied=False)
@example(layout=Layout(shard=2, cp=2, tp=2, ep=4), of=EXPERTS, whole=False, tied=False)
@example(layout=Layout(dp=4, ep=4), of=EXPERTS, whole=False, tied=False)
@example(
    layout=Layout(dp=2, shard=2, cp=2, ep=2, order="cp dp shard"),
    of=EXPERTS,
    whole=False,
    tied=False,
)
# cut twice over one axis
@example(
    layout=Layout(tp=3), of=[Dim("heads", 5), Dim("ffn", 7)], whole=False, tied=False
)
@example(  # pieces of an expert whose other dimension is cut as well
    layout=Layout(shard=2, tp=2, ep=2),
    of=[Dim("expert", 1), Dim("vocab", 3), Dim("ffn", 5)],
    whole=False,
    tied=False,
)
def test_boxes_tile_and_counts_follow(
    layout: Layout, of: list[Dim], whole: bool, tied: bool
) -> None:
    assume(layout.world <= 64)
    stages = (0, layout.pp - 1) if tied and layout.pp > 1 else (0,)
    held = held_by_all(layout, of, whole, stages)
    logical = held[0][0].logical(of, 1.0, whole)
    copies: dict[int, np.ndarray] = {}
    norm = np.zeros(logical.shape, int)
    for place, placement in held:
        fill(
            copies.setdefault(placement.replica, np.zeros(logical.shape, int)),
            placement.box,
        )
        if placement.counted:
            fill(norm, placement.box)
        # One rank writes and counts: the first along every axis over which the same is held.
        same = [axis for axis, kind in state_types(logical).items() if kind is I]
        first = (
            all(place.rank(axis) == 0 for axis in same)
            and place.rank("pp") == stages[0]
        )
        if not logical.cut_by("ep"):
            assert placement.counted is first
        part = place.logical(of, 1.0, whole).box
        if all(hi > lo for lo, hi in part) and not logical.cut_by("ep"):
            sharing = sum(
                other.logical(of, 1.0, whole).box == part for other, _ in held
            )
            pending = [
                axis for axis, kind in gradient_types(logical).items() if kind is P
            ]
            assert layout.size(*pending) * len(stages) == sharing, (
                "its gradient is the sum of all that compute with it"
            )
    assert (norm == 1).all()
    replicas = {placement.replicas for _, placement in held}
    assert len(replicas) == 1 and set(copies) == set(range(replicas.pop()))
    assert all((counts == 1).all() for counts in copies.values()), (
        "every element once per replica"
    )


@given(layout=layouts(), of=dims(), whole=st.booleans())
def test_types_say_which_sums_are_pending(
    layout: Layout, of: list[Dim], whole: bool
) -> None:
    logical = Place.of(layout, 0).logical(of, 1.0, whole)
    pending = {axis for axis, kind in gradient_types(logical).items() if kind is P}
    for axis in MODEL_AXES:
        assert (axis in pending) is not logical.cut_by(axis)
        assert (parameter_types(logical)[axis] is R) is not logical.cut_by(axis)
        assert (state_types(logical)[axis] is V) is logical.cut_by(axis)
    assert (
        pending.isdisjoint(DATA_AXES)
        if logical.cut_by("ep")
        else pending.issuperset(DATA_AXES)
    )
    cut = [axis for axes in logical.cuts for axis in axes]
    in_pieces = pieces_of_experts(of, logical.cuts, layout)
    assert len(cut) == len(set(cut)) or in_pieces, "no axis cuts a parameter twice"


def test_experts_fold_over_the_data_ranks() -> None:
    layout = Layout(dp=2, shard=2, tp=2, ep=4)
    assert layout.world == 8
    for place, placement in held_by_all(layout, EXPERTS, False, (0,)):
        expert, ffn, embed = placement.box
        assert expert == (place.rank("ep"), place.rank("ep") + 1)
        assert ffn == (3 * place.rank("tp"), 3 * place.rank("tp") + 3) and embed == (
            0,
            5,
        )
        assert placement.replicas == 1


def test_experts_may_fold_over_tp_too() -> None:
    layout = Layout(shard=2, tp=2, ep=4, order="tp shard")
    held = held_by_all(layout, EXPERTS, False, (0,))
    assert sorted(placement.box[0] for _, placement in held) == [
        (e, e + 1) for e in range(4)
    ]
    assert all(
        placement.box[1:] == ((0, 6), (0, 5)) and placement.replicas == 1
        for _, placement in held
    )


def test_whole_experts_are_spread_evenly_over_unlike_ranks_of_tp() -> None:
    layout, five = Layout(tp=3, ep=3, tp_shares=(1, 1, 2)), Dim("expert", 5)
    held = held_by_all(layout, [five, Dim("ffn", 8)], False, (0,))
    assert [placement.box for _, placement in held] == [
        (part(5, 3, rank), (0, 8)) for rank in range(3)
    ]
    columns = held_by_all(layout, [Dim("ffn", 8)], False, (0,))
    assert [placement.box for _, placement in columns] == [
        ((0, 2),), ((2, 4),), ((4, 8),),
    ]  # fmt: skip


def test_few_experts_are_cut_in_their_width() -> None:
    two = [Dim("expert", 2), Dim("embed", 5), Dim("ffn", 6)]
    held = held_by_all(Layout(shard=4, ep=4), two, False, (0,))
    assert sorted(p.box for _, p in held) == [
        ((e, e + 1), (0, 5), (lo, lo + 3)) for e in (0, 1) for lo in (0, 3)
    ]
    held = held_by_all(Layout(dp=4, tp=3, ep=4), two, False, (0,))
    assert len({p.box for _, p in held}) == 12 and {
        p.box[2][1] - p.box[2][0] for _, p in held
    } == {1}


@pytest.mark.parametrize(
    "given", [{"ep": 2}, {"dp": 3, "ep": 2}, {"dp": 4, "shard": 6, "ep": 4}]
)
def test_experts_that_do_not_fold_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="use one of"):
        Layout(**given)
