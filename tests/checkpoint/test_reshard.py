"""State goes from any layout to any other between running ranks, and each byte once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import recipe, write_corpus
from weft.checkpoint.boxes import volume
from weft.checkpoint.load import StoredCheckpoint
from weft.checkpoint.reshard import load_parts, plan_moves, redistribute
from weft.checkpoint.save import Saver
from weft.checkpoint.storage import LocalStorage
from weft.errors import WeftError
from weft.layout.dims import Box, Tensor, part
from weft.layout.mesh import Mesh
from weft.layout.parts import NAMES, Part
from weft.recipe import build_recipe
from weft.train.setup import build_for_training, prepare
from weft.train.step import train_step

WHOLE = {"w": (12, 10), "bias": (7,), "scalar": (), "cube": (5, 3, 4)}
KINDS = {
    "w": torch.float32,
    "bias": torch.bfloat16,
    "scalar": torch.int64,
    "cube": torch.float64,
}


def value(name: str) -> torch.Tensor:
    return (
        torch.arange(1, 1 + volume(tuple((0, n) for n in WHOLE[name])))
        .view(WHOLE[name])
        .to(KINDS[name])
    )


def box_of(shape: tuple[int, ...], cut: tuple[int, ...], rank: int) -> Box | None:
    """The box of ``rank`` in a grid of ``cut`` parts per dimension; replicas after that; none for the last ranks."""
    parts = 1
    for n in cut:
        parts *= n
    number, edges = rank % parts, []
    for size, n in zip(shape, cut, strict=False):
        edges.append(part(size, n, number % n))
        number //= n
    return tuple(edges) + tuple((0, size) for size in shape[len(cut) :])


def held(
    cuts: dict[str, tuple[int, ...]], rank: int, ranks: int, fill: bool
) -> dict[str, Part]:
    found = {}
    for name, shape in WHOLE.items():
        if rank >= ranks:
            continue
        cut = cuts[name][: len(shape)]
        box = box_of(shape, cut, rank)
        assert box is not None
        index = tuple(slice(*edge) for edge in box)
        values = (
            value(name)[index].clone() if fill else torch.zeros_like(value(name)[index])
        )
        found[name] = Part(values, box, Tensor(shape, NAMES[KINDS[name]]))
    return found


def go(
    old: dict[str, tuple[int, ...]],
    new: dict[str, tuple[int, ...]],
    olds: int,
    news: int,
) -> tuple[int, int]:
    """On every rank: move, check, and return the bytes sent and the bytes that had to come from elsewhere."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    sources, targets = held(old, rank, olds, True), held(new, rank, news, False)
    sent = redistribute(sources.items(), targets)
    missing = 0
    for name, local in targets.items():
        assert torch.equal(
            local.values, value(name)[tuple(slice(*edge) for edge in local.box)]
        ), name
        mine = sources.get(name)
        common = 0
        if mine is not None:
            both = [
                (max(a, c), min(b, d))
                for (a, b), (c, d) in zip(mine.box, local.box, strict=True)
            ]
            common = volume(tuple(both)) if all(lo < hi for lo, hi in both) else 0
        missing += (volume(local.box) - common) * local.tensor.itemsize
    return sent, missing


GRIDS = [(), (2,), (4,), (1, 2), (2, 2), (1, 3), (3,), (1, 4)]


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    old=st.sampled_from(GRIDS),
    new=st.sampled_from(GRIDS),
    olds=st.sampled_from([3, 4]),
    news=st.sampled_from([3, 4]),
)
def test_any_grid_to_any_other(
    pool: Any, old: Any, new: Any, olds: int, news: int
) -> None:
    size = 1
    for n in old:
        size *= n
    if size > olds:
        olds = size
    found = pool.run(
        4, go, dict.fromkeys(WHOLE, old), dict.fromkeys(WHOLE, new), olds, news
    )
    sent, missing = (sum(side) for side in zip(*found, strict=True))
    # Each byte that a rank lacks travels once; pieces are padded to eight bytes.
    assert missing <= sent <= missing + 8 * 16 * len(WHOLE)


def test_holders_take_turns_and_no_rank_sends_what_the_other_has() -> None:
    whole = ((0, 8),)
    sends = [
        m.source
        for k in range(40)
        for m in plan_moves(
            f"t{k}",
            Tensor((8,), "F32"),
            [[whole], [whole], [whole], []],
            [[], [], [], [whole]],
            3,
        )
    ]
    assert len(sends) == 40 and {sends.count(r) > 5 for r in range(3)} == {True}
    assert [
        (m.source, m.target)
        for m in plan_moves(
            "t", Tensor((8,), "F32"), [[whole], [whole]], [[whole], [whole]], 1
        )
    ] == [(1, 1)]


