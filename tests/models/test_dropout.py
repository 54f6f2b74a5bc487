"""Dropout by counters: a share as asked, independent of how tokens and channels are cut, the same when drawn again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, write_corpus
from tests.prove.test_equality import difference, name, tree
from weft.layout.layout import Layout
from weft.models.drawing import current_draws, drawing
from weft.models.dropout import dropped, token_draws


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(0, 2**40),
    st.integers(1, 30),
    st.integers(0, 29),
    st.integers(0, 16),
)
def test_a_part_draws_what_the_whole_draws(
    seed: int, sample: int, tokens: int, cut: int, channel: int
) -> None:
    draws, x = (
        token_draws(seed, sample, tokens),
        torch.ones(1, tokens, 17, dtype=torch.float64),
    )
    whole = dropped(x, 0.3, draws[None], "blocks.0.ffn.down", 0)
    cut = min(cut, tokens)
    part = dropped(
        x[:, cut:, channel:], 0.3, draws[None, cut:], "blocks.0.ffn.down", channel
    )
    assert torch.equal(part, whole[:, cut:, channel:])
    assert set(whole.unique().tolist()) <= {0.0, 1 / 0.7}


def test_shares_and_independence() -> None:
    draws = torch.stack([token_draws(3, sample, 200) for sample in range(4)])
    assert draws.unique().numel() == draws.numel()
    x = torch.ones(4, 200, 64)
    kept = {
        name: dropped(x, 0.25, draws, name, 0) > 0
        for name in ("blocks.0.attention.wq", "blocks.1.attention.wq")
    }
    kept["other seed"] = (
        dropped(
            x, 0.25, token_draws(4, 0, 200).expand(4, 200), "blocks.0.attention.wq", 0
        )
        > 0
    )
    for mask in kept.values():
        assert abs(mask.float().mean() - 0.75) < 0.01
        for dims in ((0, 1), (0, 2), (1, 2)):  # no channel, token or sample is special
            assert (mask.float().mean(dims) - 0.75).abs().max() < 0.2
    first, second, third = kept.values()
    for a, b in ((first, second), (first, third), (first[:, 1:], first[:, :-1]), (first[..., 1:], first[..., :-1]),
                 (first[1:], first[:-1])):  # fmt: skip
        assert abs((a & b).float().mean() - 0.75**2) < 0.02


def test_nothing_is_drawn_without_a_gradient() -> None:
    draws = token_draws(0, 0, 3)
    with drawing((draws,)):
        assert current_draws() is draws
        with torch.no_grad():
            assert current_draws() is None
        with drawing(()):
            assert current_draws() is None
    assert current_draws() is None


CASES: list[Case] = [
    {"layout": {"tp": 2}, "recompute": "full"},
    {"layout": {"dp": 2, "pp": 2, "schedule": "zb-h1"}, "micro_batch": 1},
]
MORE: list[Case] = [
    {"layout": {"shard": 2, "tp": 2}, "recompute": "selective"},
    {"layout": {"cp": 2, "tp": 2}},
    {"layout": {"cp": 3}, "recompute": "full"},
    {"layout": {"tp": 3, "tp_shares": [3, 1, 2]}, "heads": 6, "kv_heads": 3},
    {"layout": {"ep": 2, "shard": 2}, "model": {"experts": 4}},
    {"layout": {"pp": 2, "ep": 2, "dp": 2, "overlap": "passes"}, "micro_batch": 1, "model": {"experts": 4}},
    {"layout": {"pp": 2, "vocab_barriers": 1}, "micro_batch": 1},
    {"layout": {"pp": 4, "skip": 0.25}, "micro_batch": 1, "model": {"layers": 4}},
    {"layout": {"pp": 2, "virtual": 2, "schedule": "zb-v"}, "model": {"layers": 4}, "micro_batch": 1},
    {"layout": {"tp": 2, "overlap": "tokens"}},
    {"layout": {"tp": 2}, "model": {"residual": "ladder"}, "recompute": "full"},
    {"layout": {"tp": 2}, "model": {"norm_after": True}},
    {"layout": {"dp": 2, "cp": 2, "balance": "flexsp"}, "zero": 1},
]  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.soak) for case in MORE)],
    ids=name,
)
def test_every_layout_drops_what_one_device_drops(
    pool: Any, corpus: str, case: Case
) -> None:
    case = case | {"model": {"dropout": 0.3} | case.get("model", {})}
    world = Layout(**case["layout"]).world
    result = pool.run(world, difference, tree(corpus, case))[0]
    assert result.ok, result
