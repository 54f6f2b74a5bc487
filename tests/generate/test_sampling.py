"""Samplers against transformers' processors, enumerated distributions, and a stop string in every cut."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.detokenizer import MOST_PENDING, TextDecoder, stream_text
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError
from weft.generate.guessed_tokens import choose_token, draw, odds
from weft.generate.row_sampling import TextState, row_log_probabilities
from weft.generate.sampling import GREEDY, Sampling
from weft.generate.token_counts import TokenCounts

LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, 1.5, 2.5, -3.0], dtype=torch.float64)
PROMPT, WRITTEN = [0, 2], [5, 5, 3]


def state(how: Sampling, prompt: Any = (), written: Any = ()) -> TextState:
    counts = TokenCounts(prompt, written) if how.penalises else None
    return TextState(how, 0.0, counts)


def distribution(
    how: Sampling, logits: torch.Tensor = LOGITS, seen: Any = (PROMPT, WRITTEN)
) -> torch.Tensor:
    return odds(logits, state(how, *seen))


@pytest.mark.parametrize("how", [
    Sampling(), Sampling(0.3), Sampling(2.0, top_k=3), Sampling(top_p=0.7), Sampling(top_p=1e-9), Sampling(min_p=0.3),
    Sampling(repetition=1.7), Sampling(repetition=0.6), Sampling(0.8, top_k=5, top_p=0.9, min_p=0.1, repetition=1.2),
    Sampling(bias={1: 2.0, 5: -1.0}), Sampling(0.5, top_k=10**6),
], ids=str)  # fmt: skip
def test_distributions_are_those_of_transformers(how: Sampling) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    chain = [
        processors.SequenceBiasLogitsProcessor({(i,): b for i, b in how.bias.items()})
        if how.bias
        else None,
        processors.RepetitionPenaltyLogitsProcessor(how.repetition),
        processors.TemperatureLogitsWarper(how.temperature),
        processors.TopKLogitsWarper(how.top_k) if how.top_k else None,
        processors.TopPLogitsWarper(how.top_p) if how.top_p < 1 else None,
        processors.MinPLogitsWarper(how.min_p) if how.min_p else None,
    ]
    row, ids = LOGITS[None].clone(), torch.tensor([[*PROMPT, *WRITTEN]])
    for processor in chain:
        row = row if processor is None else processor(ids, row)
    torch.testing.assert_close(
        distribution(how), row[0].softmax(-1), rtol=0, atol=1e-12
    )


def test_penalties_are_openais() -> None:
    """logits - frequency * count - presence * (count > 0), of what was written and not of the prompt."""
    expected = (
        LOGITS
        - 0.5 * torch.tensor([0, 0, 0, 1, 0, 2, 0])
        - 0.25 * torch.tensor([0, 0, 0, 1, 0, 1, 0])
    )
    found = distribution(Sampling(frequency=0.5, presence=0.25))
    torch.testing.assert_close(found, expected.softmax(-1), rtol=0, atol=1e-12)
    assert LOGITS[0] == 0 and LOGITS[5] == 2.5, "the logits stay as they are"


def test_drawn_tokens_have_the_distribution() -> None:
    """A grid of numbers hits every token as often as it is likely, to one cell; so do those of a stream."""
    how = Sampling(0.7, top_k=4, top_p=0.95)
    probabilities = distribution(how, seen=([], []))
    cells = 5_000
    hits = torch.bincount(
        torch.tensor([draw(probabilities, (i + 0.5) / cells) for i in range(cells)]),
        minlength=len(probabilities),
    )
    assert (hits - cells * probabilities).abs().max() <= 1
    stream, count = Random(0), 5_000
    drawn = torch.bincount(
        torch.tensor([choose_token(LOGITS, state(how), stream) for _ in range(count)]),
        minlength=7,
    )
    wanted = count * distribution(how, seen=([], []))
    possible = wanted > 0
    chi_square = float(((drawn - wanted)[possible] ** 2 / wanted[possible]).sum())
    # 3 degrees of freedom, 1e-3
    assert not drawn[~possible].any() and chi_square < 16.3


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=9), st.floats(0, 1, exclude_max=True)
)
def test_what_has_no_probability_is_never_drawn(
    weights: list[float], number: float
) -> None:
    row = torch.tensor([*weights, 1.0, 0.0], dtype=torch.float64)
    for x in (number, 0.0, 1 - 2**-53):
        assert row[draw(row / row.sum(), x)] > 0


def test_greedy_and_extremes() -> None:
    stream = Random(0)
    assert (
        choose_token(LOGITS, state(GREEDY), stream) == 5
        and stream.random() == Random(0).random()
    )
    assert choose_token(LOGITS, state(Sampling(1e-30)), stream) == 5
    assert choose_token(LOGITS, state(Sampling(0, bias={3: 100.0})), stream) == 3
    assert choose_token(LOGITS.bfloat16(), state(Sampling(top_k=1)), stream) == 5
    ((p, best),) = row_log_probabilities(LOGITS[None], [1], [2])
    assert p == pytest.approx(float(LOGITS.log_softmax(0)[1])) and list(best) == [5, 2]
    for wrong in (
        {"temperature": -1},
        {"top_p": 0},
        {"min_p": 2},
        {"repetition": 0},
        {"temperature": float("nan")},
    ):
        with pytest.raises(
            UsageError, match=f"{next(iter(wrong))} = .* is not possible"
        ):
            Sampling(**wrong)


@settings(max_examples=100, deadline=None)
@given(
    st.text("ab\n🙂", max_size=12),
    st.lists(st.text("ab\n🙂", min_size=1, max_size=4), max_size=3),
)
def test_text_ends_before_the_first_stop_string_whatever_tokens_it_is_cut_into(
    text: str, stops: list[str]
) -> None:
    """Bytes are the tokens; nothing that is shown is taken back, nor held longer than a stop string needs."""
    tokenizer = load_tokenizer("bytes")
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    # Of stop strings that come, the one that is complete first ends the text, as no more is read then.
    complete = min(
        (text.find(stop) + len(stop) for stop in stops if stop in text),
        default=len(text),
    )
    begun = [text[:complete].find(stop) for stop in stops if stop in text[:complete]]
    expected = text[: min(begun)] if ends else text
    assert (
        "".join(stream_text(tokenizer, tokenizer.encode(text).tolist(), stops))
        == expected
    )
    writer, shown = TextDecoder(tokenizer, stops), ""
    for i in tokenizer.encode(text).tolist():
        shown += writer.add(i)
        assert expected.startswith(shown)
    assert bool(writer.stopped) == bool(ends)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([*"é😀a", *b"\x80\xc3\xf0\x9f\xff\xe2", 256]), max_size=60)
)
def test_bytes_that_are_no_text_are_given_out_as_they_come(parts: list[Any]) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = [
        i
        for part in parts
        for i in (part.encode() if isinstance(part, str) else [part])
    ]
    writer = TextDecoder(tokenizer)
    pieces = []
    for i in ids:
        pieces.append(writer.add(i))
        assert len(writer._fresh) < MOST_PENDING, "time goes with what is held"
    assert "".join(pieces) + writer.end() == tokenizer.decode(ids)


def test_no_token_is_asked_for_behind_a_stop_string() -> None:
    tokenizer, given = load_tokenizer("bytes"), iter(b"one\n\ntwo")
    assert list(stream_text(tokenizer, given, ["\n\n"])) == ["o", "n", "e"]
    assert bytes(given) == b"two"
