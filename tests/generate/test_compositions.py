"""Texts under everything at once, against each of them alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llguidance")
from tests.generate.compositions import LAYOUTS, OF_EXPERTS, run_world
from weft.layout.layout import Layout

ALL = (*LAYOUTS, *OF_EXPERTS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 4, 5])
def test_tokens_are_those_of_each_request_alone(seed: int) -> None:
    counts = run_world(seed)
    assert counts["texts"] and counts["tokens"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 410))
def test_400_worlds_in_one_process(seed: int) -> None:
    run_world(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_100_worlds_over_ranks(pool: Any, seed: int) -> None:
    layout = ALL[seed % len(ALL)]
    pool.run(Layout.parse(layout).world, run_world, seed, layout, timeout=200)
