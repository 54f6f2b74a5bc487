"""Training with the sequence cut in every way equals one device, and attention is never run twice under recompute."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases import Case, write_corpus
from tests.prove.test_equality import difference, name, tree
from tests.train.test_step import steps
from tests.train.test_step import tree as job
from weft.layout.layout import Layout
from weft.prove.types import check_types
from weft.recipe import ModelShape, Train
from weft.registry import names

USP: list[Case] = [
    {"layout": {"cp": 4, "ulysses": 2}, "context": "zigzag", "recompute": "selective"},
    {"layout": {"cp": 4, "ulysses": 2}, "context": "lightseq", "kv_heads": 1},
    {
        "layout": {"cp": 4, "tp": 2, "ulysses": 2},
        "context": "tokenring",
        "kv_heads": 1,
        "recompute": "full",
    },
    {"layout": {"cp": 6, "ulysses": 3}, "context": "gather", "heads": 5, "kv_heads": 1},
]
ULYSSES: list[Case] = [
    {
        "layout": {"cp": 4},
        "context": "ulysses",
        "heads": 6,
        "kv_heads": 3,
        "recompute": "selective",
    },
    {"layout": {"cp": 3, "tp": 2}, "context": "ulysses", "heads": 7, "kv_heads": 1},
]
QUICK: list[Case] = [
    {"layout": {"cp": 3}, "context": scheme, "recompute": "selective"}
    for scheme in names("context")
]
#: Every scheme under every layout.
CUTS: list[Case] = [
    {"layout": layout, "context": scheme, "recompute": recompute, "kv_heads": kv_heads, "extras": True}
    for scheme in names("context")
    for layout, recompute, kv_heads in [
        ({"cp": 8}, "none", 2), ({"cp": 4}, "full", 1), ({"cp": 2, "tp": 2, "shard": 2}, "selective", 1),
        ({"cp": 2, "pp": 2}, "selective", 4),
    ]
]  # fmt: skip
#: Two layouts of each scheme, and each layout with three schemes; the others are for soak.
SLOW = [case for i, case in enumerate(CUTS) if i % 4 in (i // 4 % 4, (i // 4 + 1) % 4)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=name(c)) for c in QUICK + USP[:2] + ULYSSES[:1]]
    + [
        pytest.param(c, id=name(c), marks=pytest.mark.slow)
        for c in SLOW + USP[2:] + ULYSSES[1:]
    ]
    + [
        pytest.param(c, id=name(c), marks=pytest.mark.soak)
        for c in CUTS
        if c not in SLOW
    ],
)
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    found = pool.run(Layout(**case["layout"]).world, difference, tree(corpus, case))[0]
    assert found.ok, found


@pytest.mark.parametrize("case", QUICK + USP + ULYSSES, ids=name)
def test_every_scheme_is_well_typed(case: Case) -> None:
    heads = {
        "heads": case.get("heads", 4),
        "kv_heads": case.get("kv_heads", 2),
        "head_dim": 8,
    }
    shape = ModelShape(vocab=257, layers=2, embed=32, **heads)
    layout = Layout(**case["layout"], context=case["context"])
    assert (
        check_types(shape, layout, Train(recompute=case.get("recompute", "none")))
        is None
    )


@pytest.mark.soak  # every day on one device: tests/train/test_step.py
@pytest.mark.parametrize(
    "layout", [{"cp": 2, "context": "tokenring"}, {"cp": 4, "ulysses": 2}], ids=str
)
def test_compiled_equals_eager(pool: Any, corpus: str, layout: dict[str, Any]) -> None:
    runs = []
    for compiled in (False, True):
        values = job(
            corpus,
            layout,
            train__dtype="float32",
            train__compile=compiled,
            train__recompute="selective",
        )
        runs.append(pool.run(Layout(**layout).world, steps, values, 2, timeout=400)[0])
    assert [r.loss for r in runs[1]] == pytest.approx(
        [r.loss for r in runs[0]], rel=1e-5
    )
    assert [r.grad_norm for r in runs[1]] == pytest.approx(
        [r.grad_norm for r in runs[0]], rel=1e-4
    )


@pytest.mark.soak
def test_benchmark(tmp_path: Path) -> None:
    """It runs, every side computes the same, and PyTorch's ring sends what ours does not need to."""
    script, path = (
        Path(__file__).parents[2] / "bench" / "sequence.py",
        tmp_path / "sequence.json",
    )
    command = [sys.executable, str(script), "--quick", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    for rows in found["steps"].values():
        assert all(row["error"] < 1e-5 and row["ratio"] > 0 for row in rows.values())
        assert (
            rows["PyTorch, alltoall"]["bytes_mean"] > 1.4 * rows["zigzag"]["bytes_mean"]
        )
    assert found["context_parallel"] == "runs" or "Error" in found["context_parallel"]
    assert set(found["prompts"]["ways"]) == {"one rank, all logits", "one rank", "cp=4"}
