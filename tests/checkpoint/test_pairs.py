"""What any layout of up to eight ranks saves, any other one loads, bit by bit: a sample of pairs, and in soak all."""

from __future__ import annotations

import itertools
import math
import mmap
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.staging import plan_pieces
from weft.checkpoint.storage import LocalStorage
from weft.checkpoint.write_task import Commit, WriteTask
from weft.checkpoint.writer import commit, write_share
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.parts import Part
from weft.net.groups import fake_rank
from weft.parallel.build import check_fits
from weft.recipe import ModelShape, Recipe
from weft.train.setup import build_for_training

AXES = ("dp", "shard", "cp", "tp", "pp")
SHAPE = ModelShape(
    vocab=37,
    layers=8,
    embed=16,
    heads=8,
    kv_heads=2,
    head_dim=2,
    ffn=19,
    tied=False,
    qk_norm=True,
    qkv_bias=True,
)
#: Layers between the first and the last are like these, and one moment of the optimizer is like the other.
KEPT = ("blocks.0.", "blocks.7.", "embedding", "norm", "output")


def layouts() -> Iterator[Layout]:
    """All with at most eight ranks; where state is sharded, with the least and the most of ZeRO."""
    for sizes in itertools.product(range(1, 9), repeat=len(AXES)):
        if math.prod(sizes) > 8:
            continue
        axes = dict(zip(AXES, sizes, strict=True))
        for zero in (1, 3) if axes["shard"] > 1 else (1,):
            try:
                layout = Layout(**axes, zero=zero, context="ring")
                check_fits(SHAPE, layout)
                yield layout
            except UsageError:
                continue


def held(layout: Layout) -> dict[str, Part]:
    """Its parts of the state, without the values, on the rank that this process is."""
    mesh = Mesh.create(layout, "cpu")
    state = build_for_training(SHAPE, mesh, Recipe())[1].tensors()
    kept = {
        n: v
        for n, v in state.items()
        if "exp_avg_sq" not in n and any(f".{k}" in n for k in KEPT)
    }
    return {name: replace(v, values=torch.empty(0)) for name, v in kept.items()}


def boxes(parts: dict[str, Part]) -> str:
    return repr(sorted((name, local.box) for name, local in parts.items()))


def held_by_all(layout: Layout) -> list[dict[str, Part]]:
    """:func:`held` of every rank, in process groups that move nothing: making real ones takes most of the time."""
    ranks = []
    for rank in range(layout.world):
        with fake_rank(rank, layout.world):
            ranks.append(held(layout))
    return ranks


def whole(name: str, local: Part) -> torch.Tensor:
    return torch.randn(
        local.tensor.shape,
        generator=torch.Generator().manual_seed(zlib.crc32(name.encode())),
    )


def save(
    folder: Path, ranks: list[dict[str, Part]], values: dict[str, torch.Tensor]
) -> StoredCheckpoint:
    storage, manifests = (
        LocalStorage(folder),
        tuple(f"manifest/{r}.json" for r in range(len(ranks))),
    )
    for rank, parts in enumerate(ranks):
        pieces = plan_pieces(parts)
        with mmap.mmap(-1, 1 + sum(p.size for p in pieces)) as memory:
            for p in pieces:
                part = values[p.name][
                    tuple(slice(*edge) for edge in p.box)
                ].contiguous()
                memory[p.offset : p.offset + p.size] = (
                    part.view(-1).view(torch.uint8).numpy().tobytes()
                )
            tensors = {name: v.tensor for name, v in parts.items()}
            shares = tuple((p.name, p.box) for p in pieces)
            assert not write_share(
                WriteTask(
                    storage, f"data/{rank}", manifests[rank], tensors, shares, None
                ),
                memory,
            ).problem
    commit(storage, Commit(manifests, {"step": 1}, {}, 0))
    return StoredCheckpoint(storage)


def check_pairs(folder: Path, chosen: list[Layout]) -> None:
    """Whatever one of these layouts has saved, all of them load."""
    tables = {layout: held_by_all(layout) for layout in chosen}
    values: dict[str, torch.Tensor] = {}
    for ranks in tables.values():
        for parts in ranks:
            for name, local in parts.items():
                values.setdefault(name, whole(name, local))
    # Ranks that hold the same boxes load alike, whatever their layouts.
    distinct = {boxes(parts): parts for ranks in tables.values() for parts in ranks}
    for number, ranks in enumerate(tables.values()):
        checkpoint = save(folder / str(number), ranks, values)
        assert set(checkpoint.tensors) == set(values)
        for parts in distinct.values():
            got = {
                n: replace(
                    v, values=torch.full([hi - lo for lo, hi in v.box], torch.nan)
                )
                for n, v in parts.items()
            }
            checkpoint.load(got)
            for name, local in got.items():
                assert torch.equal(
                    local.values,
                    values[name][tuple(slice(*edge) for edge in local.box)],
                ), name


@pytest.mark.slow
def test_a_fake_group_lays_ranks_out_as_a_real_one_does(pool: Any) -> None:
    real = Layout(shard=2, cp=2, tp=2, context="ring")
    assert [boxes(parts) for parts in pool.run(8, held, real)] == [
        boxes(parts) for parts in held_by_all(real)
    ]


@pytest.mark.slow
def test_pairs_of_some_layouts(tmp_path: Path) -> None:
    """Of the largest worlds, where most is cut, and of any: ten that a seed has drawn."""
    every, rng = list(layouts()), random.Random(7)
    largest = [layout for layout in every if layout.world == 8]
    chosen = rng.sample(largest, 4) + rng.sample(
        [layout for layout in every if layout.world < 8], 6
    )
    assert all(any(layout.size(axis) > 1 for layout in chosen) for axis in AXES)
    check_pairs(tmp_path, chosen)


@pytest.mark.soak
def test_every_pair_of_layouts(tmp_path: Path) -> None:
    every = list(layouts())
    assert len(every) > 100
    check_pairs(tmp_path, every)
