"""Every way to take a step survives a loss: what is copied is the state after a step, whole and final."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases import recipe, write_corpus
from tests.resilience.survivors import losses, ranks, recorded_once
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.recipe import Recipe
from weft.train.setup import prepare
from weft.train.training import train_job

STEPS = 10
EXPERTS = {
    "model__experts": 8,
    "model__expert_ffn": 9,
    "model__router": "sigmoid",
    "model__bias_rate": 0.05,
}
EMA = {"optimizer__ema": 0.5, "optimizer__use_ema": True}


def job(corpus: str, layout: str, **change: Any) -> Recipe:
    settings = {
        "train__steps": STEPS,
        "train__timeout": 60,
        "validation__every": 4,
        "validation__batches": 1,
    } | change
    axes = {
        f"layout__{axis}": size
        for axis, size in Layout.parse(layout).model_dump(exclude_defaults=True).items()
    }
    return recipe(
        corpus,
        **{
            name: value
            for name, value in settings.items()
            if layout or name not in ONLY
        },
        **axes,
    )


#: Settings that one rank has no use for.
ONLY = ("optimizer__post_validation", "layout__placement", "layout__spare")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "later": (
        "pp=2,dp=2",
        {"optimizer__post_validation": True, "optimizer__clip": 0.5},
    ),
    "in-backward": (
        "shard=2,tp=2",
        {"optimizer__in_backward": True, "optimizer__clip": 0.0},
    ),
    "zeroth": (
        "dp=2,shard=2",
        {"optimizer__estimate": "zeroth-order", "optimizer__lr": 1e-5},
    ),
    "moving": (
        "shard=4,ep=4",
        EXPERTS
        | EMA
        | {"layout__placement": "moving", "layout__spare": 1, "checkpoint__every": 3},
    ),
}


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "change"), [
    pytest.param(*case, id=name, marks=[] if name == "later" else pytest.mark.slow) for name, case in CASES.items()
])  # fmt: skip
def test_a_loss_changes_nothing(
    tmp_path: Path, layout: str, change: dict[str, Any]
) -> None:
    corpus = write_corpus(tmp_path)
    train_job(prepare(job(corpus, "", **change)), Mesh.single(), tmp_path / "whole")
    with ranks(job(corpus, layout, **change), tmp_path / "run") as run:
        run.step(6)
        run.signal(1, signal.SIGKILL)
        run.end(lost=[1])
        views = run.records("view")
    assert losses(tmp_path / "run") == pytest.approx(
        losses(tmp_path / "whole"), rel=1e-9
    )
    assert recorded_once(tmp_path / "run") == list(range(1, STEPS + 1))
    assert [view["ranks"] for view in views] == [4, 3]


@pytest.mark.soak
@pytest.mark.slow
def test_a_machine_that_was_suspended_goes_on(tmp_path: Path) -> None:
    """All ranks of a view were away at once, and one is gone: who is left has nobody to ask but each other."""
    with ranks(
        job(write_corpus(tmp_path), "dp=2,shard=2", validation__every=0),
        tmp_path / "run",
    ) as run:
        run.step(2)
        for rank in (0, 2, 3):
            run.signal(rank, signal.SIGSTOP)
        run.signal(1, signal.SIGKILL)
        time.sleep(2)
        for rank in (0, 2, 3):
            run.signal(rank, signal.SIGCONT)
        run.end(lost=[1])
    assert recorded_once(tmp_path / "run") == list(range(1, STEPS + 1))
