"""Rows of the table of embeddings: the numbers of one device, bytes of unique rows, and what cannot be said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import Case, recipe, start, write_corpus
from tests.prove.test_equality import difference, name, tree
from weft.errors import UsageError
from weft.layout.dims import Logical
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.placement import Placement
from weft.memory.tier_file import PAGE
from weft.parallel.missed_updates import MissedUpdates
from weft.parallel.row_lookup import EmbeddingRows
from weft.parallel.state import Held
from weft.recipe import Optimizer
from weft.shapes.dim import Dim
from weft.train.build_step import build_step
from weft.train.rule_optimizer import RuleOptimizer
from weft.train.setup import prepare
from weft.train.step import StepContext

FILES = {"weights": "file"}
PLAIN = {"kind": "sgd", "weight_decay": 0.0}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


ADAM = {"kind": "adamw", "lr": 3e-3, "weight_decay": 0.1, "ema": 0.9}


@pytest.mark.parametrize("case", [
    {"layout": {"shard": 2}, "memory": FILES, "micro_batch": 2, "optimizer": ADAM},
    *(pytest.param(case, marks=pytest.mark.soak) for case in (
        {"layout": {"dp": 2}, "memory": {"weights": "host"}, "micro_batch": 1},
        {"layout": {"dp": 2, "tp": 2}, "memory": FILES, "micro_batch": 1},
        {"layout": {"cp": 2, "shard": 2}, "memory": FILES, "recompute": "full"},
        {"layout": {"pp": 2, "shard": 2}, "memory": FILES, "micro_batch": 1},
        {"layout": {"shard": 3}, "memory": FILES | {"tiles": 2}, "freeze": ["embed*"]},
        {"layout": {"shard": 2}, "memory": FILES, "micro_batch": 2},
        {"layout": {"dp": 2}, "memory": {"weights": "host"}, "micro_batch": 1, "optimizer": ADAM},
        {"layout": {"pp": 2, "tp": 2}, "memory": FILES, "micro_batch": 1, "optimizer": ADAM},
        {"layout": {"shard": 2}, "memory": {"weights": "host", "moments": "file"}, "optimizer": ADAM},
        {"layout": {"shard": 2}, "memory": FILES, "optimizer": ADAM | {"kind": "lion"}},
        {"layout": {"shard": 2}, "memory": FILES, "optimizer": {"weight_decay": 0.1}},
    )),
], ids=lambda case: name(case).replace("/", "_"))  # fmt: skip
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    values = tree(corpus, case)
    folder = str(Path(corpus).parent)
    values |= {"memory": {"folder": folder, "embedding": "rows", **case["memory"]}}
    values["optimizer"] |= PLAIN | {"lr": 0.1} | case.get("optimizer", {})
    values["train"]["batch"] = 5
    result = pool.run(Layout(**case["layout"]).world, difference, values)[0]
    assert result.ok, result


def test_missed_updates_are_made_up_one_by_one() -> None:
    """Rows of an AdamW that updates all rows in every step, with rates that change."""
    settings = Optimizer.model_validate({"betas": (0.9, 0.99)})
    rule = RuleOptimizer(settings, Mesh.single())
    draw = torch.Generator().manual_seed(0)
    dims = (Dim("vocab", 5), Dim("embed", 3))
    logical = Logical(dims, None, ((), ()), ((0, 5), (0, 3)))
    start = torch.randn(5, 3, dtype=torch.float64, generator=draw)

    def held(values: torch.Tensor) -> Held:
        box = ((0, len(values)), (0, 3))
        parameter = torch.nn.Parameter(values)
        made = Held("embedding.table", logical, Placement(box, 0, 1), values, parameter)
        made.slots |= rule.slots(made)
        return made

    dense, rows = held(start.clone()), held(start.clone())
    missed = MissedUpdates(5)
    for step, named in enumerate(([0, 1, 2], [0], [3, 0], [1])):
        grad = torch.zeros_like(start)
        grad[named] = torch.randn(len(named), 3, dtype=torch.float64, generator=draw)
        rate = 0.1 / (step + 1)
        at = torch.tensor(named)
        now = missed.make_up(rule, taken(rows, at), at)
        rule([now], [grad[at]], rate)
        rule([dense], [grad], rate)
        put(rows, now, at)
        missed.rates.append(rate)
        missed.had_all(at)
    late = missed.behind()
    assert late.tolist() == [0, 2, 3, 4]
    put(rows, missed.make_up(rule, taken(rows, late), late), late)
    assert (rows.local - dense.local).abs().max() < 1e-12
    for slot, part in dense.slots.items():
        assert (rows.slots[slot].values - part.values).abs().max() < 1e-12


def taken(held: Held, at: torch.Tensor) -> Held:
    slots = {n: replace(p, values=p.values[at]) for n, p in held.slots.items()}
    return replace(held, local=held.local[at], slots=slots)


def put(held: Held, now: Held, at: torch.Tensor) -> None:
    held.local[at] = now.local
    for slot, part in now.slots.items():
        held.slots[slot].values[at] = part.values


def counted(values: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a step that the table's rows take, and unique tokens of its passes and of the step."""
    settings, mesh, model, state, loader = start(values)
    stepper = build_step(StepContext(model, state, mesh), settings)
    (unit,) = (u for u in state.units if isinstance(u, EmbeddingRows))
    before = state.tiers.bytes
    batches = loader.step(0) or []
    results = stepper.take(batches, 0.1)
    whole = state.tiers.bytes["read"] - before.get("read", 0)
    written = state.tiers.bytes.get("written", 0)
    state.visit(unit)
    grown = {
        "read": state.tiers.bytes["read"] - before.get("read", 0) - whole,
        "written": state.tiers.bytes["written"] - written,
    }
    passes = [len(torch.unique(batch.tokens)) for batch in batches]
    every = len(torch.unique(torch.cat([b.tokens.flatten() for b in batches])))
    return {"update": grown, "passes": passes, "every": every, "steps": len(results)}


def test_bytes_are_unique_rows_times_width(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    """A row of 512 float64 is a page."""
    values = tree(corpus, {"layout": {"shard": 1}, "micro_batch": 2})
    values["model"] |= {"embed": 512, "layers": 1}
    values["memory"] = {"folder": str(tmp_path), "embedding": "rows", **FILES}
    values["optimizer"] |= PLAIN
    values["train"]["batch"] = 4
    result = pool.run(1, counted, values)[0]
    assert 0 < result["every"] < 257
    rows = result["every"] * PAGE
    assert result["update"] == {"read": rows, "written": rows}


@pytest.mark.parametrize(("change", "line"), [
    ({"memory__weights": "device"}, "rest"),
    ({"optimizer__kind": "adafactor"}, "needs the whole table"),
    ({"optimizer__kind": "adamw", "optimizer__state": "8bit"}, "needs the whole table"),
    ({"model__tied": True}, "has no whole table"),  # known with the vocabulary
    ({"adapter__kind": "lora"}, "for plain passes"),
    ({"layout__island": 2, "memory__weights": "host"}, "for plain passes"),  # which flatten gradients
], ids=str)  # fmt: skip
def test_what_needs_the_whole_table_is_refused(
    corpus: str, change: dict[str, Any], line: str
) -> None:
    given: dict[str, Any] = {"memory__weights": "file", "memory__embedding": "rows", "model__tied": False,
             "optimizer__kind": "sgd", "optimizer__weight_decay": 0.0} | change  # fmt: skip
    with pytest.raises(UsageError, match=line):
        prepare(recipe(corpus, **given))
