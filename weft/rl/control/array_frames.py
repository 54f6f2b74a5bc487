"""Messages between a process and its children: a JSON head and arrays, whose bytes follow it as they are."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from math import prod
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np

#: Types that an array of a message may have.
TYPES = {"float64", "float32", "int64", "int32", "uint8", "bool"}


class ArrayFrame(NamedTuple):
    """Message between processes: ``head``, a dictionary of plain values, and ``arrays`` by name."""

    head: dict[str, Any]
    arrays: dict[str, np.ndarray]


class FramePipe:
    """One end of a pipe between a process and its child, which carries plain values and arrays. It unpickles nothing.

    ``connection``: the end itself, or the number of an inherited file descriptor.
    """

    def __init__(self, connection: Connection | int) -> None:
        self._connection = (
            Connection(connection) if isinstance(connection, int) else connection
        )

    def fileno(self) -> int:
        """Return the number of this end's file descriptor, so that the end can be passed to ``select``."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end of the pipe; the process at the other end then reads the end of the pipe."""
        self._connection.close()

    def poll(self, seconds: float = 0.0) -> bool:
        """Wait up to ``seconds`` seconds for a message, and return whether one, or the end of the pipe, has arrived."""
        return self._connection.poll(seconds)

    def send(
        self, head: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Send a message: the plain values ``head``, and ``arrays`` by name, whose types are among :data:`TYPES`.

        Raises :class:`OSError` if the other end is closed.
        """
        arrays = arrays or {}
        table = [[name, str(a.dtype), list(a.shape)] for name, a in arrays.items()]
        text = json.dumps([head, table]).encode()
        parts = [len(text).to_bytes(4, "little"), text]
        parts += [np.ascontiguousarray(a).tobytes() for a in arrays.values()]
        self._connection.send_bytes(b"".join(parts))

    def receive(self) -> ArrayFrame:
        """Wait for a message and return it.

        Raises :class:`EOFError` if the other end is closed, and :class:`ValueError` if the message is damaged.
        """
        data = self._connection.recv_bytes()
        at = 4 + int.from_bytes(data[:4], "little")
        head, table = json.loads(data[4:at])
        arrays = {}
        for name, dtype, shape in table:
            if dtype not in TYPES:
                raise ValueError(f"an array of a message has the type {dtype!r}")
            count = prod(shape)
            arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
            at += arrays[name].nbytes
        if at != len(data):
            raise ValueError(f"a message has {len(data)} bytes, and its head says {at}")
        return ArrayFrame(head, arrays)


def pipe_ends() -> tuple[FramePipe, FramePipe]:
    """Return both ends of a new pipe, one for this process and one for its child."""
    a, b = Pipe()
    return FramePipe(a), FramePipe(b)


def readable_pipes(pipes: Collection[FramePipe], seconds: float) -> list[FramePipe]:
    """Wait up to ``seconds`` seconds until a pipe has something to read, and return all pipes that have."""
    ready = set(wait([pipe.fileno() for pipe in pipes], seconds))
    return [pipe for pipe in pipes if pipe.fileno() in ready]
