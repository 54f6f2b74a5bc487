"""Messages of peers: what is malformed or too long is an error of one line, whatever it is."""

from __future__ import annotations

import asyncio
import struct

import pytest

from weft.peers.transport import PeerError, receive


class Given:
    """A stream that gives these bytes and ends."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def read(self, size: int) -> bytes:
        piece, self.data = self.data[:size], self.data[size:]
        return piece


@pytest.mark.parametrize(
    "head",
    [b"{", b"[]", b"{}", b"\xff", b'{"size": "x"}', b'{"size": NaN}', b'{"size": Infinity}', b'{"size": -1}',
     b'{"size": 9}', b"[" * 100_000],
)  # fmt: skip
def test_what_is_malformed_is_said(head: bytes) -> None:
    with pytest.raises(PeerError, match=r"malformed|too long"):
        asyncio.run(receive(Given(struct.pack("!I", len(head)) + head), body=8))


def test_a_message_comes_as_it_was_sent_and_one_that_breaks_off_is_an_error() -> None:
    head = b'{"size": 3, "what": 1}'
    data = struct.pack("!I", len(head)) + head + b"abc"
    assert asyncio.run(receive(Given(data), body=8)) == ({"size": 3, "what": 1}, b"abc")
    with pytest.raises(PeerError, match="broken off"):
        asyncio.run(receive(Given(data[:-1]), body=8))
