"""Vocabulary passes: even compute, one microbatch more per barrier, and no longer than the schedule without them."""

from __future__ import annotations

from functools import cache

import pytest

from weft.layout.layout import Layout
from weft.recipe import ModelShape
from weft.schedule.partition import partition
from weft.schedule.simulate import Simulation, simulate
from weft.schedule.stages import make_table, modelled_costs
from weft.shapes.shape import shape_of

#: Yeung et al. 2024 test this: 4B parameters in layers, a vocabulary of 256k, 8 ranks.
SHAPE = ModelShape(layers=32, embed=3072, heads=24, vocab=256_000)
SEQ = 2048


@cache
def clock(schedule: str, barriers: int) -> Simulation:
    layout = Layout(pp=8, schedule=schedule, vocab_barriers=barriers)
    table = make_table(layout, 32, SHAPE, SEQ)
    return simulate(table, modelled_costs(SHAPE, layout, table, SEQ))


def spread(simulation: Simulation) -> float:
    """Compute of the busiest rank over the mean."""
    return max(simulation.busy) * len(simulation.busy) / sum(simulation.busy)


def naive() -> float:
    """The same number of layers everywhere, the output layer with the last."""
    _, layer, output = shape_of(SHAPE).forward_flops(SEQ)
    busy = [4 * layer] * 7 + [4 * layer + output]
    return max(busy) * 8 / sum(busy)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe"]
)
@pytest.mark.parametrize("barriers", [1, 2])
def test_compute_is_even_where_the_naive_placement_is_not(
    schedule: str, barriers: int
) -> None:
    assert naive() > 1.5
    passes = clock(schedule, barriers)
    assert spread(passes) <= 1.1
    without = clock(schedule, 0)
    assert passes.makespan < without.makespan
    assert spread(without) < naive()  # uneven stages already help


@pytest.mark.parametrize("barriers", [1, 2])
def test_a_barrier_costs_one_microbatch(barriers: int) -> None:
    simulation = clock("1f1b", barriers)
    assert [peak / 4 for peak in simulation.peaks] == [
        8 - rank + barriers for rank in range(8)
    ]
    # 1F1B without any vocabulary has (P - 1) / (M + P - 1) = 0.18.
    assert simulation.bubble_rate < 0.23


def test_partition_is_the_best_there_is() -> None:
    costs = [1.0, 5.0, 2.0, 2.0, 4.0, 1.0, 9.0]
    cuts = partition(costs, 3)
    assert [list(c) for c in cuts] == [[0, 1, 2], [3, 4, 5], [6]]
    # A device twice as fast takes more.
    assert [len(c) for c in partition([1.0] * 6, 2, speeds=[2.0, 1.0])] == [4, 2]
