"""Dropout by counters: a share as asked, independent of how tokens and channels are cut, the same when drawn again."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.models.dropout import current_draws, drawing, dropped, token_draws


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
