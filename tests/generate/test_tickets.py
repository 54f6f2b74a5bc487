"""Messages of the first rank to the others, and their signs of life."""

from __future__ import annotations

import threading
import time

import pytest

from weft.generate import tickets
from weft.generate.tickets import TicketReader, TicketWriter


def test_a_rank_that_is_stopped_is_silent_and_then_heard_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tickets, "BEAT_S", 0.02)
    monkeypatch.setattr(tickets, "SILENT_S", 0.3)
    monkeypatch.setattr(tickets, "limit", lambda: None)  # there are no ranks here
    writer = TicketWriter(3)
    readers = [TicketReader(rank, *writer.place) for rank in (1, 2)]

    def silent_within(seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while not (said := writer.silence()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return said

    writer.give(["step"])
    assert [reader.next() for reader in readers] == [["step"]] * 2
    assert not silent_within(0.5)
    thaw, stopped = threading.Event(), readers[1]
    send = stopped._connection.send
    stopped._connection.send = lambda head: (thaw.wait(30), send(head))[1]  # type: ignore[method-assign]
    begun = time.monotonic()
    assert "rank 2 has given no sign of life" in silent_within(5)
    assert time.monotonic() - begun < 2
    # a pause of this process itself is not a rank's
    writer._looked -= 10
    assert not writer.silence()
    assert silent_within(5)
    thaw.set()
    deadline = time.monotonic() + 5
    while writer.silence():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    closing = threading.Thread(target=writer.close)
    closing.start()
    assert [reader.next() for reader in readers] == [None] * 2
    closing.join(5)
    assert not silent_within(0.5)  # who has ended well is not missed
