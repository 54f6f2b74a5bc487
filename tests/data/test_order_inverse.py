"""The inverse of the order equals a search through the order itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batch import Pairs
from weft.data.mix_leg import FixedShares, MixLeg
from weft.data.order import Order, Stream
from weft.data.order_inverse import (
    DocumentInSample,
    documents_of_sample,
    sample_of_row,
    samples_drawn,
    samples_of_document,
)

Rows = Literal["tokens", "documents", "one"]


def a_stream(
    sizes: list[int], rows_of: Rows, seq_len: int, seed: int, paired: bool
) -> Stream:
    """Documents with gaps between them, whose ids are their own places."""
    limit = seq_len if rows_of == "tokens" else seq_len // (2 if paired else 1)
    if rows_of != "tokens":
        sizes = [min(size, limit) for size in sizes]
    sizes = sizes * (1 + paired)
    starts = np.cumsum([3 + size for size in [0, *sizes[:-1]]])
    ids = np.arange(starts[-1] + sizes[-1])
    pairs = None
    if paired and rows_of != "tokens":
        count = len(sizes) // 2
        pairs = Pairs.listed(np.ones(count), np.zeros(count)).numbered(0)
    return Stream(
        ids, starts, np.array(sizes), seq_len, seed, rows_of, pairs=pairs
    )  # fmt: skip


@st.composite
def orders(draw: st.DrawFn) -> Order:
    streams = []
    for number in range(draw(st.integers(1, 3))):
        rows_of = draw(st.sampled_from(["tokens", "documents", "one"]))
        sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
        paired = draw(st.booleans())
        seq_len = draw(st.integers(2, 30))
        streams.append(a_stream(sizes, rows_of, seq_len, number, paired))
    weights = draw(
        st.lists(st.floats(0.05, 3.0), min_size=len(streams), max_size=len(streams))
    )
    order = Order(tuple(streams), tuple(weights), draw(st.integers(0, 9)))
    if len(streams) == 1 or draw(st.booleans()):
        return order
    # at a sample in the middle of a block the mixture changes, as after a resume
    start = draw(st.integers(1, 3000))
    given = tuple(samples_drawn(order, start))
    others = (FixedShares(order.weights), FixedShares(order.weights[::-1]))
    zero = (0,) * len(streams)
    legs = (MixLeg(0, zero, others[0]), MixLeg(start, given, others[1]))
    return replace(order, legs=legs)


def searched(order: Order, sample: int) -> list[DocumentInSample]:
    """The documents of a sample, by the ids in its row: each id is the place of its token."""
    number, _ = order.locate(sample)
    stream, row = order.streams[number], order.row(sample)
    bounds = [*row.starts.tolist(), len(row.tokens)]
    listed = []
    for low, high in pairwise(bounds):
        document = int(np.searchsorted(stream.starts, row.tokens[low], "right")) - 1
        first = int(row.tokens[low] - stream.starts[document])
        listed.append(DocumentInSample(number, document, first, first + high - low))
    return listed


@pytest.mark.slow(3)
@settings(deadline=None, max_examples=12)
@given(orders(), st.integers(0, 900), st.integers(1, 300))
def test_the_inverse_is_a_search(order: Order, begin: int, size: int) -> None:
    begin, samples = begin * 3, range(begin * 3, begin * 3 + size)
    expected: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    counts = np.zeros(len(order.streams), int)
    for sample in samples:
        own = searched(order, sample)
        assert documents_of_sample(order, sample) == own
        for stream, document, first, last in own:
            expected.setdefault((stream, document), []).append((sample, first, last))
        counts[own[0].stream] += 1
    drawn = [samples_drawn(order, end) for end in (samples.start, samples.stop)]
    assert np.subtract(drawn[1], drawn[0]).tolist() == counts.tolist()
    for number, stream in enumerate(order.streams):
        for document in range(len(stream.starts)):
            uses = [*samples_of_document(order, number, document, samples)]
            assert sorted((u.sample, u.first, u.last) for u in uses) == (
                expected.get((number, document), [])
            )
            for use in uses:
                assert order.locate(use.sample)[1] // stream.rows == use.epoch


@settings(deadline=None, max_examples=15)
@given(orders(), st.integers(0, 50_000))
def test_a_row_is_found_again(order: Order, sample: int) -> None:
    assert sample_of_row(order, *order.locate(sample)) == sample
