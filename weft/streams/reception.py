"""Receives the samples of simulators, each over a connection of its own, and gives them to a store.

What a simulator and the training say to each other, as JSON heads: the training begins with ``columns``, ``next`` (the
first index that it has not got) and ``again`` (ranges of earlier ones that it has lost). The simulator sends
``sample``, an index with the row as payload, and at last ``end``. The training answers each sample with ``taken``, so
that few are on their way, and says ``wait`` while there is no room, ``over`` when it takes no more, and ``refused``
with a reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from weft.net.endpoint import Endpoint
from weft.net.wire import Head, SealedConnection
from weft.streams.array_columns import ROW_TYPE, ArrayColumns
from weft.streams.index_ranges import as_ranges
from weft.streams.sample_store import LOOK_S, SampleName, SampleStore

#: The channel's name, and the longest name of a simulator.
CHANNEL, LONGEST_NAME = "stream", 200
#: Seconds between two signs of life to a simulator that waits for room, and for a last word to be read.
BEAT_S, END_S = 5.0, 3.0


class _SampleRefused(Exception):
    """A simulator has sent what the training cannot read. The message says what."""


class Reception:
    """Opens the stream of ``store`` at ``endpoint``, so that simulators that know ``secret`` can send samples.

    ``columns``: arrays of a sample. ``say``: called with lines to print, in any thread.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        secret: str,
        columns: ArrayColumns,
        store: SampleStore,
        say: Callable[[str], None],
    ) -> None:
        self.columns, self.store, self.say = columns, store, say
        self._lock = threading.Lock()
        #: The present connection of each simulator, by its name.
        self.connections: dict[str, SealedConnection] = {}
        self._channel = endpoint.open(CHANNEL, secret, self._serve)

    def close(self) -> None:
        """Tell all simulators that no further samples are accepted, and end their connections."""
        self._channel.shut()
        self.store.close()
        deadline = time.monotonic() + END_S
        while self.connections and time.monotonic() < deadline:
            time.sleep(0.02)
        self._channel.close()

    # In a thread for each connection, the only one that sends there.

    def _serve(self, connection: SealedConnection) -> None:
        name = connection.hello.get("producer")
        if (
            not isinstance(name, str)
            or not 0 < len(name) <= LONGEST_NAME
            or not name.isprintable()
        ):
            self._refuse(connection, "it does not say its name, or one that cannot be printed")  # fmt: skip
            return
        with self._lock:
            self.connections[name] = connection
        try:
            self._take_all(name, connection)
        except _SampleRefused as error:
            self.say(f"simulator {name} is refused: {error}")
            self.store.end(name, refused=str(error))
            self._refuse(connection, str(error))
        except OSError as error:
            if not self.store.closed and self._is_present(name, connection):
                due = self.store.producer(name).next
                self.say(f"simulator {name} is gone before its end, after {due} samples: {error}")  # fmt: skip
        finally:
            connection.close()
            with self._lock:
                if self.connections.get(name) is connection:
                    del self.connections[name]

    def _is_present(self, name: str, connection: SealedConnection) -> bool:
        with self._lock:
            return self.connections.get(name) is connection

    def _is_over(self, name: str, connection: SealedConnection) -> bool:
        """Return whether nothing more is taken over this connection; say so to the simulator if it is."""
        if self.store.closed:
            self._part(connection, {"over": True})
        elif not self._is_present(
            name, connection
        ):  # the same one, whose first connection has not ended yet
            self._refuse(
                connection, f"another simulator with the name {name} has joined"
            )
        else:
            return False
        return True

    def _refuse(self, connection: SealedConnection, why: str) -> None:
        self._part(connection, {"refused": why})

    @staticmethod
    def _part(connection: SealedConnection, last: Head) -> None:
        """Say a ``last`` word and end the connection."""
        with suppress(OSError):
            connection.send(last)
            connection.drain(END_S)
        connection.close()

    def _take_all(self, name: str, connection: SealedConnection) -> None:
        with self.store.changed:
            state = self.store.producer(name)
            state.ended, state.refused = False, ""
            due, again = state.next, as_ranges(state.again)
        connection.send({"columns": self.columns.table, "next": due, "again": again})
        room = memoryview(bytearray(self.columns.width * ROW_TYPE.itemsize))

        def place(head: Head, size: int) -> memoryview:
            if size not in (0, len(room)):
                raise _SampleRefused(
                    f"a sample of {size:,} bytes, and the training reads {len(room):,}"
                )
            return room[:size]

        while True:
            while not connection.poll(LOOK_S):
                if self._is_over(name, connection):
                    return
            head, payload = connection.receive(place)
            if head.get("end") is True:
                self._note_end(name)
                connection.send({"taken": state.next})
                connection.drain(END_S)
                return
            index = head.get("sample")
            if type(index) is not int or len(payload) != len(room):
                raise _SampleRefused(f"neither a sample nor the end: {str(head)[:200]}")
            sample = SampleName(name, index)
            if not self._take(sample, self._row(index, payload), connection):
                return
            connection.send({"taken": index})

    def _row(self, index: int, payload: memoryview) -> np.ndarray:
        row = np.frombuffer(payload, ROW_TYPE).copy()
        if not np.isfinite(row).all():
            arrays = self.columns.unpack(row[None])
            bad = next(n for n, a in arrays.items() if not np.isfinite(a).all())
            raise _SampleRefused(
                f"sample {index} has values in {bad!r} that are not finite"
            )
        return row

    def _take(
        self, sample: SampleName, row: np.ndarray, connection: SealedConnection
    ) -> bool:
        """Put a sample into the store as soon as there is room; return False if nothing more is taken."""
        said = time.monotonic()
        try:
            while not self.store.put(sample, row):
                if self._is_over(sample.producer, connection):
                    return False
                if time.monotonic() - said >= BEAT_S:
                    connection.send({"wait": True})
                    said = time.monotonic()
        except ValueError as error:
            raise _SampleRefused(str(error)) from None
        return True

    def _note_end(self, name: str) -> None:
        state = self.store.producer(name)
        if state.again:
            missing = as_ranges(state.again)
            self.say(
                f"simulator {name} has ended without {len(state.again)} samples that were to be sent again, the first "
                f"one sample {missing[0][0]}: they are lost undrawn"
            )
            state.again.clear()
        self.store.end(name)
