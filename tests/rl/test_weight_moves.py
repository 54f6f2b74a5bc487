"""Weights go from 40 layouts of training to layouts of generation: each element once, and no byte that a rank has."""

from __future__ import annotations

import random
from functools import cache
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import pytest

from tests.rl.test_generation_model import EXPERTS, LORA, SHAPE, TIED, moved_under
from weft.checkpoint.boxes import intersection, volume
from weft.errors import UsageError
from weft.generate.leader import check_layout, of_parameters
from weft.layout.dims import Box, Tensor, slices, whole_box
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.placement import rank_table
from weft.parallel.build import check_fits, whole_model
from weft.recipe import ModelShape
from weft.rl.generation_groups import (
    common_elements,
    computed_boxes,
    generation_groups,
    trained_boxes,
)
from weft.rl.weight_plan import buckets, cut_box, padded_bytes, weight_plan

SHAPES = {"plain": SHAPE, "tied": TIED, "adapter": LORA, "experts": EXPERTS}
TRAINING = (
    "dp=4", "shard=4", "cp=4", "tp=4", "pp=4", "dp=2,shard=2", "dp=2,shard=2,zero=1", "dp=2,tp=2", "shard=2,tp=2",
    "cp=2,tp=2", "pp=2,dp=2", "pp=2,shard=2", "pp=2,cp=2", "pp=2,tp=2", "dp=2,tp=2,order=tp dp",
    "shard=2,tp=2,order=tp shard", "pp=2,tp=2,order=tp pp", "dp=4,ep=2", "shard=4,ep=4", "shard=2,tp=2,ep=2",
    "pp=2,dp=2,ep=2",
)  # fmt: skip
GENERATION = (
    "", "tp=2", "tp=4", "pp=2", "pp=4", "tp=2,pp=2", "cp=2", "cp=2,ep=2", "cp=4,ep=4", "tp=2,pp=2,order=tp pp",
)  # fmt: skip
Pair = tuple[str, str, str]


@cache
def pairs() -> list[Pair]:
    """40 pairs of layouts, each with a shape that fits both; every layout is in some pair."""
    drawn, fit = random.Random(5), list[Pair]()
    for training in TRAINING:
        for generation in GENERATION:
            for name, shape in SHAPES.items():
                spread = "ep" in training or "ep" in generation
                if spread != (name == "experts"):
                    continue
                try:
                    check_fits(ModelShape(**shape), Layout.parse(training))
                    check_layout(Layout.parse(generation), ModelShape(**shape))
                except UsageError:
                    continue
                fit.append((training, generation, name))
    drawn.shuffle(fit)
    chosen = [next(p for p in fit if p[0] == each) for each in TRAINING]
    chosen += [next(p for p in fit if p[1] == each and p not in chosen) for each in GENERATION]  # fmt: skip
    return chosen + [p for p in fit if p not in chosen][: 40 - len(chosen)]


def sides(pair: Pair) -> tuple[list[dict[str, Box]], list[dict[str, Box]], Layout]:
    """What each rank holds in training, and what each rank of the other layout computes with."""
    training, generation, name = pair
    shape = ModelShape(**SHAPES[name])
    layout = of_parameters(Layout.parse(generation))
    held = [trained_boxes(shape, Layout.parse(training), rank) for rank in range(4)]
    places = [computed_boxes(shape, layout, rank) for rank in range(layout.world)]
    return held, places, layout


def whole_tensors(name: str) -> dict[str, Tensor]:
    model = whole_model(ModelShape(**SHAPES[name]), Mesh.single())
    return {n: Tensor(logical.shape, "F32") for n, logical in model.logical_parameters()}  # fmt: skip


def numbered(tensor: Tensor) -> np.ndarray:
    return np.arange(prod(tensor.shape)).reshape(tensor.shape)


def listed(boxes: dict[str, Box]) -> dict[str, list[Box]]:
    return {name: [box] for name, box in boxes.items()}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("number", range(40))
