"""The step is well typed under every layout and world size, and each planted fault is a type error with its line."""

from __future__ import annotations

import itertools
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.faults import FAULTS
from tests.prove.test_equality import CASES, LAYOUTS, name
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.prove.types import check_types
from weft.recipe import ModelShape, Train

SHAPE = ModelShape(
    vocab=257,
    layers=2,
    embed=32,
    heads=8,
    kv_heads=2,
    qk_norm=True,
    qkv_bias=True,
    dropout=0.1,
)
LARGE = [
    {"dp": 8, "shard": 16, "cp": 2, "tp": 4},
    {"shard": 1024},
    {"dp": 1024},
    {"dp": 2, "shard": 64, "tp": 8},
    {"cp": 128, "tp": 8},
    {"dp": 4, "shard": 4, "cp": 16, "tp": 4, "context": "ring"},
    {"shard": 500, "tp": 2},
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_accepts_every_case_of_the_matrix(case: dict[str, Any]) -> None:
    shape = SHAPE.model_copy(
        update={"heads": 4, "kv_heads": case["kv_heads"], "tied": case["tied"]}
    )
    layout = Layout(**case["layout"], zero=case["zero"], context=case["context"])
    assert check_types(shape, layout, Train(recompute=case["recompute"])) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LARGE, ids=str)
def test_accepts_large_worlds_quickly(layout: dict[str, Any]) -> None:
    start = time.process_time()
    assert check_types(SHAPE, Layout(**layout), Train()) is None
    assert time.process_time() - start < 10
    assert not dist.is_initialized()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "layout",
    [v for v in [*LAYOUTS, LARGE[0]] if v.get("tp", 1) > 1 and v.get("shard", 1) > 1],
    ids=str,
)
def test_rejects_planted_faults_with_the_line(
    fault: str, layout: dict[str, int]
) -> None:
    planted, target, line = FAULTS[fault]
    with mock.patch(f"weft.train.step.{target}", planted):
        found = check_types(SHAPE, Layout(**layout), Train())
    assert found is not None
    assert line in found.code, str(found)
    assert "axis" in found.message


def test_model_that_tp_cannot_cut_is_refused_first() -> None:
    with pytest.raises(UsageError, match="heads"):
        check_types(SHAPE, Layout(tp=16), Train())


def test_all_pairs_of_axes_at_four() -> None:
    for a, b in itertools.combinations(("dp", "shard", "cp", "tp"), 2):
        assert check_types(SHAPE, Layout(**{a: 4, b: 4}), Train()) is None
