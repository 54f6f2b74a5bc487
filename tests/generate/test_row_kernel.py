"""The kernel in C that samples from rows of logits, against sorting all of a row in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.generate import row_sampling
from weft.generate.row_kernel import draw_row_tokens, kernel_serves, row_weights
from weft.generate.row_sampling import TextState, choose_tokens, shaped_logits
from weft.generate.sampling import Sampling
from weft.generate.token_counts import TokenCounts

T = torch.Tensor

needs_compiler = pytest.mark.skipif(
    not kernel_serves(torch.zeros(1, 1)), reason="no C compiler"
)


def cut_weights(weights: T, how: Sampling) -> tuple[T, float]:
    """Return the ``weights`` of a row that the settings leave, and how far any sum is from the nucleus's, in shares."""
    exact = weights.double()
    best, order = exact.sort(descending=True, stable=True)
    ends = best.cumsum(0)
    kept = torch.zeros_like(weights)
    share = how.top_p if how.top_p < 1 else 2.0
    inside = order[ends - best < share * ends[-1]]
    kept[inside] = weights[inside]
    margin = float((ends / ends[-1] - how.top_p).abs().min())
    return kept * (weights >= how.min_p), margin if share < 1 else 1.0


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 63, 64, 65, 1000, 3001]),
    spread=st.sampled_from([0.0, 1e-3, 0.3, 3.0, 30.0]),
    equal=st.sampled_from([0, 2, 9]), threads=st.sampled_from([1, 3]),
    temperature=st.sampled_from([1e-9, 0.7, 20.0]), seed=st.integers(0, 2**16),
    top_p=st.sampled_from([1e-9, 0.01, 0.5, 0.9, 0.999, 1.0]), min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
)  # fmt: skip
def test_nuclei_and_draws_are_those_of_sorting_everything(
    vocab: int, spread: float, equal: int, threads: int, temperature: float, seed: int, top_p: float, min_p: float
) -> None:  # fmt: skip
    """Also where all tokens or many are exactly as likely, of which the first are kept, and in several threads."""
    drawn = torch.Generator().manual_seed(seed)
    values = spread * torch.randn(4, vocab, generator=drawn)
    if equal:
        values[:, ::equal] = values[:, :1].clone()
    values[1, 1::2] = -torch.inf
    how = Sampling(temperature, top_p=top_p, min_p=min_p)
    numbers = torch.rand(4, dtype=torch.float64, generator=drawn)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole = row_weights(values, [Sampling(temperature)] * 4)
        weights = row_weights(values, [how] * 4)
        tokens = draw_row_tokens(values, [how] * 4, numbers)
    finally:
        torch.set_num_threads(before)
    exact = ((values - values.amax(-1, True)).double() / temperature).exp()
    torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-37)
    for row, token in enumerate(tokens.tolist()):
        expected, margin = cut_weights(whole[row], how)
        # a sum that is met but for rounding takes one token in or not
        wrong = int((weights[row] != expected).sum())
        assert wrong <= (margin < 1e-6)
        ends = weights[row].double().cumsum(0)
        end, own = float(ends[token]), float(weights[row, token])
        wanted, near = float(numbers[row] * ends[-1]), 1e-6 * float(ends[-1])
        assert own > 0
        assert end - own - near <= wanted <= end + near


@needs_compiler
def test_penalties_in_the_kernel_are_those_of_the_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows with and without penalties, and a row whose bias keeps it from the kernel's own penalties."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(21, 501)
    hows = [
        Sampling(0.9, top_p=0.8, repetition=1.3, presence=0.4, frequency=0.2),
        Sampling(0.9, top_p=0.8, repetition=0.5, presence=-1.0),
        Sampling(1.1, min_p=0.01),
    ]
    texts = [
        TextState(how, row / 21, TokenCounts(range(row), [row, row, 400]) if how.penalises else None)
        for row, how in enumerate(hows * 7)
    ]  # fmt: skip
    tokens = choose_tokens(logits, texts)
    bare = [text._replace(counts=None) for text in texts]
    assert choose_tokens(shaped_logits(logits, texts), bare) == tokens
    monkeypatch.setattr(row_sampling, "kernel_serves", lambda values: False)
    assert choose_tokens(logits, texts) == tokens
    assert len(set(tokens)) > 10


@needs_compiler
def test_a_row_without_a_distribution_has_no_token() -> None:
    values = torch.zeros(5, 130)
    values[0, 77], values[1, 129], values[2], values[3, 0] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        torch.nan,
    )
    numbers = torch.full((5,), 0.5, dtype=torch.float64)
    for how in (Sampling(), Sampling(top_p=0.5), Sampling(min_p=0.5)):
        tokens = draw_row_tokens(values, [how] * 5, numbers).tolist()
        assert tokens[:4] == [-1] * 4 and tokens[4] > 0
