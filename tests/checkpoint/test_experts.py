"""Experts, their moments and what routers know of loads go from any layout to any other, bit by bit."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import recipe, start, write_corpus
from tests.checkpoint.test_reshard import train_across
from tests.checkpoint.test_resume import go, series
from weft.checkpoint.state import Progress, move_state
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.parts import Part
from weft.parallel.build import check_fits
from weft.recipe import ModelShape

MODEL = {"layers": 2, "experts": 6, "expert_ffn": 9, "router": "sigmoid", "bias_rate": 0.05, "balance": "step",
         "balance_loss": 0.2, "shared_experts": 1, "shared_mix": "gate"}  # fmt: skip


def all_layouts() -> list[str]:
    """Every layout of four ranks with experts, each axis in {1, 2, 4}, and some of its orders."""
    found = []
    for text in ("dp=4", "shard=4", "cp=4", "tp=4", "dp=2,shard=2", "dp=2,cp=2", "dp=2,tp=2", "shard=2,cp=2",
                 "shard=2,tp=2", "cp=2,tp=2", "pp=2,dp=2", "pp=2,shard=2", "pp=2,cp=2", "pp=2,tp=2"):  # fmt: skip
        orders = [""] if text.count("=") == 1 else ["", " ".join(t.partition("=")[0] for t in text.split(",")[::-1])]
        for ep in (1, 2, 4):
            for order in orders:
                try:
                    layout = Layout.parse(f"{text},ep={ep},order={order}" if order else f"{text},ep={ep}")
                    check_fits(ModelShape(**MODEL, heads=4), layout)
                except UsageError:
                    continue
                found.append(f"{text},ep={ep}" + (f",order={order}" if order else ""))
    return found


def tree(corpus: str, layout: str, **change: Any) -> dict[str, Any]:
    values = recipe(corpus, **{f"model__{k}": v for k, v in MODEL.items()}, **change).model_dump(mode="json")
    return values | {"layout": Layout.parse(layout).model_dump()}


def numbers(name: str, part: Part) -> torch.Tensor:
    """Other values for every element of every tensor."""
    size = torch.tensor(part.tensor.shape).prod().item()
    whole = torch.arange(size, dtype=torch.float64).view(part.tensor.shape) + zlib.crc32(name.encode()) / 7
    return whole[tuple(slice(lo, hi) for lo, hi in part.box)].to(part.values.dtype)


def move_through(trees: list[dict[str, Any]]) -> int:
    """On every rank: the state goes through all layouts. Returns how many tensors have been compared."""
    before, compared = None, 0
    for values in trees:
        state = start(values).state
        if before is None:
            for name, part in state.tensors().items():
                part.values.copy_(numbers(name, part))
        else:
            move_state(before, state, Progress())
        for name, part in state.tensors().items():
            assert torch.equal(part.values, numbers(name, part)), (values["layout"], name)
            compared += 1
        before = state
    return compared


def test_forty_layouts_have_experts() -> None:
    assert len(all_layouts()) >= 40 and sum("ep=4" in layout for layout in all_layouts()) >= 10


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 4))])
def test_from_any_layout_to_any_other(pool: Any, tmp_path: Path, first: int) -> None:
    """All layouts, in five runs that begin with the same one."""
    corpus, found = write_corpus(tmp_path), ["shard=4,ep=4", *all_layouts()[first::5]]
    compared = pool.run(4, move_through, [tree(corpus, layout) for layout in found], timeout=200)
    assert min(compared) > 20 * len(found)


def test_training_goes_on_with_experts_elsewhere(pool: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    layouts = ["shard=4,ep=4", "pp=2,shard=2,ep=2", "shard=2,tp=2,ep=4", "dp=4,ep=2", "cp=2,tp=2", "dp=2,shard=2,ep=4"]
    alone = pool.run(1, train_across, [tree(corpus, "")] * len(layouts))[0][0]
    for losses, _ in pool.run(4, train_across, [tree(corpus, layout) for layout in layouts]):
        assert losses == pytest.approx(alone, abs=1e-10)


def test_a_checkpoint_of_one_ep_is_resumed_under_another(pool: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    often = {"checkpoint__every": 3, "checkpoint__keep": 5}
    whole = tmp_path / "whole"
    pool.run(4, go, tree(corpus, "shard=4,ep=4", **often), str(whole))
    for layout, ranks in (("", 1), ("pp=2,tp=2,ep=2", 4), ("dp=2,ep=2", 2)):
        again = tmp_path / f"again-{ranks}"
        pool.run(ranks, go, tree(corpus, layout, **often), str(again), str(whole / "checkpoints/step-000003"))
        expected = {s: v for s, v in series(whole).items() if s > 3}
        assert series(again) == pytest.approx(expected, abs=1e-10) and len(expected) == 3
