"""The layout for fewer ranks, and for more: which one, and that it runs."""

from __future__ import annotations

from typing import Any

import pytest

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.net.groups import fake_rank
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Optimizer, Recipe, Train
from weft.resilience.layouts import recipe_for

DENSE = {"layers": 8, "embed": 64, "heads": 8, "kv_heads": 4}
EXPERTS: dict[str, Any] = DENSE | {"layers": 4, "experts": 8, "expert_ffn": 16}

#: The wish, the model, and what it becomes on 9, 7, 6, 5, 4, 3, 2 ranks; on 8 it is what it is.
TABLE = [
    ("dp=8", DENSE, "dp=9 dp=7 dp=6 dp=5 dp=4 dp=3 dp=2"),
    ("shard=8", DENSE, "shard=9 shard=7 shard=6 shard=5 shard=4 shard=3 shard=2"),
    ("tp=8", DENSE, "shard=9 shard=7 shard=3,tp=2 shard=5 tp=4 shard=3 tp=2"),
    ("pp=8", DENSE, "shard=9 shard=7 pp=6 pp=5 pp=4 pp=3 pp=2"),
    ("dp=4,tp=2", DENSE, "dp=3,shard=3 shard=7 dp=3,tp=2 shard=5 dp=2,tp=2 dp=3 tp=2"),
    (
        "shard=4,tp=2",
        DENSE,
        "shard=9 shard=7 shard=3,tp=2 shard=5 shard=2,tp=2 shard=3 tp=2",
    ),
    (
        "pp=2,dp=2,tp=2",
        DENSE,
        "shard=9 shard=7 shard=3,tp=2 shard=5 pp=2,tp=2 shard=3 tp=2",
    ),
    ("pp=4,shard=2", DENSE, "shard=9 shard=7 pp=3,shard=2 shard=5 pp=4 pp=3 pp=2"),
    (
        "pp=2,cp=2,tp=2",
        DENSE,
        "shard=9 shard=7 shard=3,tp=2 shard=5 cp=2,tp=2 shard=3 tp=2",
    ),
    (
        "shard=8,ep=8",
        EXPERTS,
        "shard=9 shard=7 shard=6,ep=2 shard=5 shard=4,ep=4 shard=3 shard=2,ep=2",
    ),
    (
        "pp=2,dp=4,ep=4",
        EXPERTS,
        "shard=9 shard=7 pp=2,shard=3 shard=5 dp=4,ep=4 shard=3 dp=2,ep=2",
    ),
]
#: Wishes with settings that do not go with all axes.
SETTINGS = [
    "shard=8,secondary=4", "cp=2,tp=4,context=ulysses", "cp=8,ulysses=4", "pp=4,dp=2,schedule=dualpipe",
    "pp=4,dp=2,schedule=interleaved-1f1b,virtual=2", "pp=8,skip=0.25", "pp=4,tp=2,vocab_barriers=1",
    "dp=2,tp=2,pp=2,order=tp pp dp", "shard=8,zero=1,balance=greedy",
]  # fmt: skip


def recipe(layout: str, model: dict[str, Any], **change: Any) -> Recipe:
    shape = ModelShape(vocab=300, **model)
    return Recipe(
        model=shape,
        layout=Layout.parse(layout),
        train=Train(batch=8, dtype="float64"),
        **change,
    )


def runs(given: Recipe) -> None:
    """Mesh and model take it, on the first and the last of its ranks."""
    world = given.layout.world
    for rank in {0, world - 1} if given.layout.pp > 1 else {world - 1}:
        with fake_rank(rank, world):
            mesh = Mesh.create(given.layout, "cpu")
            parallelize(
                given.model,
                mesh,
                given.train,
                values=lambda name, logical, box: 0.0,
                seq_len=64,
            )  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("wish", "model", "expected"),
    TABLE,
    ids=lambda value: value if "=" in str(value) else "",
)
def test_what_becomes_of_a_layout(
    wish: str, model: dict[str, Any], expected: str
) -> None:
    wished = recipe(wish, model)
    assert recipe_for(wished, wished.model, 8) is wished
    found = {n: recipe_for(wished, wished.model, n) for n in (9, 7, 6, 5, 4, 3, 2, 1)}
    assert " ".join(str(found[n].layout) for n in (9, 7, 6, 5, 4, 3, 2)) == expected
    assert str(found[1].layout) == "one device"


@pytest.mark.slow
def test_every_layout_runs() -> None:
    seen = set()
    for wish, model in [
        *((wish, model) for wish, model, _ in TABLE),
        *((wish, DENSE) for wish in SETTINGS),
    ]:
        wished = recipe(wish, model)
        for n in (7, 6, 3):
            found = recipe_for(wished, wished.model, n)
            assert found.layout.world == n, (wish, n)
            if (kind := (found.layout, model["layers"])) not in seen:
                seen.add(kind)
                runs(found)


def test_settings_stay_where_they_go() -> None:
    # so many layers that three stages have as many each, and a pipeline of three pays
    wished = recipe("pp=4,dp=2,schedule=dualpipe", DENSE | {"layers": 12})
    assert [recipe_for(wished, wished.model, n).layout.schedule for n in (4, 3)] == [
        "dualpipe",
        "1f1b",
    ]
    late = recipe("pp=4,dp=2", DENSE, optimizer=Optimizer(post_validation=True))
    assert [
        recipe_for(late, late.model, n).optimizer.post_validation for n in (8, 6, 4, 1)
    ] == [True, True, True, False]
    near = recipe("shard=8,secondary=4", DENSE)
    assert [recipe_for(near, near.model, n).layout.secondary for n in (8, 7)] == [4, 0]
