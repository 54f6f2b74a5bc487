"""Limits connections that clients open and do not use: each has a time limit, and their number is limited.

Uvicorn reads requests with h11, which leaves open how long a head or a body may take, and takes some heads that proxies
read otherwise. A head that two programs read differently lets a client smuggle a second request past a proxy; it is
refused, and its connection ends.
"""

import asyncio
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.serve.anthropic import error_for
from weft.serve.protocol import Refusal

#: Bytes of a request's head at most.
LARGEST_HEAD = 2**16

#: Seconds within which the head of a request must have come, also the first one of a connection.
HEAD_S = 10

#: Of a body that is under way, so many bytes must come in so many seconds.
BODY_LEAST, BODY_S = 4096, 10

#: Seconds in which a client that has its answer may go on sending what nobody reads any more.
REST_S = 5

#: Seconds in which a client that is sent an answer must read something of it.
WRITE_S = 60

#: Which connections make way first where there are too many; others are being answered. A head that is younger than
#: this many seconds may be about to be read.
IDLE_FIRST = ("end", "rest", "head", "idle", "fresh", "body")
FRESH_S = 1


#: The end of a request's first line.
VERSION = re.compile(rb" HTTP/([0-9]\.[0-9])$")


class StrictBuffer(ReceiveBuffer):
    """Receive buffer of an HTTP connection that refuses message heads which a proxy could parse differently.

    Such heads would allow request smuggling.
    """

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines of a message head up to the first empty line, or None if that line has not arrived. Raises
        h11's error for a head that :func:`check_head` refuses.
        """
        before = len(self)
        lines = super().maybe_extract_lines()
        if lines:
            check_head(lines, before - len(self))
        return lines


def check_head(lines: list[bytearray], size: int) -> None:
    """Raise h11's error if a proxy could parse a message head differently, or if the head is too large. ``lines``: the
    lines of the head. ``size``: its bytes.
    """
    if size > LARGEST_HEAD:
        raise h11.LocalProtocolError(
            f"the head has more than {LARGEST_HEAD} bytes", error_status_hint=431
        )
    if size != sum(len(line) + 2 for line in lines) + 2:
        raise h11.LocalProtocolError(
            "a line of the head ends without a carriage return"
        )
    if any(line[:1] in (b" ", b"\t") for line in lines):
        raise h11.LocalProtocolError("a header is folded over two lines")
    version = VERSION.search(lines[0])
    if version and version[1] not in (b"1.0", b"1.1"):
        raise h11.LocalProtocolError(
            "this server speaks HTTP/1.1", error_status_hint=505
        )
    names = [bytes(line.partition(b":")[0]).strip().lower() for line in lines]
    lengths = [
        line.partition(b":")[2]
        for line, name in zip(lines, names, strict=True)
        if name == b"content-length"
    ]
    if len(lengths) > 1 or any(b"," in length for length in lengths):
        raise h11.LocalProtocolError("content-length is given twice")
    if b"transfer-encoding" in names and (lengths or lines[0].endswith(b"HTTP/1.0")):
        raise h11.LocalProtocolError(
            "transfer-encoding cannot stand beside content-length, nor in HTTP/1.0"
        )


class GuardedProtocol(H11Protocol):
    """A connection of uvicorn's server with time limits for everything that it waits for. ``most``: largest number of
    such connections at the same time. ``given``, ``more``: arguments of uvicorn's own class. The attribute ``waits``
    says what the connection waits for, with a time limit for each: ``head`` or ``body`` of a request; ``rest``: the
    rest of a body whose request has already been answered; ``end``: the client's closing of the connection after a
    refusal; ``idle``: a further request. While a request is being answered, ``waits`` is "".
    """

    def __init__(self, *given: Any, most: int, **more: Any) -> None:
        super().__init__(*given, **more)
        self.conn._receive_buffer = StrictBuffer()
        self.most = most
        self.waits, self.since, self.received = "", 0.0, 0
        self.limit: asyncio.TimerHandle | None = None
        self.stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._make_room():
            self.refuse(
                503,
                f"{self.most} connections are open, and all are being answered; try again later",
            )
            return
        self._wait_for("head")

    def data_received(self, data: bytes) -> None:
        if self.waits == "end" or self.transport.is_closing():
            return
        self.received += len(data)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for("")
        self.resume_writing()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        if self.waits in ("head", "end"):
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled = self.loop.call_later(WRITE_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stalled is not None:
            self.stalled.cancel()
            self.stalled = None

    def shutdown(self) -> None:
        if self.waits in ("head", "rest", "end", "idle"):
            self.transport.close()
        elif self.cycle is not None:
            self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that h11 cannot parse, with status 400. uvicorn calls this while it handles h11's error.
        ``msg``: uvicorn's own message.
        """
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        self.refuse(
            status,
            f"this is no HTTP request as it should be: {str(error or msg)[:200]}",
        )

    def _should_upgrade(self) -> bool:
        return False

    def refuse(self, status: int, message: str) -> None:
        """End the connection, whose request is incomplete. The client gets the HTTP ``status`` and the error
        ``message``, unless a part of an answer has been sent already.
        """
        cycle, conn = self.cycle, self.conn
        answering = cycle is not None and not cycle.response_complete
        begun = answering and cycle.response_started
        if conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not begun:
            # of the request that is under way, or of the last one on this connection
            body = json.dumps(error_for(self.scope, Refusal(status, message))).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
            ]
            headers += [("connection", "close")] + (
                [("retry-after", "1")] if status == 503 else []
            )
            answer = [
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ]
            self.transport.write(b"".join(conn.send(event) or b"" for event in answer))
        if answering:
            cycle.disconnected = True
            cycle.message_event.set()
        if begun:
            self.transport.close()
            return
        # closing at once would reset the connection before the client has read the answer
        self._wait_for("end")
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _look(self) -> None:
        """Set the time limit for what the connection waits for now."""
        theirs, ours = self.conn.their_state, self.conn.our_state
        if self.waits == "end" or self.transport.is_closing():
            return
        if theirs is h11.IDLE:
            self._wait_for("head" if self.conn.trailing_data[0] else "idle")
        elif theirs is h11.SEND_BODY:
            self._wait_for(
                "body" if ours in (h11.SEND_RESPONSE, h11.SEND_BODY) else "rest"
            )
        else:
            self._wait_for("")

    def _wait_for(self, what: str) -> None:
        if what == self.waits:
            return
        if self.limit is not None:
            self.limit.cancel()
            self.limit = None
        self.waits, self.since, self.received = what, self.loop.time(), 0
        seconds = {"head": HEAD_S, "body": BODY_S, "rest": REST_S, "end": REST_S}
        if what in seconds:
            self.limit = self.loop.call_later(seconds[what], self._out_of_time)

    def _out_of_time(self) -> None:
        waited, self.limit = self.waits, None
        if waited == "body" and (self.received >= BODY_LEAST or self.flow.read_paused):
            self.waits = ""
            self._wait_for("body")
        elif waited in ("rest", "end") or (
            waited == "head" and not self.conn.trailing_data[0]
        ):
            self.transport.close()
        else:
            self.refuse(408, f"the {waited} of the request was not whole in time")

    def _use(self) -> tuple[int, float]:
        """Return the sort key of connections to end: by what they wait for, then by how long they have waited."""
        fresh = self.waits == "head" and self.loop.time() - self.since < FRESH_S
        return IDLE_FIRST.index("fresh" if fresh else self.waits), self.since

    def _make_room(self) -> bool:
        """End the connection that has waited longest for its client; returns whether there was one."""
        others = [
            other
            for other in self.connections
            if other is not self and isinstance(other, GuardedProtocol) and other.waits
        ]
        if not others:
            return False
        idlest = min(others, key=GuardedProtocol._use)
        if idlest.waits == "body":
            idlest.refuse(
                503, f"more than {self.most} connections are open; try again later"
            )
        else:
            idlest.transport.abort()
        return True


def guarded(most: int) -> Callable[..., GuardedProtocol]:
    """Return a function that makes the connections of a server, of which at most ``most`` are open at a time."""

    def protocol(*given: Any, **more: Any) -> GuardedProtocol:
        return GuardedProtocol(*given, most=most, **more)

    return protocol
