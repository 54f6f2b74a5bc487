"""The same server over Flower: its frames travel as Flower's messages, to clients behind whatever Flower passes.

Flower's own strategies are rounds; here a policy of Weft is driven by three calls of its grid (nodes, push, pull). A
message to a client is a question with one answer: ``query`` asks who it is, ``train`` brings work and gets an update.
What the server says of an update comes with the next work.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.federated.client_sessions import SessionEvent, SessionTraffic
from weft.federated.federation_frames import LONGEST_NAME
from weft.net.wire import Head

#: Seconds between two looks at the grid, within which a client must say who it is, and a message may stay unread.
LOOK_S, HELLO_S, MESSAGE_S = 0.05, 60.0, 86_400.0
#: Names of the record of a message, and of its two values.
RECORD, HEAD, PAYLOAD = "weft", "head", "payload"


class FlowerGrid(Protocol):
    """Interface of a Flower grid, as far as Weft's server uses it to reach clients."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of the nodes (Flower's clients) that are connected now."""

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        """Queue messages to clients, and return an id for each."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        """Return the answers to the messages with the ids ``message_ids`` that have arrived."""


def frame_message(head: Head, payload: bytes, node: int, kind: str) -> Any:
    """Return a Flower message that carries a frame (``head``, its JSON values, and ``payload``, its bytes) to the
    client with Flower's number ``node``. ``kind``: kind of Flower message, "query" or "train".
    """
    from flwr.app import ConfigRecord, Message, RecordDict

    record = ConfigRecord({HEAD: json.dumps(head), PAYLOAD: payload})
    return Message(RecordDict({RECORD: record}), node, kind, ttl=MESSAGE_S)


def reply_message(head: Head, payload: bytes, question: Any) -> Any:
    """Return a Flower message with a frame (``head`` and ``payload``) that answers the Flower message ``question``."""
    from flwr.app import ConfigRecord, Message, RecordDict

    record = ConfigRecord({HEAD: json.dumps(head), PAYLOAD: payload})
    return Message(RecordDict({RECORD: record}), reply_to=question)


def read_message(message: Any) -> tuple[Head, memoryview]:
    """Return head and payload of the frame in a Flower message. Raises :class:`ValueError` if it has none."""
    try:
        record = message.content[RECORD]
        head = json.loads(record[HEAD])
        payload = bytearray(record[PAYLOAD])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"a message of Flower without a frame of Weft: {error}"
        ) from None
    if not isinstance(head, dict):
        raise ValueError("a message of Flower whose head is no object")
    return head, memoryview(payload)


@dataclass(eq=False)
class FlowerSession:
    """Connection of the server to one client through Flower, in the place of a :class:`ClientSession`.

    Attributes:
        ``name``, ``key``, ``hello``, ``working``, ``over``: the same as in :class:`ClientSession`.
        ``node``: the client's node number in Flower.
    """

    name: str
    key: str
    hello: Head
    node: int
    push: Callable[[FlowerSession, Head, bytes], None]
    working: str = ""
    over: threading.Event = field(default_factory=threading.Event)
    said: list[Head] = field(default_factory=list)

    def send(self, head: Head, views: Sequence[memoryview] = ()) -> None:
        """Send a frame to the client. Work orders, refusals and the end of the run are sent at once.

        Other frames are kept, and sent with the next one of these.
        """
        if head.get("kind") in ("work", "end", "refused"):
            self.push(self, {**head, "said": self.said}, b"".join(views))
            self.said = []
        else:
            self.said.append(head)

    def close(self, patience: float = 0.0) -> None:
        """Send no further frames. ``patience`` has no effect, because Flower keeps the messages that were pushed."""
        self.over.set()


class FlowerSessions:
    """Connections of the server to the clients of a Flower ``grid``, in the place of :class:`ClientSessions`.

    ``most``: bytes of the largest update. ``check``: called with a client's hello; returns why the client cannot take
    part, or an empty text if it can.
    """

    def __init__(
        self, grid: FlowerGrid, most: int, check: Callable[[Head], str]
    ) -> None:
        self.grid, self.most, self.check = grid, most, check
        self.events: queue.Queue[SessionEvent] = queue.Queue()
        self.refused: queue.Queue[str] = queue.Queue()
        self.known: dict[str, str] = {}
        self.traffic = SessionTraffic()
        self._lock, self._closed = threading.Lock(), False
        self._asked: dict[int, float] = {}
        self._sessions: dict[int, FlowerSession] = {}
        self._waiting: dict[str, int] = {}
        self._thread = threading.Thread(
            target=self._live, name="weft-flower", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop looking for further clients, and end the thread that does so."""
        self._closed = True
        self._thread.join(10)

    def _push(self, session: FlowerSession, head: Head, payload: bytes) -> None:
        self._post(head, payload, session.node, "train")

    def _post(self, head: Head, payload: bytes, node: int, kind: str) -> None:
        with self._lock:
            (identity,) = self.grid.push_messages(
                [frame_message(head, payload, node, kind)]
            )
            self._waiting[identity] = node
            self.traffic.down += len(payload)

    def _live(self) -> None:
        while not self._closed:
            self._look()
            time.sleep(LOOK_S)

    def _look(self) -> None:
        """See who has come and gone, and take the answers that are there."""
        nodes, nothing = set(self.grid.get_node_ids()), memoryview(b"")
        now = time.monotonic()
        for node in nodes - self._sessions.keys():
            if now - self._asked.get(node, -HELLO_S) >= HELLO_S:
                self._asked[node] = now
                self._post({"kind": "hello"}, b"", node, "query")
        for node in self._sessions.keys() - nodes:
            session = self._sessions.pop(node)
            self._asked.pop(node, None)
            session.over.set()
            self.events.put(
                SessionEvent("gone", session, {}, nothing, "Flower has lost it")  # type: ignore[arg-type]
            )
        with self._lock:
            waiting = list(self._waiting)
        for message in self.grid.pull_messages(waiting) if waiting else ():
            with self._lock:
                node = self._waiting.pop(message.metadata.reply_to_message_id, -1)
            if node >= 0:
                self._take(node, message)

    def _take(self, node: int, message: Any) -> None:
        """Take an answer of a client: who it is, or an update."""
        nothing = memoryview(b"")
        session = self._sessions.get(node)
        if message.has_error():
            if session is not None:
                del self._sessions[node]
                self._asked[node] = time.monotonic()
                why = f"its app has failed: {message.error.reason}"
                self.events.put(SessionEvent("gone", session, {}, nothing, why))  # type: ignore[arg-type]
            return
        try:
            head, payload = read_message(message)
        except ValueError as error:
            self.refused.put(f"node {node} was not understood: {error}")
            return
        self.traffic.up += payload.nbytes
        if session is None:
            self._greet(node, head)
        elif head.get("kind") == "update" and payload.nbytes <= self.most:
            self.events.put(SessionEvent("frame", session, head, payload))  # type: ignore[arg-type]

    def _greet(self, node: int, hello: Head) -> None:
        name, key = str(hello.get("client"))[:LONGEST_NAME], str(hello.get("key"))
        why = self.check(hello)
        if not why and self.known.setdefault(name, key) != key:
            why = f"another client is called {name!r}"
        if why:
            self.refused.put(f"client {name!r} was turned away: {why}")
            return
        session = FlowerSession(name, key, hello, node, self._push)
        self._sessions[node] = session
        self.events.put(SessionEvent("joined", session, {}, memoryview(b"")))  # type: ignore[arg-type]
