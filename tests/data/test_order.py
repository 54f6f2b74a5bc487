"""The order: permutations, proportions, ends, splits; and that it stays the same for ever."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.batch import IGNORE
from weft.data.order import Order, Stream, choose_held_out, hash_keys, permutation
from weft.errors import UsageError


def stream(lengths: list[int], seq_len: int, seed: int = 0) -> Stream:
    """Documents whose tokens are all different, so that a token tells where it comes from."""
    offsets = np.append(0, np.cumsum(lengths))
    return Stream(
        np.arange(offsets[-1], dtype=np.uint32),
        offsets[:-1],
        np.diff(offsets),
        seq_len,
        seed,
    )


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@settings(deadline=None)
@given(lengths, st.integers(1, 50), st.integers(0, 2**63), st.integers(0, 5))
def test_an_epoch_holds_every_label_once(
    sizes: list[int], seq_len: int, seed: int, epoch: int
) -> None:
    one = stream(sizes, seq_len, seed)
    rows = [one.row(epoch * one.rows + i) for i in range(one.rows)]
    tokens, labels = (
        np.concatenate([r[0] for r in rows]),
        np.concatenate([r[1] for r in rows]),
    )
    last = set(np.cumsum(sizes) - 1)
    assert sorted(labels[labels != IGNORE]) == sorted(
        set(range(sum(sizes))) - set(np.cumsum([0, *sizes[:-1]]))
    )
    assert len(set(tokens)) == len(tokens) >= sum(sizes) - 1
    assert all(
        (label == IGNORE) if token in last else (label == token + 1)
        for token, label in zip(tokens, labels, strict=True)
    )
    assert sum(len(r[0]) < seq_len for r in rows) <= 1
    for row in rows:
        jumps = [i for i in range(1, len(row.tokens)) if row.tokens[i - 1] in last]
        assert row.starts.tolist() == [0, *jumps]


def test_epochs_differ_and_rows_are_shuffled() -> None:
    one = stream([1000], 10)
    epochs = [
        [int(one.row(e * one.rows + i)[0][0]) for i in range(one.rows)]
        for e in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 1000, 10))
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


def test_the_order_never_changes() -> None:
    """A stored position means the same data in every later version: these numbers must not be touched."""
    order = Order((stream([30, 20, 9], 4), stream([40], 4)), (3.0, 1.0), seed=7)
    assert hash_keys(0, np.arange(2)).tolist() == [
        12035550249420947055,
        627405149472732430,
    ]
    assert permutation(8, 1, 2, 3).tolist() == [0, 7, 5, 3, 6, 2, 1, 4]
    assert [order.locate(i) for i in range(6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (0, 4),
        (1, 0),
    ]
    assert [int(order.row(i)[0][0]) for i in (0, 1, 2, 500)] == [38, 23, 46, 8]
    assert np.flatnonzero(choose_held_out(20, 0.2, 7)).tolist() == [
        1,
        3,
        4,
        10,
        14,
        15,
        18,
    ]


def test_hash_of_distinct_indices_is_distinct() -> None:
    assert len(np.unique(hash_keys(3, np.arange(100_000)))) == 100_000


@settings(deadline=None)
@given(st.lists(st.floats(1e-3, 100), min_size=2, max_size=6), st.integers(0, 300))
def test_several_sources_keep_their_proportions(weights: list[float], at: int) -> None:
    order = Order(tuple(stream([50], 10) for _ in weights), tuple(weights), seed=5)
    drawn = np.array(order.all_legs[0].plan.drawn(at))
    assert (
        np.abs(drawn - np.array(weights) / sum(weights) * at * order.block).max()
        < 1 + 1e-3
    )
    assert (
        drawn.sum() == at * order.block
        and (np.array(order.all_legs[0].plan.drawn(at + 1)) >= drawn).all()
    )


def test_each_source_is_read_in_its_own_order() -> None:
    order = Order(tuple(stream([50], 10) for _ in range(3)), (0.5, 0.3, 0.2001), seed=1)
    places = [order.locate(i) for i in range(5000)]
    for source in range(3):
        own = [index for s, index in places if s == source]
        assert own == list(range(len(own)))
    assert {s for s, _ in places[:20]} == {0, 1, 2}
    assert (
        order.locate(4321)
        == places[4321]
        == Order(order.streams, order.weights, 1).locate(4321)
    )
    assert places[:50] != [
        Order(order.streams, order.weights, 2).locate(i) for i in range(50)
    ]


def test_rare_sources_get_larger_blocks_and_too_rare_ones_an_error() -> None:
    streams = tuple(stream([50], 10) for _ in range(2))
    order = Order(streams, (1.0, 1e-4), seed=0)
    assert order.block == 16384
    assert sum(order.locate(i)[0] for i in range(30_000)) in (2, 3, 4)
    with pytest.raises(UsageError, match="weight"):
        Order(streams, (1.0, 1e-9), seed=0)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (5.0, 1.0), (1.0, 700.0)])
@pytest.mark.parametrize("sizes", [(200, 30), (40_000, 90), (10, 30_000)])
def test_several_sources_end_before_one_is_seen_too_often(
    weights: tuple[float, float], sizes: tuple[int, int]
) -> None:
    order = Order(
        (stream([sizes[0]], 7), stream([sizes[1]], 7)), weights, seed=3, epochs=2
    )
    assert order.total is not None
    limits = [2 * one.rows for one in order.streams]
    counts = [0, 0]
    for sample in range(order.total + 1):
        source, index = order.locate(sample)
        counts[source] += 1
        assert (index < limits[source]) == (sample < order.total)
    assert sum(counts) == order.total + 1


def test_one_source_ends_after_its_epochs() -> None:
    one = stream([33], 8)
    assert one.rows == 4  # 32 labels
    assert Order((one,), (2.0,), 0, epochs=3).total == 12
    assert Order((one,), (2.0,), 0).total is None


@given(st.integers(2, 500), st.floats(0, 0.999), st.integers())
def test_neither_side_of_the_split_is_empty(
    documents: int, fraction: float, seed: int
) -> None:
    out = choose_held_out(documents, fraction, seed)
    assert (~out).any() and (out.any() == (fraction > 0))
    assert not choose_held_out(1, fraction, seed).any()


def test_split_is_about_the_fraction() -> None:
    assert 900 < choose_held_out(10_000, 0.1, 0).sum() < 1100
    assert (choose_held_out(100, 0.5, 0) != choose_held_out(100, 0.5, 1)).any()
