"""Microbatches through the stages of random islands: what one process simulates, by the bytes that the formula says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.cases import write_corpus
from tests.sync.test_islands import difference, tree
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.recipe import build_recipe
from weft.sync.presence import Presence
from weft.sync.streams import open_streams
from weft.techniques.phases.routed_stages.drawn_routes import DrawnRoutes
from weft.train.build_step import build_step
from weft.train.setup import build_for_training, prepare
from weft.train.step import StepContext

NOLOCO = {"every": 2, "update": "noloco", "routes": "random"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def routed(
    corpus: str, layout: str, sync: dict[str, Any], **change: Any
) -> dict[str, Any]:
    """A recipe whose islands see samples of very unequal length, so that they have unequally many tokens."""
    change = {"train__steps": 20, "train__batch": 12, "optimizer__clip": 0.1} | change
    return tree(corpus, layout, **change) | {"sync": sync}


@pytest.mark.parametrize(
    ("layout", "sync", "change"),
    [
        ("island=2,pp=2", NOLOCO, {}),
        pytest.param("island=3,pp=2", NOLOCO, {}, marks=pytest.mark.soak),
        pytest.param("island=2,pp=3", NOLOCO, {"model__layers": 3}, marks=pytest.mark.soak),
        pytest.param("island=2,pp=2,dp=2", NOLOCO, {"train__batch": 16}, marks=pytest.mark.soak),
        pytest.param("island=3,pp=2,schedule=gpipe", NOLOCO | {"update": "nesterov"}, {}, marks=pytest.mark.soak),
        pytest.param("island=2,pp=2,schedule=zb-h1", NOLOCO, {"model__tied": True}, marks=pytest.mark.soak),
        pytest.param("island=2,pp=2,tp=2", NOLOCO, {"model__dropout": 0.1}, marks=pytest.mark.soak),
        # islands that sum gradients in every step stay alike, so that they are one device whatever the routes
        pytest.param("island=2,pp=2", {"routes": "random"}, {}, marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_routes_are_what_one_process_simulates(
    pool: Any, corpus: str, layout: str, sync: dict[str, Any], change: dict[str, Any]
) -> None:
    values = routed(corpus, layout, sync, **change)
    world = Layout.parse(layout).world
    compared = pool.run(world, difference, values, 4, timeout=300)
    assert [each.ok for each in compared if each is not None] == [True], compared


def test_routes_are_permutations_that_differ_by_step_stage_and_microbatch() -> None:
    drawn = [
        tuple(DrawnRoutes(3, 0, step).sources(stage, m))
        for step in range(10) for stage in (1, 2) for m in range(20)
    ]  # fmt: skip
    counts = Counter(drawn)
    assert len(counts) == 6 and all(sorted(each) == [0, 1, 2] for each in counts)
    assert max(counts.values()) < 2 * min(counts.values())
    routes = DrawnRoutes(4, 1, 5)
    for island in range(4):
        assert routes.source(2, routes.target(2, island, 3), 3) == island
        before = routes.source(2, island, 3)
        assert routes.origin(2, island, 3) == routes.source(1, before, 3)
        assert routes.origin(0, island, 3) == island


def sent_by_steps(values: dict[str, Any], steps: int) -> tuple[int, int, int, int]:
    """On every rank: its island and stage, the bytes of tensors it sends, and how many the formula says."""
    asked = build_recipe(values)
    mesh, job = Mesh.create(asked.layout, "cpu"), prepare(asked)
    model, state = build_for_training(job.shape, mesh, asked)
    loader = job.loader(job.corpus.train, mesh)
    with open_streams(mesh, 60) as streams:
        assert streams is not None
        step = build_step(
            StepContext(model, state, mesh, presence=Presence(streams)), asked
        )
        expected, stage, last = 0, mesh.rank("pp"), mesh.size("pp") - 1
        for number in range(steps):
            batches = loader.step(number * asked.train.batch) or []
            step.take(batches, 1e-3)
            routes = DrawnRoutes(streams.islands, asked.train.seed, number)
            for m, batch in enumerate(batches):
                hops = (stage > 0 and routes.target(stage, mesh.island, m) != mesh.island) + (
                    stage < last and routes.source(stage + 1, mesh.island, m) != mesh.island
                )  # fmt: skip
                expected += hops * batch.tokens.numel() * job.shape.embed * 8
        return mesh.island, stage, streams.sent, expected


@pytest.mark.slow
def test_a_rank_sends_activations_and_gradients_of_what_hops(
    pool: Any, corpus: str
) -> None:
    values = routed(corpus, "island=2,pp=2", NOLOCO | {"every": 20})
    for island, stage, sent, expected in pool.run(
        4, sent_by_steps, values, 2, timeout=200
    ):
        assert sent == expected > 0, (island, stage)
