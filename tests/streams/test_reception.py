"""Simulators send over real connections: back-pressure, restarts, and senders that are named and refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.measured import eventually
from weft.errors import UsageError, WeftError
from weft.net.endpoint import Endpoint
from weft.registry import find
from weft.streams import producer
from weft.streams.array_columns import ArrayColumns, columns_of_table
from weft.streams.reception import CHANNEL, Reception
from weft.streams.sample_store import SampleStore
from weft.streams.stream_producer import SECRET, TrainingOver

COLUMNS = ArrayColumns({"x": (2,), "y": ()})


class Stream:
    """A reception in this process, and what it says."""

    def __init__(self, capacity: int) -> None:
        self.store = SampleStore(find("buffer", "fifo").implementation(capacity, 0, 0))
        self.endpoint, self.lines = Endpoint("127.0.0.1"), list[str]()
        self.reception = Reception(self.endpoint, "secret", COLUMNS, self.store, self.lines.append)  # fmt: skip
        self.address = f"127.0.0.1:{self.endpoint.address[1]}"

    def close(self) -> None:
        self.reception.close()
        self.endpoint.close()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    monkeypatch.setenv(SECRET, "secret")
    opened = Stream(capacity=5)
    yield opened
    opened.close()


def sample(number: float) -> dict[str, Any]:
    return {"x": [number, -number], "y": number}


def send_all(address: str, count: int) -> None:
    with producer(address, "a") as out:
        for number in range(count):
            out.send(sample(number))


def test_columns_pack_and_unpack() -> None:
    rows = np.stack([COLUMNS.pack(sample(n)) for n in (1, 2)])
    assert rows.tolist() == [[1, -1, 1], [2, -2, 2]]
    arrays = COLUMNS.unpack(rows)
    assert arrays["x"].shape == (2, 2) and arrays["y"].tolist() == [1, 2]
    assert columns_of_table(COLUMNS.table) == COLUMNS
    with pytest.raises(ValueError, match="no table"):
        columns_of_table([["x", [-1]]])


def test_a_simulator_waits_for_room_and_continues(stream: Stream) -> None:
    sending = threading.Thread(target=send_all, args=(stream.address, 40))
    sending.start()
    rows: list[float] = []
    while len(rows) < 40:
        drawn = stream.store.draw(1, ended=False)
        assert stream.store.size <= 5
        if drawn is None:
            with stream.store.changed:
                stream.store.changed.wait(0.01)
        else:
            rows += drawn.rows[:, 2].tolist()
    sending.join(20)
    assert rows == [*range(40)]
    assert stream.store.producer("a").ended and not stream.lines


def test_a_simulator_that_died_sends_the_rest(stream: Stream) -> None:
    out = producer(stream.address, "a")
    for number in range(3):
        out.send(sample(number))
    while out._pending:
        out._hear()
    out.hang_up()
    # noticed before the next connection takes its place
    eventually(lambda: any("is gone before" in line for line in stream.lines))
    with producer(stream.address, "a") as again:
        assert again.received == 3 and not again.wants(1)
        again.skip()
        for number in range(1, 5):
            again.send(sample(number))
        with pytest.raises(ValueError, match="yet to be sent"):
            again.skip()
    assert stream.store.received == 5 and stream.store.producer("a").repeated == 0
    assert any("gone before its end, after 3 samples" in line for line in stream.lines)


def test_a_wrong_sample_is_refused_before_it_is_sent(stream: Stream) -> None:
    out = producer(stream.address, "a")
    with pytest.raises(UsageError, match=r"'x' of a sample has the shape \[3\], and"):
        out.send({"x": [1, 2, 3], "y": 0})
    with pytest.raises(UsageError, match="has the arrays x, and the training reads x"):
        out.send({"x": [1, 2]})
    out.hang_up()
    with (
        pytest.raises(UsageError, match="'y' of a sample has no numbers"),
        producer(stream.address, "c") as out,
    ):
        out.send({"x": [1, 2], "y": "cold"})


def test_a_sample_that_is_not_finite_is_named_and_refused(stream: Stream) -> None:
    with (
        pytest.raises(
            UsageError, match=r"refuses simulator a: sample 1 .* 'y' .* not finite"
        ),
        producer(stream.address, "a") as out,
    ):
        out.send(sample(0))
        out.send({"x": [0, 0], "y": float("nan")})
    assert stream.store.producer("a").refused
    assert "simulator a is refused: sample 1 has values in 'y' that are not finite" in stream.lines  # fmt: skip


@pytest.mark.parametrize(("head", "size", "why"), [
    ({"sample": 0}, 8, "a sample of 8 bytes, and the training reads 12"),
    ({"sample": 7}, 12, "sample 7 where sample 0 was due"),
    ({"sample": "0"}, 12, "neither a sample nor the end"),
    ({"rm": "-rf"}, 0, "neither a sample nor the end"),
])  # fmt: skip
def test_garbage_is_named_and_refused(
    stream: Stream, head: dict[str, Any], size: int, why: str
) -> None:
    endpoint = Endpoint("127.0.0.1")
    connection = endpoint.join(CHANNEL, "secret").dial(stream.endpoint.address, {"producer": "evil"}, 10)  # fmt: skip
    assert connection.receive(limit=10).head["next"] == 0
    connection.send(head, [memoryview(bytes(size))])
    assert why in connection.receive(limit=10).head["refused"]
    connection.close()
    endpoint.close()
    assert any(why in line and "evil" in line for line in stream.lines)


def test_the_end_of_a_training_ends_simulators_without_an_error(stream: Stream) -> None:
    out = producer(stream.address, "a")
    out.send(sample(0))
    closing = threading.Thread(target=stream.reception.close)
    closing.start()
    with pytest.raises(TrainingOver):
        while True:
            out.send(sample(1))
    with out:
        raise TrainingOver("of the with statement")
    closing.join(10)


def test_who_does_not_know_the_secret_is_not_let_in(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "other")
    with pytest.raises(WeftError, match=r"lets simulator a in.*WEFT_SECRET"):
        producer(stream.address, "a", wait=0.1)
    with pytest.raises(UsageError, match="as HOST:PORT"):
        producer("nowhere")


def test_the_public_names_are_those_of_functions() -> None:
    """Whatever file of the package was imported before."""
    import weft.streams as streams

    for name, file in streams._FILES.items():
        assert name != file and callable(getattr(streams, name))
