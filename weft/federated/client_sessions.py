"""The server's side of the connections with clients: who is there, what has come from them, and what goes to them.

Every connection has a thread that receives and a thread that sends, so that a client that is slow, silent or cut off
never keeps the server from others. What comes is checked as far as its form, and queued for the thread that drives the
policy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.federated.federation_frames import BEAT_S, LONGEST_NAME, SILENT_S
from weft.federated.server_invitation import CHANNEL
from weft.net.endpoint import Endpoint
from weft.net.wire import Head, SealedConnection, WireBroken

#: Of the system: the half of a connection that is shut when nothing more will be sent.
SENDING = 1
#: Seconds that each MiB of a frame may take, and that a client is given to read why it was refused.
STALL_S, DRAIN_S = 60.0, 2.0


@dataclass(eq=False)
class ClientSession:
    """Connection of the server to one client.

    Attributes:
        ``name``: the client's name.
        ``key``: secret text by which the server recognises the client after a new connection.
        ``hello``: the client's first message, about itself.
        ``working``: token of the work order that the client works on, empty if there is none.
        ``traffic``: counts the bytes of all connections.
        ``patience``: seconds that the client may take to read the last frame.
        ``over``: event that is set when the connection has ended.
    """

    name: str
    key: str
    hello: Head
    connection: SealedConnection
    working: str = ""
    traffic: SessionTraffic = field(default_factory=lambda: SessionTraffic())
    patience: float = DRAIN_S
    over: threading.Event = field(default_factory=threading.Event)
    _outbox: queue.Queue[tuple[Head, Sequence[memoryview]] | None] = field(
        default_factory=queue.Queue
    )

    def send(self, head: Head, views: Sequence[memoryview] = ()) -> None:
        """Queue a frame for the client, and return at once. ``head``: its JSON values. ``views``: its payload."""
        self._outbox.put((head, views))

    def close(self, patience: float = DRAIN_S) -> None:
        """End the connection after the queued frames. ``patience``: seconds that the client may take to read them."""
        self.patience = patience
        self._outbox.put(None)

    def post(self) -> None:
        """Send queued frames and heartbeats until the connection ends. It is the main function of a thread."""
        with suppress(OSError):
            while True:
                try:
                    letter = self._outbox.get(timeout=BEAT_S)
                except queue.Empty:
                    letter = {"kind": "beat"}, ()
                if letter is None:
                    # so that what was sent last is read; the thread that receives sees when the client has gone
                    self.connection.socket.shutdown(SENDING)
                    self.over.wait(self.patience)
                    break
                head, views = letter
                self.traffic.down += self.connection.send(head, views)
        self.connection.close()
        self.over.set()


@dataclass
class SessionTraffic:
    """Bytes sent to clients (``down``) and received from them (``up``), over all connections so far."""

    down: int = 0
    up: int = 0


class SessionEvent(NamedTuple):
    """Event of a connection: a client has joined, has sent a frame, or is gone.

    ``kind``: "joined", "frame" or "gone". ``head`` and ``payload``: the content of the frame. ``why``: why the client
    is gone.
    """

    kind: Literal["joined", "frame", "gone"]
    session: ClientSession
    head: Head
    payload: memoryview
    why: str = ""


class ClientSessions:
    """Accepts clients at ``endpoint``, and queues their messages in ``events``.

    ``secret``: text that a client must know to connect. ``most``: bytes of the largest frame that a client may send.
    ``offer``: answer to a client that asks for the run's recipe: a head (JSON values) and bytes. ``check``: called with
    a client's hello; returns why the client cannot take part, or an empty text if it can.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        secret: str,
        most: int,
        offer: tuple[Head, bytes],
        check: Callable[[Head], str],
    ) -> None:
        self.endpoint, self.most, self.offer, self.check = endpoint, most, offer, check
        self.events: queue.Queue[SessionEvent] = queue.Queue()
        self.refused: queue.Queue[str] = queue.Queue()
        self.traffic = SessionTraffic()
        self._lock = threading.Lock()
        self.known: dict[str, str] = {}
        endpoint.refused = lambda host, why: self.refused.put(
            f"somebody at {host} who is not invited was turned away: {why}"
        )
        self._channel = endpoint.open(CHANNEL, secret, self._serve)

    def close(self) -> None:
        """Accept no further clients. Existing connections go on until they are closed."""
        self._channel.shut()

    def _serve(self, connection: SealedConnection) -> None:
        """Receive what a client sends, until the connection ends. Runs in a thread of its own."""
        hello = connection.hello
        if hello.get("asks") == "recipe":
            head, files = self.offer
            with suppress(OSError):
                connection.send(head, [memoryview(files)])
                connection.drain(DRAIN_S)
            return connection.close()
        name, why = hello.get("client"), self._why_not(hello)
        if why:
            self.refused.put(
                f"client {str(name)[:LONGEST_NAME]!r} was turned away: {why}"
            )
            with suppress(OSError):
                connection.send({"kind": "refused", "why": why})
                connection.drain(DRAIN_S)
            return connection.close()
        session = ClientSession(
            str(name), str(hello["key"]), hello, connection, str(hello.get("working", "")), self.traffic
        )  # fmt: skip
        session.send({"kind": "welcome"})
        sender = threading.Thread(
            target=session.post, name="weft-client-post", daemon=True
        )
        sender.start()
        nothing = memoryview(b"")
        self.events.put(SessionEvent("joined", session, {}, nothing))
        try:
            while True:
                frame = connection.receive(self._room, SILENT_S)
                self.traffic.up += frame.payload.nbytes
                kind = frame.head.get("kind")
                if kind == "bye":
                    raise WireBroken("it has left")
                if kind != "beat":
                    self.events.put(
                        SessionEvent("frame", session, frame.head, frame.payload)
                    )
        except TimeoutError:
            why = f"nothing has come from it for {SILENT_S:g} s"
        except OSError as error:
            why = str(error)
        session.over.set()
        session.close()
        self.events.put(SessionEvent("gone", session, {}, nothing, why))

    def _why_not(self, hello: Head) -> str:
        """Return why whoever says ``hello`` cannot take part; empty if it can."""
        name, key = hello.get("client"), hello.get("key")
        if (
            not isinstance(name, str)
            or not 0 < len(name) <= LONGEST_NAME
            or not name.isprintable()
        ):
            return f"its name is not a text of 1 to {LONGEST_NAME} characters"
        if not isinstance(key, str) or len(key) != 32:
            return "it has no key; is it of another version of Weft?"
        if why := self.check(hello):
            return why
        with self._lock:
            if self.known.setdefault(name, key) != key:
                return (
                    f"another client is called {name!r}; give --name, or the folder (--out) of the client that "
                    "comes back"
                )
        return ""

    def _room(self, head: Head, size: int) -> memoryview:
        if size > self.most:
            raise WireBroken(
                f"it sends {size:,} bytes, and this run's largest update has {self.most:,}"
            )
        return memoryview(bytearray(size))
