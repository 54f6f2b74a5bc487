"""Sampling of many rows at once: a row gets bit for bit what it gets alone, and what a plain implementation gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from weft.generate import row_sampling
from weft.generate.guessed_tokens import draw, odds
from weft.generate.row_sampling import (
    TextState,
    choose_tokens,
    draw_rows,
    portions,
    row_log_probabilities,
    shaped_logits,
    top_values,
)
from weft.generate.sampling import GREEDY, Sampling
from weft.generate.token_counts import TokenCounts

VOCAB = 5003  # a prime, so that nothing comes out even


def text_states(rows: int, seed: int = 0) -> list[TextState]:
    """Texts with all kinds of settings, some of which the rows share."""
    drawn = random.Random(seed)
    hows: list[Any] = [
        lambda: GREEDY,
        lambda: Sampling(),
        lambda: Sampling(0.7, top_k=drawn.choice([1, 5, 50])),
        lambda: Sampling(
            drawn.choice([0.5, 1.2]), top_p=drawn.choice([0.3, 0.9, 0.999])
        ),
        lambda: Sampling(1.5, min_p=drawn.choice([0.0, 0.02])),
        lambda: Sampling(0.9, 40, 0.9, 0.01, 1.3, 0.4, 0.2, {7: 2.0, 9: -5.0}),
        lambda: Sampling(0, repetition=1.5, frequency=0.3),
        lambda: Sampling(1e-9, top_p=0.5),
    ]
    states = []
    for row in range(rows):
        how = hows[row % len(hows)]()
        tokens = [drawn.randrange(VOCAB) for _ in range(drawn.randrange(60))]
        counts = TokenCounts(tokens[:9], [*tokens[9:], *tokens[9:20]])
        allowed = torch.rand(VOCAB) < 0.5 if drawn.random() < 0.3 else None
        forbidden = [1, 2, VOCAB + 5] if drawn.random() < 0.3 else ()
        states.append(
            TextState(
                how,
                drawn.random(),
                counts if how.penalises else None,
                allowed,
                forbidden,
            )
        )
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_gets_bit_by_bit_what_it_gets_alone(dtype: torch.dtype) -> None:
    """Whatever the other rows are; bfloat16 has many equal logits, of which the same are kept."""
    torch.manual_seed(0)
    logits, states = (torch.randn(40, VOCAB) * 3).to(dtype), text_states(40)
    before = logits.clone()
    together = choose_tokens(logits, states)
    said = row_log_probabilities(logits, together, [row % 4 for row in range(40)])
    order = torch.randperm(40).tolist()
    mixed = choose_tokens(logits[order], [states[row] for row in order])
    assert mixed == [together[row] for row in order]
    for row, state in enumerate(states):
        own = logits[row : row + 1]
        assert choose_tokens(own, [state]) == [together[row]]
        assert row_log_probabilities(own, [together[row]], [row % 4]) == [said[row]]
        assert torch.equal(
            shaped_logits(logits, states)[row], shaped_logits(own, [state])[0]
        )
    assert torch.equal(logits, before), "the logits stay as they are"
    assert len(set(together)) > 20


def plain(row: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Probabilities of a row by sorting all of it."""
    best, ids = row.double().sort(descending=True, stable=True)
    best, ids = best[: how.top_k or None], ids[: how.top_k or None]
    p = (best / how.temperature).softmax(-1)
    p = p * (p.cumsum(-1) - p < how.top_p)
    p = p * (p >= how.min_p * p[0])
    return torch.zeros(len(row), dtype=torch.float64).index_put((ids,), p / p.sum())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", [
    Sampling(), Sampling(0.3), Sampling(2.0, top_k=3), Sampling(top_p=0.5), Sampling(top_p=0.9), Sampling(top_p=0.9999),
    Sampling(3.0, top_p=0.97), Sampling(min_p=0.05), Sampling(0.8, 700, 0.9, 0.001), Sampling(top_p=1e-9),
], ids=str)  # fmt: skip
def test_distributions_are_those_of_sorting_everything(how: Sampling) -> None:
    """Of a wide vocabulary, where blocks and the likeliest tokens are looked at first."""
    torch.manual_seed(1)
    row = torch.randn(VOCAB, dtype=torch.float64) * 2
    expected = plain(row, how)
    # rows of float32 are computed by the kernel, if there is a compiler
    for logits, near in ((row, 1e-12), (row.float(), 1e-6)):
        probabilities = odds(logits, TextState(how, 0.0))
        torch.testing.assert_close(probabilities, expected, rtol=0, atol=near)
        # a grid of numbers hits the candidates in one order or another, each as often as it is likely
        cells = 1000
        grid = [TextState(how, (i + 0.5) / cells) for i in range(cells)]
        tokens = choose_tokens(logits.expand(cells, -1), grid)
        hits = torch.bincount(torch.tensor(tokens), minlength=VOCAB)
        assert (hits - cells * expected).abs().max() <= 1 + 1e3 * near


