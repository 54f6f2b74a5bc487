"""Buffers between simulators and a training: nothing is lost, no unseen sample leaves, and choices are uniform."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from weft.data.order import hash_keys
from weft.data.sample_buffer import DRAWS, SampleBuffer
from weft.data.sample_ledger import LEARN, SIMULATE, SampleLedger
from weft.registry import find

TASKS = (SIMULATE, LEARN)


def buffer_of(
    name: str, capacity: int, watermark: int = 0, seed: int = 0
) -> SampleBuffer:
    buffer: SampleBuffer = find("buffer", name).implementation(
        capacity, watermark, seed
    )
    return buffer


def ledger_of(buffer: SampleBuffer) -> SampleLedger:
    return SampleLedger(TASKS, 0, buffer=buffer)


def drain(ledger: SampleLedger, count: int) -> list[int]:
    """Draw until nothing is left, and return all places in the order of training."""
    ledger.ended, drawn = True, []
    while lease := ledger.take("learn", "trainer", count):
        drawn += [row.place for row in lease.rows]
        ledger.finish(lease)
        ledger.advance()
    return drawn


@pytest.mark.parametrize("name", ["reservoir", "fifo", "firo"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_and_no_unseen_sample_leaves(
    name: str, data: st.DataObject
) -> None:
    batch = data.draw(st.integers(1, 4), "batch")
    watermark = data.draw(st.integers(0, 5), "watermark")
    capacity = watermark + batch + data.draw(st.integers(0, 6), "more room")
    freed: list[int] = []
    buffer = buffer_of(name, capacity, watermark, data.draw(st.integers(0, 9), "seed"))
    ledger = SampleLedger(TASKS, 0, buffer=buffer, freed=freed.append)
    drawn: Counter[int] = Counter()
    came = 0
    for produces in data.draw(st.lists(st.booleans(), max_size=120), "turns"):
        if produces:
            before = {place for place, seen in buffer.places() if not seen}
            place = ledger.bring("simulate")
            here = {place for place, seen in buffer.places() if not seen}
            assert before <= here
            if (
                place is None
            ):  # back-pressure: only where all are unseen, or in training
                assert name != "reservoir" or len(before) == capacity
            else:
                assert place == came
                came += 1
        elif lease := ledger.take("learn", "trainer", batch):
            assert len(lease.rows) == batch
            drawn.update(row.place for row in lease.rows)
            ledger.finish(lease)
            ledger.advance()
        assert len(ledger._groups) <= capacity
        assert all(drawn[place] for place in freed)
    left = drain(ledger, batch)
    assert len(left) == len({*left})  # the end draws without replacement
    drawn.update(left)
    assert {*drawn} == {*range(came)} and all(drawn.values())
    assert sorted(freed) == [*range(came)]
    assert ledger.repetitions() == Counter(drawn.values())
    if name != "reservoir":
        assert {*drawn.values()} <= {1}
    if name == "fifo":
        assert [*drawn] == [*range(came)]


def test_draws_of_the_reservoir_are_uniform() -> None:
    buffer, counts = buffer_of("reservoir", 50, 0, seed=3), Counter[int]()
    for place in range(50):
        buffer.put(place)
    for _ in range(200):
        counts.update(each.place for each in buffer.draw(100, ended=False))
    expected = 20_000 / 50
    statistic = sum((counts[i] - expected) ** 2 / expected for i in range(50))
    assert chi2.ppf(0.0005, 49) < statistic < chi2.ppf(0.9995, 49)


def test_evictions_of_the_reservoir_are_uniform() -> None:
    counts = Counter[int]()
    for seed in range(2000):
        buffer = buffer_of("reservoir", 8, 0, seed)
        for place in range(8):
            buffer.put(place, seen=place < 5)
        place = buffer.evict()
        assert place is not None
        counts[place] += 1
    assert {*counts} == {*range(5)}
    statistic = sum((counts[i] - 400) ** 2 / 400 for i in range(5))
    assert statistic < chi2.ppf(0.9995, 4)


def test_room_for_everything_is_an_offline_shuffle() -> None:
    """With capacity and watermark of all samples, the first epoch is a Fisher-Yates shuffle of them."""
    ledger = ledger_of(buffer_of("reservoir", 40, 40, seed=7))
    for _ in range(40):
        ledger.bring("simulate")
    assert ledger.take("learn", "trainer", 8) is None
    drawn = drain(ledger, 8)
    left, shuffled = [*range(40)], []
    for draw in range(40):
        index = int(hash_keys(7, DRAWS, draw)[0]) * len(left) >> 64
        shuffled.append(left[index])
        last = left.pop()
        if index < len(left):
            left[index] = last
    assert drawn == shuffled != sorted(drawn)
    assert sorted(drawn) == [*range(40)]


def test_draws_go_on_where_a_checkpoint_was() -> None:
    """A ledger that is saved and read draws what it would have drawn, unless the order within the buffer counts."""
    ledger = ledger_of(buffer_of("fifo", 20, 2))
    for _ in range(15):
        ledger.bring("simulate")
    for _ in range(3):
        lease = ledger.take("learn", "trainer", 4)
        assert lease is not None
        ledger.finish(lease)
        ledger.advance()
        if len(ledger._groups) == 7:
            break
    other = ledger_of(buffer_of("fifo", 20, 2))
    other.load_state(json.loads(json.dumps(ledger.state())))
    assert other.buffer is not None and ledger.buffer is not None
    assert other.buffer.draws == ledger.buffer.draws == 8
    assert drain(other, 4) == drain(ledger, 4) == [*range(8, 15)]
    assert other.repetitions() == ledger.repetitions() == {1: 15}


def test_a_saved_reservoir_knows_what_was_seen() -> None:
    ledger = ledger_of(buffer_of("reservoir", 6))
    for _ in range(6):
        ledger.bring("simulate")
    lease = ledger.take("learn", "trainer", 2)
    assert lease is not None and ledger.buffer is not None
    other = ledger_of(buffer_of("reservoir", 6))
    other.load_state(ledger.state())  # leased and not finished: not drawn yet
    assert other.buffer is not None
    assert not any(seen for _, seen in other.buffer.places())
    ledger.finish(lease)
    other.load_state(ledger.state())
    assert {*other.buffer.places()} == {*ledger.buffer.places()}
    assert sum(seen for _, seen in other.buffer.places()) == len({*lease.rows})


def test_what_a_lost_trainer_had_is_unseen_again() -> None:
    for name in ("reservoir", "fifo", "firo"):
        ledger = ledger_of(buffer_of(name, 8))
        for _ in range(8):
            ledger.bring("simulate")
        assert ledger.take("learn", "a", 4)
        assert ledger.lose("a")
        drawn = np.bincount(drain(ledger, 3), minlength=8)
        assert drawn.tolist() == [1] * 8


def test_samples_of_the_policy_need_no_buffer() -> None:
    from weft.data.sample_ledger import ROLLOUT, LedgerTask

    learn = LedgerTask("learn", ("answer",), whole=True)
    with pytest.raises(ValueError, match="that no policy draws"):
        SampleLedger((ROLLOUT, learn), 0, buffer=buffer_of("fifo", 4))
    with pytest.raises(ValueError, match="does not bring samples from outside"):
        ledger_of(buffer_of("fifo", 4)).bring("learn")
