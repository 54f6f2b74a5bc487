"""Stages hold every layer once, in order, and the slowest is as fast as any cut can make it."""

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.recipe import ModelShape
from weft.schedule.partition import partition
from weft.schedule.stages import assign_stages, cut_stages, make_table

WORK = st.floats(0, 8, allow_subnormal=False).map(lambda x: round(x, 3))


@given(
    st.lists(WORK, min_size=1, max_size=8),
    st.integers(1, 8),
    st.lists(st.floats(0.1, 3), min_size=8, max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_partition_is_as_fast_as_the_best_of_all_cuts(
    costs: list[float], parts: int, speeds: list[float]
) -> None:
    if len(costs) < parts:
        with pytest.raises(UsageError, match="fewer stages"):
            partition(costs, parts)
        return

    def slowest(cuts: list[range]) -> float:
        return max(
            sum(costs[i] for i in share) / speed
            for share, speed in zip(cuts, speeds, strict=False)
        )

    found = partition(costs, parts, speeds[:parts])
    assert [i for share in found for i in share] == list(range(len(costs))) and all(
        found
    )
    every = (
        [0, *chosen, len(costs)]
        for chosen in combinations(range(1, len(costs)), parts - 1)
    )
    best = min(slowest([range(a, b) for a, b in pairwise(ends)]) for ends in every)
    assert slowest(found) == pytest.approx(best, abs=1e-8)


@pytest.mark.parametrize(
    ("layers", "stages"),
    [(4, 2), (9, 4), (32, 8), (30, 32), (126, 64), (7, 7), (5, 6), (3, 1)],
)
@pytest.mark.parametrize("head", [0.01, 0.7, 3.9])
@pytest.mark.parametrize("ends", [True, False])
def test_stages_hold_every_layer_once(
    layers: int, stages: int, head: float, ends: bool
) -> None:
    if not ends and layers < stages:
        return
    found = cut_stages(layers, stages, 1.0, 0.01, head, ends)
    assert [i for stage in found for i in stage.layers] == list(range(layers))
    assert [stage.embedding for stage in found] == [
        ends and s == 0 for s in range(stages)
    ]
    assert [stage.head for stage in found] == [
        ends and s == stages - 1 for s in range(stages)
    ]


def test_stages_that_are_always_run_are_shorter() -> None:
    shape = ModelShape(layers=24, embed=64, heads=4, vocab=64)
    layout = Layout(pp=6, skip=0.25)
    counts = [
        len(stage.layers)
        for stage in assign_stages(shape, layout, make_table(layout, 12, shape, 64), 64)
    ]
    assert max(counts[0], counts[-1]) < min(counts[1:-1])


@pytest.mark.parametrize(("change", "counts"), [
    ({}, [4, 4, 4, 4]), ({"stage_speeds": (1, 1, 0.5, 1)}, [5, 5, 2, 4]),
    # both stages of a rank are slow
    ({"schedule": "zb-v", "stage_speeds": (1, 1, 0.5, 1)}, [2, 2, 1, 2, 3, 1, 3, 2]),
])  # fmt: skip
def test_slow_ranks_of_a_pipeline_get_fewer_layers(
    change: dict[str, Any], counts: list[int]
) -> None:
    shape = ModelShape(layers=16, embed=64, heads=4, vocab=64)
    layout = Layout(pp=4, **change)
    stages = assign_stages(shape, layout, make_table(layout, 8, shape, 64), 64)
    assert [len(stage.layers) for stage in stages] == counts
