"""A pipe to a child process that calls one function."""

from __future__ import annotations

import os
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import pytest

from weft.net.child_pipe import call_in_child, open_child, parent_pipe


def answer(pipe: int, file: int) -> None:
    """What the child calls: it sends what it reads from the inherited file, then each message turned round."""
    connection = parent_pipe(pipe)
    connection.send_bytes(os.read(file, 100))
    while message := connection.recv_bytes():
        connection.send_bytes(message[::-1])
    os._exit(3)


def test_the_child_has_what_it_inherits_and_its_end_ends_the_pipe() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"what a file has")
        file.flush()
        file.seek(0)

        def start(theirs: Connection) -> Any:
            return call_in_child(__name__, "answer", theirs, file.fileno())

        child = open_child(start)
        assert child.pipe.recv_bytes() == b"what a file has"
        child.pipe.send_bytes(b"abc")
        assert child.pipe.recv_bytes() == b"cba"
        assert child.process.poll() is None
        child.pipe.send_bytes(b"")
        with pytest.raises((EOFError, OSError)):
            child.pipe.recv_bytes()
        assert child.process.wait(10) == 3


def test_a_start_that_fails_leaves_no_pipe() -> None:
    ends = list[Connection]()

    def start(theirs: Connection) -> Any:
        ends.append(theirs)
        raise RuntimeError("no process")

    with pytest.raises(RuntimeError, match="no process"):
        open_child(start)
    assert ends[0].closed
