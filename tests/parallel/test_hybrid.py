"""Balanced steps equal one device, whatever the documents; what they cannot do is refused; nothing ever hangs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.cases import Case, recipe
from tests.prove.test_equality import difference, name
from weft.data.batch import Batch
from weft.errors import UsageError, WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.placement import Place
from weft.parallel import document_balance
from weft.parallel.document_balance import DocumentTimes, Pass, Plan, make_plan
from weft.prove.equality import run_layout
from weft.recipe import build_recipe
from weft.train.setup import prepare
from weft.train.step import evaluate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


def corpus(folder: Path, kind: str) -> str:
    """``mixed``: lengths from 1 to most of a row; ``tiny``: one or two tokens; ``long``: rows of one document."""
    path, rng = folder / f"{kind}.jsonl", random.Random(0)
    sizes = {"mixed": [1, 1, 2, 3, 5, 8, 20, 60, 130], "tiny": [1, 2], "long": [5000]}[
        kind
    ]
    with path.open("w") as file:
        for _ in range(3 if kind == "long" else 90):
            text = "".join(rng.choice("abcdefgh \n") for _ in range(rng.choice(sizes)))
            file.write(json.dumps({"text": text}) + "\n")
    return str(path)


def tree(folder: Path, case: Case) -> dict[str, Any]:
    return recipe(
        corpus(folder, case.get("corpus", "mixed")),
        data__seq_len=case.get("seq_len", 150),
        data__epochs=case.get("epochs", 0),
        layout__zero=1,
        layout__balance=case.get("balance", "greedy"),
        layout__context=case.get("context", "zigzag"),
        train__batch=case.get("batch", 5),
        train__micro_batch=case.get("micro_batch", 1),
        train__recompute=case.get("recompute", "none"),
        model__kv_heads=case.get("kv_heads", 2),
        model__experts=case.get("experts", 0),
        model__expert_ffn=9,
        model__balance="step",
        model__balance_loss=0.3,
        layout__dispatch=case.get("dispatch", "all-to-all"),
        **{f"layout__{axis}": size for axis, size in case["layout"].items()},
    ).model_dump(mode="json")


QUICK: list[Case] = [
    {"layout": {"cp": 2}},
    {"layout": {"dp": 2}, "recompute": "full"},
    # nothing but one document on all ranks
    {"layout": {"cp": 3}, "corpus": "long", "batch": 1},
    {"layout": {"cp": 4}, "recompute": "selective", "kv_heads": 1},
    # ranks that own nothing
    {"layout": {"cp": 4}, "corpus": "tiny", "batch": 1, "seq_len": 5},
    {"layout": {"dp": 2, "cp": 2}, "context": "lightseq"},
    {"layout": {"cp": 3}, "context": "ring", "balance": "flexsp"},
    {"layout": {"cp": 2}, "context": "rsa"},
    {"layout": {"cp": 2, "tp": 2}},
    {"layout": {"cp": 4, "ep": 4}, "experts": 6, "dispatch": "all-gather"},
    {
        "layout": {"cp": 2, "dp": 2, "ep": 2},
        "experts": 3,
        "recompute": "full",
        "dispatch": "adaptive",
    },
]
SLOW: list[Case] = [
    {"layout": {"shard": 2}, "context": "tokenring"},
    {"layout": {"shard": 2, "cp": 2}, "context": "gather", "recompute": "full"},
    {"layout": {"dp": 2, "shard": 2, "cp": 2}, "balance": "flexsp"},
    {"layout": {"dp": 3}, "corpus": "tiny", "batch": 2, "seq_len": 3},
    {"layout": {"cp": 4}, "corpus": "long", "batch": 2, "context": "lightseq"},
    {"layout": {"cp": 3, "tp": 2}, "micro_batch": None, "kv_heads": 1},
    {"layout": {"dp": 2, "cp": 2, "tp": 2, "order": "tp cp dp"}},
    {"layout": {"dp": 2, "tp": 2, "ep": 4}, "experts": 6},
    {
        "layout": {"cp": 3, "ep": 3},
        "corpus": "long",
        "experts": 6,
        "batch": 1,
        "dispatch": "per-rank",
    },
    {
        "layout": {"cp": 4, "ep": 4},
        "corpus": "tiny",
        "experts": 2,
        "batch": 1,
        "seq_len": 5,
        "balance": "flexsp",
    },
]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=name(c)) for c in QUICK]
    + [pytest.param(c, id=name(c), marks=pytest.mark.slow) for c in SLOW],
)
def test_equal_to_one_device(pool: Any, folder: Path, case: Case) -> None:
    found = pool.run(Layout(**case["layout"]).world, difference, tree(folder, case))[0]
    assert found.ok, found


def steps_of(settings: dict[str, Any], count: int = 3) -> list[list[list[Batch]]]:
    """The batches of some steps on every rank, made in this process. Same as the ranks make them."""
    job = prepare(build_recipe(settings))
    layout = job.recipe.layout
    made = []
    for step in range(count):
        ranks = []
        for rank in range(layout.size("dp", "shard", "cp")):
            mesh = Mesh(
                layout, Mesh.single().device, Place.of(layout, rank * layout.tp)
            )
            ranks.append(
                job.loader(job.corpus.train, mesh).step(step * job.recipe.train.batch)
                or []
            )
        made.append(ranks)
    return made


@pytest.mark.slow
def test_the_cases_are_what_they_are_there_for(folder: Path) -> None:
    def seen(case: Case) -> tuple[set[int], set[int], bool, int]:
        steps = steps_of(tree(folder, case))
        groups = {
            len(b.group.peers)
            for ranks in steps
            for mine in ranks
            for b in mine
            if b.group
        }
        counts = {len({len(mine) for mine in ranks}) for ranks in steps}
        idle = any(
            not sum(b.real_tokens for b in mine) for ranks in steps for mine in ranks
        )
        shortest = min(
            int(np.diff(b.cu_seqlens).min())
            for ranks in steps
            for mine in ranks
            for b in mine
        )
        return groups, counts, idle, shortest

    groups, _, _, shortest = seen(QUICK[3])
    assert groups >= {1, 2, 4} and shortest == 1
    assert seen(QUICK[2])[0] >= {1, 3}
    assert seen(QUICK[4])[2]
    assert all(max(seen(QUICK[i])[1]) > 1 for i in (2, 4, 5, 6))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [QUICK[3], QUICK[4], QUICK[6]], ids=name)
def test_the_same_tokens_labels_and_positions(folder: Path, case: Case) -> None:
    balanced_tree, plain = tree(folder, case), tree(folder, case | {"layout": {}})
    for ranks, ((one, *_),) in zip(steps_of(balanced_tree), steps_of(plain | {"train": plain["train"] | {
        "micro_batch": None}}), strict=True):  # fmt: skip

        def triples(batch: Batch) -> list[tuple[int, ...]]:
            columns = (batch.tokens, batch.labels, batch.positions)
            rows = np.stack([x.flatten().numpy() for x in columns], 1).tolist()
            return [tuple(row) for row in rows if row[1] >= 0]

        assert sorted(t for mine in ranks for b in mine for t in triples(b)) == sorted(
            triples(one)
        )


@pytest.mark.parametrize(("change", "message"), [
    ({"layout": {"zero": 3}}, "needs layout.zero = 1"),
    ({"layout": {"pp": 2}}, "pp = 1"),
    ({"layout": {"context": "ulysses"}}, "Ulysses"),
    ({"layout": {"ulysses": 2}}, "Ulysses"),
    ({"model": {"mixer": "retention"}}, "linear attention"),
    ({"train": {"compile": True}}, "train.compile"),
], ids=str)  # fmt: skip
def test_what_does_not_go_together(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    settings = tree(folder, {"layout": {"cp": 2}})
    for section, values in change.items():
        settings[section] = settings[section] | values
    with pytest.raises(UsageError, match=message):
        prepare(build_recipe(settings))


def other_plan(values: dict[str, Any]) -> str:
    """Rank 1 plans with other costs than rank 0: what it says instead of waiting for ever."""
    settings = build_recipe(values)
    mesh = Mesh.create(settings.layout, "cpu")

    def odd(
        name: str, lengths: np.ndarray, capacity: int, ranks: int, costs: DocumentTimes
    ) -> Plan:
        plan = make_plan(name, lengths, capacity, ranks, costs)
        return (
            (*plan[:-1], (*plan[-1], Pass((ranks - 1,), ())))
            if mesh.rank("cp")
            else plan
        )

    try:
        with mock.patch.object(document_balance, "make_plan", odd):
            run_layout(prepare(settings), mesh, steps=1)
    except WeftError as error:
        return str(error)
    return "nothing"


def test_ranks_that_plan_differently_are_told(pool: Any, folder: Path) -> None:
    said = pool.run(2, other_plan, tree(folder, {"layout": {"cp": 2}}))
    assert all("planned the step differently" in text for text in said)


def validated(values: dict[str, Any]) -> list[float]:
    settings = build_recipe(values)
    job = prepare(settings)
    losses = []

    for mesh in (Mesh.create(settings.layout, "cpu"), Mesh.single()):
        watched: list[Any] = []
        run_layout(job, mesh, 2, lambda *seen, into=watched: into.extend(seen))
        held_out = job.loader(job.corpus.validation, mesh)  # type: ignore[arg-type]
        steps = [s for i in range(2) if (s := held_out.step(i * settings.train.batch))]
        losses.append(evaluate(*watched, steps, mesh))
    return losses


@pytest.mark.slow
def test_validation_between_balanced_steps(pool: Any, folder: Path) -> None:
    for laid, single in pool.run(3, validated, tree(folder, {"layout": {"cp": 3}})):
        assert laid == pytest.approx(single, rel=1e-12)
