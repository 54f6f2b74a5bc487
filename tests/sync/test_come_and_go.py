"""Islands come and go: the others go on with the same members, who comes back ends with the same bits."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.cases import write_corpus
from tests.sync.archipelago import job, trial
from weft.layout.mesh import Mesh
from weft.prove.equality import Difference, compare_with_one_device, walk
from weft.sync.presence import Presence
from weft.train.setup import prepare

NESTEROV = {"every": 4, "update": "nesterov"}
STREAMING = {"every": 4, "update": "streaming", "fragments": 2, "delay": 2}
CO2 = {"every": 4, "update": "co2"}
EAGER = {"every": 4, "update": "eager", "momentum": 0.5}
NOLOCO = {"every": 4, "update": "noloco"}
PAIRS = {"every": 4, "update": "average", "partner": "pairs"}
WHOLE = {"every": 4, "update": "nesterov", "compress": "topk:1"}
SMALL = {
    "every": 4,
    "update": "streaming",
    "fragments": 2,
    "delay": 2,
    "compress": "int8",
}
AVERAGE = {"every": 4, "update": "average", "compress": "none"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("islands"))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "sync", "more"), [
    ("kill", "island=3", NESTEROV, {"victim": 0}),  # the one that speaks
    pytest.param("return", "island=3", NESTEROV, {}, marks=pytest.mark.soak),
    pytest.param("thaw", "island=3", STREAMING, {}, marks=pytest.mark.soak),
    ("return", "island=2,shard=2", CO2, {"one_rank": True}),
])  # fmt: skip
def test_an_island_that_is_lost_costs_nobody_else_a_step(
    corpus: str,
    tmp_path: Path,
    kind: str,
    layout: str,
    sync: dict[str, Any],
    more: dict[str, Any],
) -> None:
    row = trial(kind, 1, corpus, tmp_path, layout, sync, **more)
    assert not row["wrong"], row


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["kill", "freeze", "thaw", "return"])
def test_islands_lost_at_random_instants(
    corpus: str, tmp_path: Path, kind: str, seed: int
) -> None:
    """Whatever an island does when it is lost: steps, the middle of an exchange, a hand-over."""
    layout = ["island=3", "island=2,shard=2", "island=4"][seed % 3]
    sync = [NESTEROV, STREAMING, CO2, AVERAGE, EAGER, NOLOCO, PAIRS, WHOLE, SMALL][
        (seed + 3 * len(kind)) % 9
    ]
    row = trial(
        kind, 100 + seed, corpus, tmp_path, layout, sync, one_rank=seed % 2 == 1
    )
    assert not row["wrong"], row


@pytest.mark.slow
@pytest.mark.parametrize(
    "sync", [NESTEROV | {"every": 2}, STREAMING | {"every": 2, "delay": 1}]
)
def test_another_state_than_most_is_found_and_mended(
    corpus: str, monkeypatch: pytest.MonkeyPatch, sync: dict[str, Any]
) -> None:
    """An element of an island's anchor changes between two rounds: all ends as if it had not."""
    asked, store, found = job(corpus, "island=3", sync), dist.HashStore(), []
    monkeypatch.setattr(
        Presence,
        "note_differing",
        lambda presence, odd, step: found.append((presence, [*odd], step)),
    )

    def be_island(mesh: Mesh) -> Difference | None:
        prepared = prepare(asked)
        for state, trace in walk(prepared, mesh, 8):
            if (len(trace.grads), mesh.island) == (3, 1):
                state.learning[0].slots["anchor"].values.flatten()[0] += 1
        return compare_with_one_device(trace, prepared, mesh)

    meshes = [
        dataclasses.replace(Mesh.single(), island=i, islands=3, island_store=store)
        for i in range(3)
    ]
    with ThreadPoolExecutor(3) as threads:
        differences = [one for one in threads.map(be_island, meshes) if one is not None]
    assert [one.ok for one in differences] == [True], differences
    assert len(found) == 3 and {(tuple(odd), step) for _, odd, step in found} == {
        ((1,), 4)
    }
