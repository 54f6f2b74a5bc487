"""Inverse of the order: which samples have a document, which documents a sample has, how much was read so far.

The order is a pure function of its seed and the sample's index, and so is its inverse: no log is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from weft.data.order import Order, Stream


class DocumentRow(NamedTuple):
    """Tokens ``first`` to ``last`` (exclusive) of a document that are in row ``row`` of its stream.

    Row numbers go on from epoch to epoch.
    """

    row: int
    first: int
    last: int


class DocumentSample(NamedTuple):
    """Tokens ``first`` to ``last`` (exclusive) of a document that are in global sample ``sample``. ``epoch`` counts
    from 0.
    """

    sample: int
    epoch: int
    first: int
    last: int


class DocumentInSample(NamedTuple):
    """A document of a sample: its number in the stream ``stream``, and its tokens ``first`` to ``last`` (exclusive)."""

    stream: int
    document: int
    first: int
    last: int


def rows_of_document(stream: Stream, document: int, epoch: int) -> list[DocumentRow]:
    """Return the rows of ``epoch`` (from 0) that have tokens of a document, in the order of their indices.

    ``document``: number of the document in the stream. A document that is a single token at the very end of an epoch is
    in no row.
    """
    table = stream._epoch(epoch)
    length = int(stream.lengths[document])
    end_in_ids = int(stream.starts[document]) + length
    # [documents]: where each document of the joined stream ends in ids
    end = int(table.ends[np.argmax(table.ends + table.shift == end_in_ids)])
    start = end - length
    rows = np.flatnonzero((table.firsts < end) & (table.lasts > start))
    return [
        DocumentRow(
            epoch * stream.rows + row,
            max(start, int(table.firsts[row])) - start,
            min(end, int(table.lasts[row])) - start,
        )
        for row in rows.tolist()
    ]


def sample_of_row(order: Order, stream: int, index: int) -> int:
    """Return the number of the global sample that is row ``index`` of stream number ``stream``.

    The result may lie beyond the end of the order.
    """
    if len(order.streams) == 1:
        return index
    # of a row that no leg reaches, in the last one
    number = next(
        (
            number
            for number, leg in enumerate(order.all_legs[1:])
            if index < leg.given[stream]
        ),
        len(order.all_legs) - 1,
    )
    leg = order.all_legs[number]
    index_in_leg = index - leg.given[stream]
    low, high = 0, 1
    while leg.plan.drawn(high)[stream] <= index_in_leg:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if leg.plan.drawn(middle)[stream] <= index_in_leg:
            low = middle
        else:
            high = middle
    streams, indices = order.block_samples(number, low)
    place = np.flatnonzero((streams == stream) & (indices == index))
    return leg.start + low * leg.plan.block + int(place[0])


def samples_of_document(
    order: Order, stream: int, document: int, samples: range
) -> Iterator[DocumentSample]:
    """Yield in which of the ``samples`` a document has tokens, epoch by epoch.

    ``stream``: number of the stream. ``document``: number of the document in the stream.
    """
    drawn = [samples_drawn(order, end)[stream] for end in (samples.start, samples.stop)]
    rows = order.streams[stream].rows
    for epoch in count(drawn[0] // rows):
        if epoch * rows >= drawn[1]:
            return
        for row in rows_of_document(order.streams[stream], document, epoch):
            if drawn[0] <= row.row < drawn[1]:
                sample = sample_of_row(order, stream, row.row)
                yield DocumentSample(sample, epoch, row.first, row.last)


def documents_of_sample(order: Order, sample: int) -> list[DocumentInSample]:
    """Return the documents of which a sample has tokens, in the order of their tokens in the row."""
    number, index = order.locate(sample)
    stream = order.streams[number]
    epoch, row = divmod(index, stream.rows)
    table = stream._epoch(epoch)
    low, high = int(table.firsts[row]), int(table.lasts[row])
    first, last = np.searchsorted(table.ends, (low, high - 1), side="right")
    ends = table.ends[first : last + 1]
    in_ids = ends + table.shift[first : last + 1]
    documents = np.searchsorted(stream.starts, in_ids, side="left") - 1
    return [
        DocumentInSample(
            number,
            document,
            max(0, low - (end - int(stream.lengths[document]))),
            min(end, high) - (end - int(stream.lengths[document])),
        )
        for document, end in zip(documents.tolist(), ends.tolist(), strict=True)
    ]


def samples_drawn(order: Order, samples: int) -> list[int]:
    """Return how many of the first ``samples`` samples come from each stream, in the order of the streams."""
    if len(order.streams) == 1:
        return [samples]
    number = order.leg_at(max(0, samples - 1))
    leg = order.all_legs[number]
    blocks, rest = divmod(samples - leg.start, leg.plan.block)
    drawn = np.add(leg.given, leg.plan.drawn(blocks))
    if rest:
        streams, _ = order.block_samples(number, blocks)
        drawn = drawn + np.bincount(streams[:rest], minlength=len(drawn))
    return [*map(int, drawn)]