def test_every_rank_gets_what_it_lacks_and_nothing_else(number: int) -> None:
    pair = pairs()[number]
    held, places, layout = sides(pair)
    held_lists = [listed(boxes) for boxes in held]
    groups = generation_groups(layout, held_lists, places)
    assert sorted(rank for group in groups.members for rank in group) == [*range(4)]
    shape = ModelShape(**SHAPES[pair[2]])
    ordered = [computed_boxes(shape, groups.layout, r) for r in range(layout.world)]
    needed = [dict[str, Box]() for _ in range(4)]
    for group in groups.members:
        for place, rank in enumerate(group):
            needed[rank] = ordered[place]
    tensors = whole_tensors(pair[2])
    plan = weight_plan(tensors, held_lists, [listed(boxes) for boxes in needed])
    kept = 0
    for rank in range(4):
        arrived = {n: np.full([b - a for a, b in box], -1) for n, box in needed[rank].items()}  # fmt: skip
        received = 0
        for move in (m for m in plan if m.target == rank):
            assert held[move.source][move.name] == move.held
            assert intersection(move.held, move.box) == move.box
            assert needed[rank][move.name] == move.needed
            corner = [lo for lo, _ in move.needed]
            at = tuple(slice(a - c, b - c) for (a, b), c in zip(move.box, corner, strict=True))  # fmt: skip
            assert (arrived[move.name][at] == -1).all(), "an element comes twice"
            arrived[move.name][at] = numbered(tensors[move.name])[slices(move.box)]
            received += volume(move.box) * (move.source != rank)
        lacking = 0
        for name, box in needed[rank].items():
            assert (arrived[name] == numbered(tensors[name])[slices(box)]).all()
            own = intersection(held[rank][name], box) if name in held[rank] else None
            kept += volume(own) if own is not None else 0
            lacking += volume(box) - (volume(own) if own is not None else 0)
        assert received == lacking
    assert kept == groups.kept
    # up to a norm, as many elements stay as in any groups that process groups allow
    assert kept >= 0.99 * best_kept(common_elements(held_lists, places), layout)


def best_kept(common: np.ndarray, layout: Layout) -> int:
    """The most elements that stay, over all groups whose ranks ascend along every axis."""
    size = layout.world
    table, best = rank_table(layout), 0
    for order in permutations(range(4)):
        members = np.array(order).reshape(-1, size)
        ascending = all(
            (np.diff(group[table], axis=axis) > 0).all()
            for group in members
            for axis in range(table.ndim)
        )
        if ascending:
            best = max(best, int(common[members, np.arange(size)].sum()))
    return best


def positions(box: Box, tensor: Tensor) -> np.ndarray:
    return numbered(tensor)[slices(box)].flatten()


@pytest.mark.parametrize("seed", range(20))
def test_messages_are_small_and_have_every_element_once(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 9) for _ in range(draw.randint(0, 4)))
    box, most = whole_box(shape), draw.randint(1, 20)
    pieces = list(cut_box(box, most))
    assert max(map(volume, pieces)) <= most
    whole = Tensor(shape, "F32")
    seen = np.concatenate([positions(piece, whole) for piece in pieces])
    assert (seen == np.arange(whole.numel)).all()
    kinds = {"a": "F32", "b": "BF16", "c": "U8"}
    tensors = {name: Tensor(shape, kind) for name, kind in kinds.items()}
    side = listed(dict.fromkeys(tensors, box))
    plan = weight_plan(tensors, [side, {}], [{}, side])
    limit = draw.choice([16, 40, 1000])
    messages = buckets(plan, tensors, limit)
    for message in messages:
        assert sum(padded_bytes(move, tensors) for move in message) <= limit
    for name in tensors:
        boxes = [m.box for each in messages for m in each if m.name == name]
        seen = np.concatenate([positions(piece, whole) for piece in boxes])
        assert (seen == np.arange(whole.numel)).all()


def test_intervals_as_in_hybridflow() -> None:
    """Of four ranks that train with tp = 4, neighbours generate with the same half, each beside one of the others."""
    held, places, layout = sides(("tp=4", "tp=2", "plain"))
    groups = generation_groups(layout, [listed(boxes) for boxes in held], places)
    assert groups.members == [[0, 2], [1, 3]]


@pytest.mark.soak
@pytest.mark.parametrize("number", range(40))
def test_pairs_move_between_processes(pool: Any, number: int) -> None:
    training, generation, name = pairs()[number]
    options = {"bucket": 4000, "freeze": []}
    pool.run(4, moved_under, training, generation, SHAPES[name], options)
