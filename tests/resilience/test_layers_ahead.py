"""Layers that move come to their next rank beside the steps, and are to the last bit what they are where they were."""

from __future__ import annotations

import re
import threading
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cases import recipe, start, write_corpus
from weft.layout.layout import Layout
from weft.layout.mesh import from_all
from weft.net.endpoint import process_endpoint
from weft.recipe import Recipe
from weft.resilience.layers_ahead import (
    LayerMove,
    LayersAhead,
    can_copy_ahead,
    counterpart,
    layer_moves,
    layer_ranks,
)
from weft.resilience.views import this_process
from weft.train.setup import prepare
from weft.train.step import train_step

PIPELINE: dict[str, Any] = {
    "layout__pp": 2, "model__layers": 5, "train__batch": 4, "train__micro_batch": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("layers"))


def slowed(settings: Recipe, *speeds: float) -> Layout:
    return settings.layout.model_copy(update={"stage_speeds": speeds})


def test_which_layers_move_and_to_whom(corpus: str) -> None:
    job = prepare(recipe(corpus, **PIPELINE | {"model__layers": 9, "layout__tp": 2}))
    layout = job.recipe.layout
    assert layer_ranks(job, layout) == [0] * 5 + [1] * 4
    after = slowed(job.recipe, 0.4, 1.0)
    gone = [layer for layer in range(5) if layer_ranks(job, after)[layer]]
    assert gone and layer_moves(job, layout, after) == [
        LayerMove(layer, 0, 1) for layer in gone
    ]
    assert layer_moves(job, layout, layout) == []
    assert [counterpart(layout, rank, 1) for rank in range(4)] == [2, 3, 2, 3]


def fail(*_: Any) -> None:
    raise ZeroDivisionError("a fault of the receiver")


def moves_beside_steps(tree: dict[str, Any], fault: str = "") -> dict[str, Any]:
    """What a rank has got, and from whom.

    ``fault``: the receiver is "deaf" (takes no connection), "frozen" (takes it, and answers nothing), "slow" (so as
    well, but there is time) or "broken" (fails as it takes a message that it cannot know).
    """
    settings, mesh, model, state, loader = start(tree)
    job, rank = prepare(settings), mesh.rank("pp")
    endpoint = process_endpoint("127.0.0.1")
    members = from_all(this_process(rank, endpoint.address))

    def take(step: int) -> None:
        batches = loader.step(step * settings.train.batch) or []
        train_step(model, state, batches, mesh, lr=1e-2, clip=1.0)

    take(0)
    assert can_copy_ahead(job, state)
    after = slowed(settings, 0.3, 1.0)
    limit = 0.5 if fault in ("deaf", "frozen") else 60.0
    over, rule = threading.Event(), state.optimizer
    faults: dict[str, dict[str, Any]] = {
        "frozen": {"_receive": lambda *_: over.wait()},
        "slow": {"_receive": lambda *_: over.wait()},
        "broken": {"_take": fail},
    }
    epoch = 1 + rank * (fault == "deaf")
    with (
        mock.patch.multiple(LayersAhead, **faults.get(fault, {"sent": 0})),
        mock.patch("weft.resilience.layers_ahead.ROOM", 1.1 if fault == "slow" else 3),
    ):
        ahead = LayersAhead(
            state, job, after, rank, members, endpoint, "token", epoch, limit
        )
        from_all(None)
        take(1)
        take(2)
        ahead.finish(3)
        from_all(None)
    came, was = dict(ahead.parts(3)), state.parts()
    early = dict(ahead.parts(2))
    ahead.close()
    over.set()
    ahead._thread.join(60)
    assert not ahead._thread.is_alive() and state.optimizer is rule
    everyones = from_all({name: part.values for name, part in was.items()})
    return {
        "came": sorted(came),
        "early": len(early),
        "problem": ahead.problem,
        "there": ahead.there,
        "sent": ahead.sent,
        "differ": [
            name
            for name, part in came.items()
            if not torch.equal(part.values, everyones[0][name])
        ],
        "went": sorted(
            name for name in was if any(f".{block}" in name for block in ahead.targets)
        ),
        "bytes": sum(
            part.values.nbytes
            for name, part in was.items()
            if name.startswith("model.") and any(f".{b}" in name for b in ahead.targets)
        ),
    }


def test_what_has_come_is_what_was_there_after_the_last_step(
    pool: Any, corpus: str
) -> None:
    """Parameters and moments once, and the gradients of the two steps that were taken meanwhile."""
    tree = recipe(corpus, **PIPELINE).model_dump(mode="json")
    first, last = pool.run(2, moves_beside_steps, tree)
    assert last["came"] == first["went"] and last["came"]
    assert not last["differ"] and not last["problem"] and not first["problem"]
    assert not first["came"] and not last["early"] and not last["sent"]
    # the heads of the messages, and the numbers of what is in them, come on top
    assert 5 * first["bytes"] <= first["sent"] < 5.6 * first["bytes"]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("deaf", "rank 1: .*"),
        ("frozen", "rank 1: .*"),
        ("slow", "rank 1 takes less than the steps give: .* MiB wait"),
        ("broken", "rank 1: .*"),
    ],
)
def test_layers_that_cannot_come_move_later(
    pool: Any, corpus: str, fault: str, why: str
) -> None:
    """The steps go on, nobody waits for what cannot come, and both ends say why."""
    tree = recipe(corpus, **PIPELINE).model_dump(mode="json")
    first, last = pool.run(2, moves_beside_steps, tree, fault)
    assert re.fullmatch(why, first["problem"]) and first["there"] and not last["came"]
    broken = "what rank 0 sent: a fault of the receiver"
    assert last["problem"] == (broken if fault == "broken" else "")


@pytest.mark.parametrize(
    "change", [{"optimizer__kind": "muon"}, {"memory__weights": "host"}], ids=str
)
def test_updates_that_need_more_than_gradients_wait_for_the_stop(
    corpus: str, change: dict[str, Any]
) -> None:
    settings, _, _, state, _ = start(recipe(corpus, **change).model_dump(mode="json"))
    assert not can_copy_ahead(prepare(settings), state)
