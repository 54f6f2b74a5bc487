"""Tiles, the units of work of the kernel that reads keys from cache blocks: neighbouring new tokens of one text."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.models.queued_copy import queued_copy
from weft.models.spans import SHORT, Span

T = torch.Tensor

#: Rows of a tile, which are its tokens times the query heads of a key head: of texts with few new tokens, and of
#: others. Tensor cores multiply at least 16 rows.
FEW_ROWS, MANY_ROWS = 16, 64


class TileBatch(NamedTuple):
    """Tiles whose attention is computed by one launch of the kernel. All tensors are int32.

    Attributes:
        ``tables``: cache blocks of each text, ``[texts, blocks]``; rows of shorter texts are padded.
        ``rows``: index in the packed row of the first token of each tile.
        ``counts``: number of tokens of each tile.
        ``places``: number of tokens before the first token of each tile in its text.
        ``texts``: index in ``tables`` of the text of each tile.
        ``tokens``: largest number of tokens of a tile, a power of two.
        ``keys``: largest number of keys that a token sees.
        ``splits``: number of shares into which the keys are split; 0: as many as keep the device busy.
    """

    tables: T
    rows: T
    counts: T
    places: T
    texts: T
    tokens: int
    keys: int
    splits: int = 0


def tile_spans(
    spans: Sequence[Span], window: int, group: int, device: torch.device
) -> list[TileBatch]:
    """Cut the new tokens of texts into tiles, pieces that one program of the attention kernel computes. Returns one
    batch of tiles for short spans and one for longer ones, without empty batches.

    ``window``: the number of tokens that a token sees, itself included; 0: all. ``group``: query heads of each key
    head. ``device``: where the tensors are made.
    """
    few = [span for span in spans if span.last - span.first <= SHORT]
    many = [span for span in spans if span.last - span.first > SHORT]
    kinds = ((few, FEW_ROWS), (many, MANY_ROWS))
    return [_batch(some, rows, window, group, device) for some, rows in kinds if some]


def tokens_of_tile(rows: int, group: int) -> int:
    """Return how many tokens fit in a tile of ``rows`` rows. A token has ``group`` rows, rounded up to a power of two:
    one for each query head that uses the same key head.
    """
    return max(1, rows // (1 << (group - 1).bit_length()))


def _batch(
    spans: Sequence[Span], rows: int, window: int, group: int, device: torch.device
) -> TileBatch:
    tokens = tokens_of_tile(rows, group)
    tiles = [
        (at, min(tokens, span.last - at), span.past + at - span.first, text)
        for text, span in enumerate(spans)
        for at in range(span.first, span.last, tokens)
    ]
    longest = max(span.past + span.last - span.first for span in spans)
    width = max(len(span.table) for span in spans)
    tables = [[*span.table, *[0] * (width - len(span.table))] for span in spans]
    columns = [list(column) for column in zip(*tiles, strict=True)]
    first, counts, places, texts = queued_copy(columns, device, torch.int32)
    keys = min(longest, window + tokens - 1) if window else longest
    return TileBatch(
        queued_copy(tables, device, torch.int32),
        first,
        counts,
        places,
        texts,
        tokens,
        keys,
    )
