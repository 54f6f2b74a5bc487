"""Experts, their moments and what routers know of loads go from any layout to any other, bit by bit."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import recipe, start, write_corpus
from tests.checkpoint.test_reshard import train_across
from tests.checkpoint.test_resume import go, series
from weft.checkpoint.boxes import intersection, volume
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.reshard import plan_moves, redistribute
from weft.checkpoint.run_state import Progress, load_state
from weft.checkpoint.save import Saver
from weft.checkpoint.storage import LocalStorage
from weft.errors import UsageError
from weft.layout.dims import Box, Tensor
from weft.layout.layout import Layout
from weft.layout.parts import TORCH_DTYPES, Part
from weft.parallel.build import check_fits
from weft.recipe import ModelShape

MODEL = {"layers": 2, "experts": 6, "expert_ffn": 9, "router": "sigmoid", "bias_rate": 0.05, "balance": "step",
         "balance_loss": 0.2, "shared_experts": 1, "shared_mix": "gate"}  # fmt: skip


def all_layouts() -> list[str]:
    """Every layout of four ranks with experts, each axis in {1, 2, 4}, and some of its orders."""
    found = []
    for text in ("dp=4", "shard=4", "cp=4", "tp=4", "dp=2,shard=2", "dp=2,cp=2", "dp=2,tp=2", "shard=2,cp=2",
                 "shard=2,tp=2", "cp=2,tp=2", "pp=2,dp=2", "pp=2,shard=2", "pp=2,cp=2", "pp=2,tp=2"):  # fmt: skip
        orders = (
            [""]
            if text.count("=") == 1
            else ["", " ".join(t.partition("=")[0] for t in text.split(",")[::-1])]
        )
        for ep in (1, 2, 4):
            for order in orders:
                try:
                    layout = Layout.parse(
                        f"{text},ep={ep},order={order}" if order else f"{text},ep={ep}"
                    )
                    check_fits(ModelShape(**MODEL, heads=4), layout)
                except UsageError:
                    continue
                found.append(f"{text},ep={ep}" + (f",order={order}" if order else ""))
    return found


def tree(corpus: str, layout: str, **change: Any) -> dict[str, Any]:
    values = recipe(
        corpus, **{f"model__{k}": v for k, v in MODEL.items()}, **change
    ).model_dump(mode="json")
    return values | {"layout": Layout.parse(layout).model_dump()}


Held = dict[str, tuple[Box, Tensor]]


@cache
def numbers(name: str, tensor: Tensor) -> torch.Tensor:
    """Other values for every element of every tensor, which all types hold exactly."""
    first = zlib.crc32(name.encode()) % 4096 * 4096
    return (
        (torch.arange(tensor.numel) + first)
        .view(tensor.shape)
        .to(TORCH_DTYPES[tensor.dtype])
    )


def part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(lo, hi) for lo, hi in box)]


def check_values(parts: dict[str, Part], where: object) -> None:
    for name, part in parts.items():
        assert torch.equal(
            part.values, part_of(numbers(name, part.tensor), part.box)
        ), (where, name)


def pass_on(trees: list[dict[str, Any]], folder: str) -> list[Held]:
    """On every rank: the state goes from each layout to the next, from running ranks and again from a checkpoint.

    Each leaves a checkpoint. Returns what this rank holds under each.
    """
    before, held, saver = None, [], Saver(print, strict=True)
    for number, values in enumerate(trees):
        state = start(values).state
        if before is None:
            for name, part in state.tensors().items():
                part.values.copy_(part_of(numbers(name, part.tensor), part.box))
        else:
            redistribute(before.tensors().items(), state.tensors())
            check_values(state.tensors(), values["layout"])
            for part in state.tensors().values():
                part.values.zero_()
            load_state(
                StoredCheckpoint(LocalStorage(Path(folder) / str(number - 1))), state
            )
        check_values(state.tensors(), values["layout"])
        saver.save(
            LocalStorage(Path(folder) / str(number)),
            0,
            state.saved(),
            {"progress": asdict(Progress()), "data": ""},
            {},
        )
        saver.finish()
        held.append(
            {name: (part.box, part.tensor) for name, part in state.saved().items()}
        )
        before = state
    saver.close()
    return held


def read_back(
    checkpoint: StoredCheckpoint, wanted: dict[str, set[tuple[Box, Tensor]]]
) -> None:
    """Read every part of a checkpoint that is wanted."""
    left = {name: list(boxes) for name, boxes in wanted.items()}
    while any(left.values()):
        parts = {}
        for name, boxes in left.items():
            if boxes:
                box, tensor = boxes.pop()
                empty = torch.zeros(
                    [hi - lo for lo, hi in box], dtype=TORCH_DTYPES[tensor.dtype]
                )
                parts[name] = Part(empty, box, tensor)
        checkpoint.load(parts)
        check_values(parts, checkpoint)


def check_moves(
    name: str, tensor: Tensor, held: Sequence[Box | None], needed: Sequence[Box | None]
) -> None:
    """Every element that a rank needs comes to it once, from a rank that has it."""
    sides = [[[] if box is None else [box] for box in side] for side in (held, needed)]
    for rank, box in enumerate(needed):
        came = torch.zeros(tensor.shape, dtype=torch.int64)
        for move in plan_moves(name, tensor, *sides, rank):
            if move.target == rank:
                source = held[move.source]
                assert (
                    source is not None and intersection(source, move.box) == move.box
                ), (name, move)
                part_of(came, move.box).add_(1)
        assert box is None or (
            (part_of(came, box) == 1).all() and came.sum() == volume(box)
        ), (name, rank)


def test_forty_layouts_have_experts() -> None:
    assert (
        len(all_layouts()) >= 40
        and sum("ep=4" in layout for layout in all_layouts()) >= 10
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, pytest.param(None, marks=pytest.mark.soak)])
def test_between_any_two_layouts(pool: Any, tmp_path: Path, count: int | None) -> None:
    """Every pair of some, in soak of all: what the one reads of the other's checkpoint, and what they send each other.

    Ranks go through all layouts in a random order. What they hold under each is all that a pair depends on: each part
    that a rank of any layout reads is read of each layout's checkpoint, and each pair's moves are looked at.
    """
    corpus, found = write_corpus(tmp_path), all_layouts()
    random.Random(1).shuffle(found)
    found = found[:count]
    assert all(
        any(part in layout for layout in found)
        for part in ("pp=2", "ep=1", "ep=2", "ep=4", "order=")
    )
    ranks = pool.run(
        4,
        pass_on,
        [tree(corpus, layout) for layout in found],
        str(tmp_path),
        timeout=400,
    )
    layouts: list[tuple[Held, ...]] = list(zip(*ranks, strict=True))
    names = {name for held in layouts[0] for name in held}
    for of in ("ffn.experts.down", "ffn.router.table"):
        assert {
            f"{kind}.blocks.1.{of}"
            for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        } <= names
    assert {f"model.blocks.0.ffn.router.{kept}" for kept in ("bias", "load")} <= names
    parts = {
        name: {held[name] for of in layouts for held in of if name in held}
        for name in names
    }
    for number in range(len(layouts)):
        checkpoint = StoredCheckpoint(LocalStorage(tmp_path / str(number)))
        assert set(checkpoint.tensors) == names
        read_back(checkpoint, parts)
    for name in names:
        (tensor,) = {tensor for _, tensor in parts[name]}
        # many are the same
        boxes = {
            tuple(held[name][0] if name in held else None for held in of)
            for of in layouts
        }
        for source, target in product(boxes, boxes):
            check_moves(name, tensor, source, target)


@pytest.mark.soak
def test_training_goes_on_with_experts_elsewhere(pool: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    layouts = [
        "shard=4,ep=4,placement=moving",
        "pp=2,shard=2,ep=2",
        "shard=2,tp=2,ep=4",
        "dp=4,ep=2,placement=moving",
        "cp=2,tp=2",
        "dp=2,shard=2,ep=4",
    ]
    alone = pool.run(1, train_across, [tree(corpus, "")] * len(layouts))[0][0]
    for losses, _ in pool.run(
        4, train_across, [tree(corpus, layout) for layout in layouts]
    ):
        assert losses == pytest.approx(alone, abs=1e-10)


@pytest.mark.soak
def test_a_checkpoint_of_one_ep_is_resumed_under_another(
    pool: Any, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path)
    often = {"checkpoint__every": 3, "checkpoint__keep": 5}
    whole = tmp_path / "whole"
    pool.run(
        4,
        go,
        tree(corpus, "shard=4,ep=4,placement=moving,spare=1", **often),
        str(whole),
    )
    for layout, ranks in (("", 1), ("pp=2,tp=2,ep=2", 4), ("dp=2,ep=2", 2)):
        again = tmp_path / f"again-{ranks}"
        pool.run(
            ranks,
            go,
            tree(corpus, layout, **often),
            str(again),
            str(whole / "checkpoints/step-000003"),
        )
        expected = {s: v for s, v in series(whole).items() if s > 3}
        assert (
            series(again) == pytest.approx(expected, abs=1e-10) and len(expected) == 3
        )