def test_largest_values_and_draws_are_exact() -> None:
    torch.manual_seed(2)
    for width, count in ((70, 3), (5003, 1), (5003, 17), (64 * 90, 20), (300, 300)):
        values = torch.randn(3, width)
        values[1, 5:] = -torch.inf
        best, ids = top_values(values, count)
        assert torch.equal(best, values.topk(count).values)
        assert torch.equal(values.gather(1, ids), best)
    weights = torch.zeros(4, VOCAB)
    weights[0, 4000] = weights[1, 0] = weights[2, VOCAB - 1] = 1.0
    weights[3, [17, 4999]] = 0.5
    for number in (0.0, 0.49, 1 - 2**-53):
        numbers = torch.full((4,), number, dtype=torch.float64)
        last = 4999 if number > 0.5 else 17
        assert draw_rows(weights, numbers).tolist() == [4000, 0, VOCAB - 1, last]
    ends = torch.rand(VOCAB).double()
    for number in torch.rand(50, dtype=torch.float64).tolist():
        whole = ends.cumsum(0)
        expected = int((whole > number * whole[-1]).nonzero()[0])
        assert draw(ends, number) == expected


def test_only_ends_that_leave_something_are_forbidden() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    only_two = torch.tensor([False, True, True, False])
    cases: list[tuple[Any, Any, int]] = [
        (None, (), 0), (None, (0,), 1), (None, (0, 1, 9, -1), 2), (None, (0, 1, 2, 3), 0),
        (only_two, (), 1), (only_two, (1,), 2), (only_two, (1, 2), 1),
    ]  # fmt: skip
    for allowed, forbidden, expected in cases:
        state = TextState(GREEDY, 0.0, None, allowed, forbidden)
        assert choose_tokens(logits, [state]) == [expected]


def test_counts_grow_as_a_text_does() -> None:
    drawn = random.Random(3)
    prompt = [drawn.randrange(9) for _ in range(8)]
    written = [drawn.randrange(20) for _ in range(50)]
    grown = TokenCounts(prompt)
    for token in written:
        grown.add([token])
    ids, counts = grown.tensors()
    expected = {i: written.count(i) for i in {*prompt, *written}}
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected


def test_no_rows_have_no_portions_on_any_device() -> None:
    # on a GPU all rows are one portion, and every greedy step without penalties has none
    for device in ("cpu", "cuda"):
        assert list(portions([], torch.device(device))) == []
        assert next(portions([3, 1], torch.device(device)))[0] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_seed_draws_the_same_tokens_by_all_ways_to_a_nucleus(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU sorts the likeliest tokens, the CPU cuts the row or has a kernel: a text that moves goes on the same."""
    drawn = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(24, 5000, dtype=dtype, generator=drawn)
    numbers = torch.rand(24, dtype=torch.float64, generator=drawn).tolist()
    hows = [Sampling(0.9, top_p=top_p, min_p=1e-3) for top_p in (0.2, 0.8, 0.99)]
    texts = [TextState(hows[i % 3], number) for i, number in enumerate(numbers)]
    said = choose_tokens(logits, texts)
    monkeypatch.setattr(row_sampling, "kernel_serves", lambda values: False)
    assert choose_tokens(logits, texts) == said
    monkeypatch.setattr(row_sampling, "cut_to_nucleus", lambda *given: None)
    assert choose_tokens(logits, texts) == said


def test_the_last_token_of_a_vocabulary_is_drawn_where_a_form_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks of 64 do not divide GPT-2's vocabulary, whose last token ends a text."""
    vocab = 50257
    allowed = torch.zeros(vocab, dtype=torch.bool)
    allowed[[3, 70, vocab - 1]] = True
    logits = torch.zeros(1, vocab)
    logits[0, -1] = 20
    state = TextState(Sampling(top_p=0.9), 0.5, allowed=allowed)
    monkeypatch.setattr(row_sampling, "kernel_serves", lambda values: False)
    monkeypatch.setattr(row_sampling, "cut_to_nucleus", lambda *given: None)
    assert choose_tokens(logits, [state]) == [vocab - 1]
