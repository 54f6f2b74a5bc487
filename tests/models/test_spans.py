"""Which spans are attended to in one call."""

from __future__ import annotations

import torch

from weft.models.spans import MOST, PADDED, SHORT, Span, SpanBatch, batch_spans


def spans_of(*sizes: tuple[int, int]) -> list[Span]:
    """Of ``(past, tokens)`` each, one behind the other in the row."""
    found, first = list[Span](), 0
    for number, (past, tokens) in enumerate(sizes):
        found.append(
            Span(
                first,
                first + tokens,
                past,
                [100 * number + i for i in range(past + tokens)],
            )
        )
        first += tokens
    return found


def test_short_spans_of_like_lengths_are_one_call() -> None:
    spans = spans_of(
        (40, 1),
        (0, 90),
        (44, 1),
        (35, 1),
        (400, 1),
        (410, 1),
        (9, 3),
        (11, 3),
        (50, SHORT + 1),
    )
    found = batch_spans(spans, 4, 0, torch.zeros(1), 2)
    places = torch.arange(101)
    rows = [
        places[piece.rows].flatten().tolist()
        for piece in found
        if isinstance(piece, SpanBatch)
    ]
    sliced = [isinstance(p.rows, slice) for p in found if isinstance(p, SpanBatch)]
    assert sliced == [False, True, True], "places that follow each other are a slice"
    assert rows == [[92, 0, 91], [93, 94], [95, 96, 97, 98, 99, 100]]
    assert sorted(piece.past for piece in found if isinstance(piece, Span)) == [0, 50]
    first = next(
        piece
        for piece in found
        if isinstance(piece, SpanBatch) and piece.shape == (3, 1)
    )
    # The shortest first: 36 keys in 9 blocks, filled up to 12 with the last of them.
    assert first.blocks[0].tolist() == [*range(300, 309), 308, 308, 308]
    assert (first.bias == 0).sum(-1).flatten().tolist() == [36, 36, 41, 41, 45, 45]


def test_calls_are_bounded() -> None:
    spans = spans_of(*[(length, 1) for length in range(3, 2000, 7)])
    for piece in batch_spans(spans, 1, 0, torch.zeros(1), 1):
        assert isinstance(piece, Span) or piece.blocks.numel() <= MOST
        lengths = (
            []
            if isinstance(piece, Span)
            else (piece.bias == 0).sum(-1).flatten().tolist()
        )
        assert not lengths or max(lengths) <= PADDED * min(lengths)


def test_blocks_behind_a_window_are_left_out() -> None:
    (piece,) = batch_spans(spans_of((40, 2), (47, 2)), 4, 6, torch.zeros(1), 1)
    assert isinstance(piece, SpanBatch) and piece.blocks.tolist() == [
        [8, 9, 10],
        [110, 111, 112],
    ]
    seen = [
        [(8 * 4 + j) for j in row.nonzero().flatten().tolist()]
        for row in piece.bias[0, 0] == 0
    ]
    assert seen == [[*range(35, 41)], [*range(36, 42)]]