def test_what_nobody_holds_is_an_error() -> None:
    with pytest.raises(WeftError, match="do not hold t"):
        list(plan_moves("t", Tensor((8,), "F32"), [[((0, 4),)]], [[((0, 8),)]], 0))
    with pytest.raises(WeftError, match="do not hold t"):
        list(
            plan_moves(
                "t", Tensor((8,), "F32"), [[((0, 5),)], [((3, 8),)]], [[((0, 8),)]], 0
            )
        )


class Far:
    """Part storage that counts as far away."""

    def __init__(self, folder: Path) -> None:
        self._place = LocalStorage(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._place, name)

    def __str__(self) -> str:
        return str(self._place)


def shared_load(folder: str) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    values = {"w": torch.zeros(4096, 300), "bias": torch.zeros(8)}
    box = {name: tuple((0, n) for n in v.shape) for name, v in values.items()}
    locals_ = {
        n: Part(v, box[n], Tensor(tuple(v.shape), "F32"), rank, world)
        for n, v in values.items()
    }
    checkpoint = StoredCheckpoint(Far(Path(folder)))  # type: ignore[arg-type]
    load_parts(checkpoint, locals_)
    assert (
        torch.equal(values["w"], torch.arange(4096 * 300.0).view(4096, 300))
        and values["bias"].sum() == 8
    )
    return checkpoint.bytes_read


def damaged_load(folder: str) -> str:
    try:
        shared_load(folder)
    except WeftError as error:
        return str(error)
    return ""


def test_replicas_share_the_reading_and_all_hear_of_damage(
    pool: Any, tmp_path: Path
) -> None:
    values = {"w": torch.arange(4096 * 300.0).view(4096, 300), "bias": torch.ones(8)}
    saver = Saver(print)
    saver.save(
        LocalStorage(tmp_path), 1,
        {n: Part(v, tuple((0, k) for k in v.shape), Tensor(tuple(v.shape), "F32")) for n, v in values.items()}, {}, {},
    )  # fmt: skip
    saver.finish()
    saver.close()
    size = (4096 * 300 + 8) * 4
    read = pool.run(4, shared_load, str(tmp_path))
    assert sum(read) == size and max(read) < size / 3
    data = next((tmp_path / "data").iterdir())
    with data.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"?")
    problems = pool.run(4, damaged_load, str(tmp_path))
    assert len(set(problems)) == 1 and "is not what was saved (tensor w)" in problems[0]


def train_across(layouts: list[dict[str, Any]]) -> tuple[list[float], int]:
    """Two steps under each layout, the state moving between the running models; all losses, and the bytes sent."""
    losses: list[float] = []
    before: Any = None
    sent = 0
    for tree in layouts:
        settings_ = build_recipe(tree)
        job, mesh = prepare(settings_), Mesh.create(settings_.layout, "cpu")
        model, state = build_for_training(job.shape, mesh, settings_)
        if before is not None:
            sent += redistribute(before.tensors().items(), state.tensors())
            state.updates = len(losses)
        before = state
        loader = job.loader(job.corpus.train, mesh)
        for _ in range(2):
            batches = loader.step(len(losses) * settings_.train.batch)
            assert batches is not None
            losses.append(
                train_step(model, state, batches, mesh, lr=1e-2, clip=1.0).loss
            )
    return losses, sent


@pytest.mark.slow
def test_training_goes_on_under_another_layout(pool: Any, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    layouts = [
        {"shard": 4},
        {"tp": 2, "dp": 2},
        {"pp": 2, "cp": 2},
        {"shard": 2, "tp": 2, "zero": 1},
        {"pp": 4},
    ]
    trees = [
        recipe(
            corpus,
            model__layers=4,
            **{f"layout__{axis}": n for axis, n in layout.items()},
        ).model_dump(mode="json")
        for layout in layouts
    ]
    alone = recipe(corpus, model__layers=4).model_dump(mode="json")
    (expected, _), *_ = pool.run(1, train_across, [alone] * len(trees))
    for losses, sent in pool.run(4, train_across, trees):
        assert losses == pytest.approx(expected, abs=1e-10) and sent > 0
