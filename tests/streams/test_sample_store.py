"""Samples between simulators and a training: each counts once, and a checkpoint loses none that was not drawn."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.registry import find
from weft.streams.index_ranges import as_ranges, of_ranges
from weft.streams.sample_store import SampleName, SampleStore


def store_of(capacity: int = 8, watermark: int = 0, buffer: str = "reservoir") -> SampleStore:  # fmt: skip
    return SampleStore(
        find("buffer", buffer).implementation(capacity, watermark, seed=1)
    )


def row(number: int) -> np.ndarray:
    return np.full(3, number, np.float32)


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_the_same_integers(integers: set[int]) -> None:
    ranges = as_ranges(integers)
    assert [*of_ranges(ranges)] == sorted(integers)
    assert all(b < a for (_, b), (a, _) in itertools.pairwise(ranges))


def test_a_sample_that_comes_twice_counts_once() -> None:
    store = store_of()
    for number in (0, 1, 0, 1, 2):
        assert store.put(SampleName("a", number), row(number))
    assert store.put(SampleName("b", 0), row(9))
    assert store.received == store.size == 4
    assert store.producer("a").repeated == 2
    with pytest.raises(ValueError, match="sample 5 where sample 3 was due"):
        store.put(SampleName("a", 5), row(5))


def test_a_buffer_of_unseen_samples_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("weft.streams.sample_store.LOOK_S", 0.001)
    store = store_of(capacity=2)
    assert store.put(SampleName("a", 0), row(0)) and store.put(
        SampleName("a", 1), row(1)
    )
    assert not store.put(SampleName("a", 2), row(2))
    drawn = store.draw(1, ended=False)
    assert drawn is not None and (drawn.rows == drawn.names[0].number).all()
    assert store.put(SampleName("a", 2), row(2))
    assert store.size == 2


@pytest.mark.parametrize("buffer", ["reservoir", "fifo", "firo"])
def test_what_was_not_drawn_is_sent_again_after_a_checkpoint(buffer: str) -> None:
    """Nothing is lost, and nothing counts twice as drawn for the first time."""
    store = store_of(10, 0, buffer)
    for number in range(10):
        store.put(SampleName("a", number), row(number))
    drawn = store.draw(4, ended=False)
    assert drawn is not None
    before = {name.number for name in drawn.names}
    state = json.loads(json.dumps(store.state()))
    store.put(SampleName("a", 10), row(10))  # is not in the checkpoint

    other = store_of(10, 0, buffer)
    other.load_state(state)
    asked = other.producer("a").again
    assert asked == {*range(10)} - before
    assert other.received == len(before)
    for number in range(12):  # the simulator from its beginning
        other.put(SampleName("a", number), row(number))
    assert other.producer("a").repeated == len(before)
    after: list[int] = []
    while more := other.draw(3, ended=True):
        after += [name.number for name in more.names]
    assert sorted(after) == sorted({*range(12)} - before)
    assert sum(other.repetitions().values()) == 12
    assert other.drawn == 4 + len(after)
