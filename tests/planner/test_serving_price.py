"""The price of an engine's step, against what can be said in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.planner.machine import load_cluster
from weft.planner.planned_model import load_model
from weft.planner.serving_price import FILLED, EnginePrice

SHAPE = load_model("llama3-8b").shape
MACHINE = load_cluster("h100", 8).machine()


def test_a_new_token_takes_the_reading_of_all_weights() -> None:
    """16 GB at 3.35 TB/s; keys of another thousand tokens add 0.13 GB."""
    price = EnginePrice(SHAPE, MACHINE)
    bare = price.step_seconds(1, 1, 1, 0, 0)
    assert bare == pytest.approx(2 * 8.03e9 / 3.35e12, rel=0.01)
    more = price.step_seconds(1, 1, 1, 1000, 1000)
    assert more - bare == pytest.approx(1000 * 131_072 / 3.35e12)


def test_a_long_prompt_takes_the_products() -> None:
    """Two operations per weight and token, at the share of the peak that large products reach, and attention."""
    price = EnginePrice(SHAPE, MACHINE)
    seconds = price.step_seconds(4096, 1, 1, 4096, 4096 * 2048)
    assert seconds == pytest.approx(2 * 7.5e9 * 4096 / (989e12 * 0.76), rel=0.1)


def test_more_devices_share_the_work_and_pay_for_sums() -> None:
    prices = [EnginePrice(SHAPE, MACHINE, ranks) for ranks in (1, 2, 4, 8)]
    tokens = [price.step_seconds(1, 1, 1, 500, 500) for price in prices]
    assert tokens == sorted(tokens, reverse=True)
    for price, ranks in zip(prices[1:], (2, 4, 8), strict=True):
        # not so many times as fast
        assert tokens[0] / ranks < price.step_seconds(1, 1, 1, 500, 500)
    assert prices[0].cache_tokens == int((FILLED * 80e9 - 2 * float(SHAPE.parameters)) / 131_072)  # fmt: skip
    assert prices[1].cache_tokens > 2 * prices[0].cache_tokens


def test_a_model_that_does_not_fit_has_no_cache() -> None:
    assert EnginePrice(load_model("llama3-70b").shape, MACHINE).cache_tokens == 0


def test_few_tokens_read_few_experts() -> None:
    """A token reads what it chooses; a batch reads all."""
    shape = load_model("mixtral-8x7b").shape
    machine = load_cluster("h100", 8).machine()
    price = EnginePrice(shape, replace(machine, link_latency=0.0), 8)
    one, many = (price.step_seconds(n, n, n, 0, 0) for n in (1, 64))
    assert one == pytest.approx(2 * float(shape.active_parameters) / 3.35e12 / 8, rel=0.02)  # fmt: skip
    assert many == pytest.approx(2 * float(shape.parameters) / 3.35e12 / 8, rel=0.05)
