"""A2CiD2: islands are what one process simulates, and on average they follow their optimizers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import write_corpus
from tests.sync.test_islands import in_threads, tree
from weft.errors import UsageError
from weft.recipe import build_recipe
from weft.sync.neighbour_moments import average_square
from weft.techniques.sync.a2cid2 import AveragingDynamics

T = torch.Tensor

#: Islands in a row, of which the outer ones have one neighbour.
ROW = [(i, i + 1) for i in range(7)]


@pytest.mark.parametrize(
    "sync",
    [
        {"every": 2, "partner": "graph", "graph": [(0, 1), (2, 1)], "exchanges": 3.0},
        {"every": 1},
        {"every": 1, "moments": "neighbours", "exchanges": 3.0},
    ],
    ids=["graph", "all", "moments"],
)
@pytest.mark.sampled(1)
def test_islands_that_average_without_rounds_are_what_one_process_simulates(
    tmp_path: Any, sync: dict[str, Any]
) -> None:
    values = tree(write_corpus(tmp_path), "island=3", train__steps=20)
    values |= {"sync": {"update": "a2cid2", **sync}}
    compared = in_threads(values, 3 * sync["every"])
    assert compared.ok, compared


def walked(dynamics: AveragingDynamics, islands: int, times: int) -> T:
    """States ``[islands, 2, n]`` after gradients of noise and their exchanges."""
    random = torch.Generator().manual_seed(0)
    states = torch.zeros(islands, 2, 3, dtype=torch.float64)
    for step in range(times):
        noise = torch.randn(islands, 3, generator=random, dtype=torch.float64)
        for state, own in zip(states, noise, strict=True):
            dynamics.learn(state, own)
        clocks = [0.0] * islands
        for event in dynamics.clock(step):
            for i in event.islands:
                states[i] = dynamics.flow(event.time - clocks[i]) @ states[i]
                clocks[i] = event.time
            i, j = event.islands
            difference = dynamics.sent(states[i]) - dynamics.sent(states[j])
            dynamics.pull(states[i], difference)
            dynamics.pull(states[j], -difference)
        for i, at in enumerate(clocks):
            states[i] = dynamics.flow(1 - at) @ states[i]
    return states


def test_the_mean_of_islands_is_that_of_their_own_steps() -> None:
    """Whatever they exchange; so two islands whose steps are equal are one."""
    random = torch.Generator().manual_seed(0)
    steps = sum(
        torch.randn(8, 3, generator=random, dtype=torch.float64) for _ in range(30)
    )
    after = walked(AveragingDynamics(links=ROW), 8, 30)
    for row in (0, 1):
        torch.testing.assert_close(after[:, row].mean(0), -steps.mean(0))


def test_acceleration_brings_islands_in_a_row_nearer_to_each_other() -> None:
    """Than plain averages at the same times."""

    class Plain(AveragingDynamics):
        speed = 0.0

    apart = [
        float((states - states.mean(0))[:, 0].square().mean())
        for kind in (AveragingDynamics, Plain)
        for states in [walked(kind(links=ROW, exchanges=14.0), 8, 300)]
    ]
    assert apart[0] < 0.8 * apart[1]


def test_a_pair_that_exchanges_is_equal_then() -> None:
    dynamics = AveragingDynamics(links=[(0, 1)])
    states = torch.randn(2, 2, 5, dtype=torch.float64)
    states[:, 1] = states[:, 0]
    difference = states[0, 0] - states[1, 0]
    dynamics.pull(states[0], difference)
    dynamics.pull(states[1], -difference)
    torch.testing.assert_close(states[0], states[1])


@pytest.mark.parametrize(
    "change", [{"sync": {"every": 2}}, {"optimizer": {"kind": "sgd"}}]
)
def test_second_moments_of_neighbours_are_those_of_adamw_in_every_step(
    change: dict[str, Any],
) -> None:
    wish = {"update": "a2cid2", "moments": "neighbours", **change.get("sync", {})}
    with pytest.raises(UsageError, match="second moments of AdamW") as raised:
        build_recipe({"layout": {"island": 2}} | change | {"sync": wish})
    assert "\n" not in str(raised.value)


def test_gradients_of_skipped_steps_change_no_second_moments() -> None:
    skipped, square = torch.full((3,), float("nan")), torch.ones(3)
    average_square(square, torch.ones(3), [skipped], 0.5)
    assert square.tolist() == [1.0, 1.0, 1.0]
    average_square(square, torch.ones(3), [skipped, torch.full((3,), 3.0)], 0.5)
    assert square.tolist() == [2.5, 2.5, 2.5]


@pytest.mark.parametrize("setting", [{"compress": "int8"}, {"partner": "pairs"}])
def test_what_averages_without_rounds_do_not_go_with_is_refused(
    setting: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match=next(iter(setting))) as raised:
        build_recipe({"layout": {"island": 2}, "sync": {"update": "a2cid2", **setting}})
    assert "\n" not in str(raised.value)
