"""DADAO: islands are what one process simulates, its clock is everybody's, and it minimises what all have together."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.cases import write_corpus
from tests.sync.test_islands import in_threads, tree
from weft.errors import UsageError
from weft.recipe import build_recipe
from weft.sync.gossip_dynamics import links_of
from weft.techniques.sync.dadao.dynamics import Dynamics, X

T = torch.Tensor


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    "sync",
    [
        {"every": 1},
        {
            "every": 2,
            "partner": "ring",
            "condition": 2.0,
            "pace": 1.0,
            "exchanges": 3.0,
        },
        {
            "every": 1,
            "partner": "graph",
            "graph": [(0, 1), (2, 1)],
            "stride": 1.5,
            "pace": 1.0,
        },
        {"every": 1, "moments": "neighbours", "pace": 2.0, "exchanges": 3.0},
    ],
    ids=["all", "ring", "graph", "moments"],
)
@pytest.mark.sampled(1)
def test_islands_without_rounds_are_what_one_process_simulates(
    corpus: str, sync: dict[str, Any]
) -> None:
    values = tree(corpus, "island=3", train__steps=20) | {
        "sync": {"update": "dadao", **sync}
    }
    compared = in_threads(values, 4 * sync["every"])
    assert compared.ok, compared


def quadratics(islands: int, size: int) -> tuple[T, T]:
    """Curvatures between 0.05 and 1 and optima of each island, ``[islands, size]``: none has the optimum of all."""
    random = torch.Generator().manual_seed(0)
    share = torch.rand(islands, size, generator=random, dtype=torch.float64)
    return 20**-share, torch.randn(islands, size, generator=random, dtype=torch.float64)


def minimised(dynamics: Dynamics, curvature: T, optima: T, times: int) -> T:
    """Where every island is after so many gradients of each, ``[islands, size]``."""
    rate = 1 / (4 * dynamics.stride * float(curvature.max()))
    states = [torch.zeros(6, curvature.shape[1], dtype=torch.float64) for _ in optima]
    for step in range(times):
        for state, own, best in zip(states, curvature, optima, strict=True):
            dynamics.learn(state, rate * own * (state[X] - best))
        clocks = [0.0] * len(states)
        for event in dynamics.clock(step):
            for i in event.islands:
                states[i] = dynamics.flow(event.time - clocks[i]) @ states[i]
                clocks[i] = event.time
            i, j = event.islands
            difference = dynamics.sent(states[i]) - dynamics.sent(states[j])
            dynamics.pull(states[i], difference)
            dynamics.pull(states[j], -difference)
        states = [
            dynamics.flow(1 - at) @ s for at, s in zip(clocks, states, strict=True)
        ]
    return torch.stack([state[X] for state in states])


@pytest.mark.parametrize("partner", ["all", "ring"])
def test_islands_find_the_optimum_of_all_though_each_has_another(partner: str) -> None:
    curvature, optima = quadratics(4, 5)
    how = build_recipe({"sync": {"update": "dadao", "partner": partner}}).sync
    dynamics = Dynamics(5.0, 1.0, links=links_of(how, 4))
    best = (curvature * optima).sum(0) / curvature.sum(0)
    apart = minimised(dynamics, curvature, optima, 400) - best
    assert float(apart.norm()) < 1e-5 * float((optima - best).norm())


def responses(pace: float) -> list[float]:
    """How far islands that are equal move in each unit of time after a single gradient of 1."""
    dynamics = Dynamics(0.12, 1.0, pace, links=[(0, 1)])
    state, gradient, places = torch.zeros(6, 1, dtype=torch.float64), 1.0, [0.0]
    for _ in range(4):
        dynamics.learn(state, torch.tensor([gradient], dtype=torch.float64))
        state, gradient = dynamics.flow(1.0) @ state, 0.0
        places.append(-float(state[X]))
    return [after - before for before, after in pairwise(places)]


def test_a_step_is_not_taken_back_at_a_large_pace() -> None:
    moved = responses(6.0)
    assert moved[:2] == pytest.approx([0.76, -0.22], abs=0.01)
    assert sum(responses(1.0)) < 0.2 * sum(moved)


def test_islands_need_more_exchanges_at_a_larger_pace() -> None:
    links = links_of(build_recipe({}).sync, 4)
    paper = Dynamics(8.0, 1.0, links=links)
    assert paper.rate == pytest.approx(4.5**0.5)
    assert Dynamics(8.0, 1.0, 3.0, links=links).rate == pytest.approx(3 * paper.rate)


def test_the_clock_is_poissons_and_the_same_everywhere() -> None:
    links = links_of(build_recipe({}).sync, 4)
    dynamics = Dynamics(8.0, 1.0, links=links, exchanges=2.5)
    drawn = [dynamics.clock(step) for step in range(800)]
    assert drawn == [dynamics.clock(step) for step in range(800)]
    counts = torch.tensor([len(each) for each in drawn]).double()
    assert float(counts.mean()) == pytest.approx(2.5, rel=0.08)
    assert float(counts.var()) == pytest.approx(2.5, rel=0.2)
    links = {event.islands for each in drawn for event in each}
    assert links == set(dynamics.links)
    assert all(a.time <= b.time for each in drawn for a, b in pairwise(each))


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"compress": "int8"}, "compress"),
        ({"partner": "pairs"}, "partner"),
        ({"fragments": 2}, "fragments"),
        ({"condition": 0}, "condition"),
        ({"exchanges": 0.5}, "exchanges"),
        ({"exchanges": 4.0, "pace": 80.0}, "pace"),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    setting: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError, match=word) as raised:
        build_recipe({"layout": {"island": 2}, "sync": {"update": "dadao", **setting}})
    assert "\n" not in str(raised.value)
