"""Pipelines cut at the exchanges of experts equal one device, and others compute while rows travel."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.cases import Case, start, write_corpus
from tests.parallel.test_experts import name, tree
from tests.prove.test_equality import difference
from weft.layout.layout import Layout
from weft.parallel.experts.rows import _Flight
from weft.parallel.overlap import LayerPass
from weft.train.step import train_step


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def values_of(corpus: str, case: Case) -> dict[str, Any]:
    """Of four layers and microbatches of a row."""
    values = tree(corpus, {"micro_batch": 1, "zero": 2} | case)
    layout = values["layout"] | {"overlap": case.get("overlap", "")}
    return values | {
        "layout": layout,
        "model": values["model"] | {"layers": 4} | case.get("more", {}),
    }


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [
    {"layout": "pp=2,dp=2,ep=2", "overlap": "passes", "model": "qwen2", "schedule": "interleaved-1f1b"},
    {"layout": "pp=2,shard=2,ep=2", "overlap": "pairs", "model": "deepseek-v3", "schedule": "gpipe",
     "dispatch": "per-rank"},
    {"layout": "pp=2,shard=2,ep=2", "overlap": "passes", "model": "step", "schedule": "zb-v", "early": True},
    {"layout": "pp=2,tp=2,ep=2", "overlap": "passes", "model": "deepseek-v2", "schedule": "dualpipe-v",
     "micro_batch": 2},
    {"layout": "pp=2", "overlap": "passes", "model": "mixtral", "capacity": 0.8},
    {"layout": "pp=2,dp=2,ep=2", "placement": "moving", "overlap": "passes", "model": "qwen3", "pieces": 2, "zero": 1},
    {"layout": "pp=2,cp=2,ep=2", "overlap": "pairs", "model": "eight experts", "schedule": "gpipe",
     "dispatch": "all-gather"},
    {"layout": "pp=2,shard=4,ep=4", "overlap": "passes", "model": "qwen2", "schedule": "zb-h1",
     "dispatch": "two-level"},
    {"layout": "pp=2,shard=2,ep=2", "overlap": "passes", "model": "mixtral",
     "more": {"first_dense": 1, "norm_after": True}},
], ids=name)  # fmt: skip
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    values = values_of(corpus, case)
    found = pool.run(Layout(**values["layout"]).world, difference, values)[0]
    assert found.ok, found


def computed_meanwhile(values: dict[str, Any]) -> tuple[int, int]:
    """On every rank: the journeys of rows in a step, there or back, and during how many another pass was computed."""
    _, mesh, model, state, loader = start(values)
    running: list[LayerPass] = []
    journeys: dict[int, tuple[LayerPass, set[LayerPass]]] = {}
    ended: list[bool] = []

    def noted(method: Any) -> Any:
        def run(one: LayerPass, *given: Any) -> Any:
            running.append(one)
            for owner, others in journeys.values():
                others |= {one} - {owner}
            found = method(one, *given)
            running.pop()
            return found

        return run

    def leave(flight: _Flight, rows: Any) -> Any:
        journeys[id(flight)] = running[-1], set()
        return left(flight, rows)

    def turn_back(flight: _Flight, grad: Any) -> Any:
        journeys[id(flight)] = running[-1], set()
        return turned(flight, grad)

    def land(flight: _Flight) -> Any:
        ended.append(bool(journeys.pop(id(flight))[1]))
        return landed(flight)

    left, turned, landed = _Flight.leave, _Flight.turn_back, _Flight.land
    with (
        mock.patch.object(_Flight, "leave", leave), mock.patch.object(_Flight, "turn_back", turn_back),
        mock.patch.object(_Flight, "land", land), mock.patch.object(LayerPass, "go_on", noted(LayerPass.go_on)),
        mock.patch.object(LayerPass, "go_back", noted(LayerPass.go_back)),
        mock.patch.object(LayerPass, "begin_back", noted(LayerPass.begin_back)),
    ):  # fmt: skip
        train_step(model, state, loader.step(0) or [], mesh, lr=1e-3, clip=1.0)
    assert not journeys
    return len(ended), sum(ended)


@pytest.mark.parametrize(
    ("overlap", "schedule"), [("passes", "dualpipe-v"), ("pairs", "gpipe")]
)
def test_others_compute_while_rows_travel(
    pool: Any, corpus: str, overlap: str, schedule: str
) -> None:
    case = {
        "layout": "pp=2,dp=2,ep=2",
        "model": "mixtral",
        "schedule": schedule,
        "overlap": overlap,
    }
    values = values_of(corpus, case)
    values["train"]["batch"] = 16
    found = pool.run(4, computed_meanwhile, values)
    # Of 8 microbatches there and back, forward and backward, through 2 layers here; the first and last are alone.
    assert all(count == 64 and meanwhile > count / 4 for count, meanwhile in found), (
        found
    )
