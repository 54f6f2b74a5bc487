"""``layout.order``: whichever axis varies fastest over the ranks, a layout computes and saves the same."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import recipe, write_corpus
from tests.prove.test_equality import difference
from weft.checkpoint.store import open_checkpoint
from weft.layout.axes import LIVE_AXES
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.parts import Part
from weft.net.groups import fake_rank
from weft.recipe import build_recipe
from weft.train.setup import prepare
from weft.train.training import train_job

MAX_WORLD = 8


def ordered_layouts() -> list[dict[str, Any]]:
    """Every number of ranks per axis with at most eight in all, in every order of the axes that are larger than one."""
    found = []
    for sizes in itertools.product(range(1, MAX_WORLD + 1), repeat=len(LIVE_AXES)):
        if math.prod(sizes) > MAX_WORLD:
            continue
        axes = {
            axis: size for axis, size in zip(LIVE_AXES, sizes, strict=True) if size > 1
        }
        if len(axes) > 1:
            found += [
                {**axes, "order": " ".join(order)}
                for order in itertools.permutations(axes)
            ]
    return found


ORDERED = ordered_layouts()


@pytest.mark.slow
def test_rank_numbers_are_those_of_the_groups() -> None:
    """Making a mesh checks its groups; here that the places along each axis are all taken, each once."""
    assert len(ORDERED) == 160
    for layout in (Layout(**values) for values in ORDERED):
        places = set()
        for rank in range(layout.world):
            with fake_rank(rank, layout.world):
                mesh = Mesh.create(layout, "cpu")
                assert mesh.data_ranks.index(rank) == mesh.batch_rank * mesh.size(
                    "cp"
                ) + mesh.rank("cp")
                places.add(
                    (
                        *(mesh.rank(a) for a in LIVE_AXES),
                        mesh.rank("state"),
                        mesh.rank("pp"),
                        mesh.rank("dp"),
                    )
                )
        assert len(places) == layout.world


def tree(corpus: str, layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    deep = {"model__layers": 4} if layout.get("pp", 1) > 2 else {}
    if layout.get("pp", 1) > 4:
        deep = {"model__layers": layout["pp"]}
    if layout.get("tp", 1) > 4:
        deep["model__heads"], deep["model__kv_heads"] = 8, 2
    settings = recipe(
        corpus, **{f"layout__{k}": v for k, v in layout.items()}, **deep, **more
    )
    return settings.model_dump(mode="json")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


# both hold the state: the pair that PyTorch's sorting mixed up
SHARED = {"shard": 2, "cp": 2, "order": "cp shard"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "layout",
    [
        SHARED,
        SHARED | {"zero": 1},
        # uneven rows
        pytest.param(
            {"shard": 2, "cp": 3, "order": "cp shard"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"dp": 2, "shard": 2, "cp": 2, "order": "cp dp shard"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pp": 2, "shard": 2, "cp": 2, "order": "cp pp shard"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"shard": 2, "cp": 2, "tp": 2, "order": "tp cp shard"},
            marks=pytest.mark.slow,
        ),
        pytest.param(SHARED | {"zero": 1, "balance": "greedy"}, marks=pytest.mark.slow),
        pytest.param(SHARED | {"secondary": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"shard": 2, "cp": 4, "ulysses": 2, "order": "cp shard"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_orders_equal_one_device(
    pool: Any, corpus: str, layout: dict[str, Any]
) -> None:
    found = pool.run(Layout(**layout).world, difference, tree(corpus, layout))[0]
    assert found.ok, found


@pytest.mark.soak
@pytest.mark.parametrize("layout", ORDERED, ids=lambda v: str(v).replace(" ", ""))
def test_every_order_equals_one_device(
    pool: Any, corpus: str, layout: dict[str, Any]
) -> None:
    found = pool.run(
        Layout(**layout).world, difference, tree(corpus, layout), timeout=240
    )[0]
    assert found.ok, found


def trained(values: dict[str, Any], out: str) -> None:
    """Train under this layout to the end of the recipe, which saves a checkpoint."""
    settings = build_recipe(values)
    train_job(prepare(settings), Mesh.create(settings.layout, "cpu"), Path(out))


def state_of(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint that a run of two steps leaves, whole."""
    checkpoint = open_checkpoint(run / "checkpoints" / "step-000002")
    found = {
        name: Part(
            torch.empty(tensor.shape, dtype=torch.float64),
            tuple((0, n) for n in tensor.shape),
            tensor,
            0,
            1,
        )
        for name, tensor in checkpoint.tensors.items()
    }
    checkpoint.load(found)
    return {name: local.values for name, local in found.items()}


def saved_alike(pool: Any, corpus: str, layout: dict[str, Any], folder: Path) -> None:
    for name, values in (("one", {}), ("many", layout)):
        settings = tree(corpus, values, train__steps=2, optimizer__warmup=0)
        if name == "one":  # the same model, deep enough for the pipelines of the other
            settings["model"] = tree(corpus, layout)["model"]
        pool.run(
            Layout(**values).world, trained, settings, str(folder / name), timeout=240
        )
    one, many = state_of(folder / "one"), state_of(folder / "many")
    assert one.keys() == many.keys()
    for key, value in one.items():
        assert (value - many[key]).norm() <= 1e-8 * value.norm().clamp(min=1e-12), key


@pytest.mark.slow
@pytest.mark.parametrize("layout", [SHARED], ids=str)
def test_checkpoints_of_any_order_hold_the_same(
    pool: Any, corpus: str, tmp_path: Path, layout: dict[str, Any]
) -> None:
    saved_alike(pool, corpus, layout, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("layout", ORDERED, ids=lambda v: str(v).replace(" ", ""))
def test_checkpoints_of_every_order_hold_the_same(
    pool: Any, corpus: str, tmp_path: Path, layout: dict[str, Any]
) -> None:
    saved_alike(pool, corpus, layout, tmp_path)
