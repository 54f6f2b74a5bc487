"""What is done about slow ranks: layers of a lone pipeline are dealt by the speeds of its stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from weft.layout.layout import Layout
from weft.recipe import ModelShape
from weft.resilience.slow_ranks import SlowRanks

SHAPE = ModelShape(layers=16, embed=64, heads=4, vocab=64)


def members(count: int) -> Any:
    return [SimpleNamespace(number=10 + rank) for rank in range(count)]


@pytest.mark.parametrize(("layout", "speeds"), [
    (Layout(pp=4), (1, 1, 0.5, 1)),
    # the slowest of a stage counts
    (Layout(pp=2, tp=2), (1, 0.5)),
    # samples are dealt anew there
    (Layout(pp=2, dp=2), ()),
    (Layout(dp=4), ()),
    (Layout(pp=4, stage_speeds=(1, 2, 1, 1)), (1, 2, 0.5, 1)),
])  # fmt: skip
def test_a_slow_rank_slows_its_stage(layout: Layout, speeds: tuple[float, ...]) -> None:
    slow = SlowRanks("rebalance", {12: 2.0})
    assert slow.layout_for(layout, members(4)).stage_speeds == speeds
    assert SlowRanks("rebalance").layout_for(layout, members(4)) == layout


def test_ranks_are_judged_by_the_layers_that_they_have() -> None:
    job = cast(
        Any,
        SimpleNamespace(
            shape=SHAPE, recipe=SimpleNamespace(data=SimpleNamespace(seq_len=64))
        ),
    )
    slow = SlowRanks("rebalance", {12: 2.0})
    layout = slow.layout_for(Layout(pp=4), members(4))
    shares = slow.shares(job, members(4), layout)
    assert sum(shares.values()) == pytest.approx(4)
    # of 16 layers it has two
    assert shares[2] < 0.55 < 0.9 < min(shares[rank] for rank in (0, 1, 3))
