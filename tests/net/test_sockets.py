"""What connections between ranks have in common: addresses of both families, and reads of just so many bytes."""

from __future__ import annotations

import socket
import threading
from typing import Any
from unittest import mock

import pytest

from weft.net import sockets


@pytest.mark.parametrize(
    ("known", "address"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        # as of localhost: what listens there is reached by every rank
        (["::1", "127.0.0.1"], "127.0.0.1"),
        (["not reachable", "127.0.0.1"], "127.0.0.1"),
        (["not reachable"], "127.0.0.1"),
        ([], "127.0.0.1"),
    ],
)
def test_own_address_is_of_ipv4_where_there_is_one(
    known: list[str], address: str
) -> None:
    found = [
        (sockets.family_of(host), socket.SOCK_DGRAM, 0, "", (host, 9)) for host in known
    ]
    with mock.patch.object(socket, "getaddrinfo", return_value=found):
        assert sockets.own_address("peer") == address


def test_own_address_of_ipv6_alone() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    assert sockets.own_address("::1") == "::1"


def test_no_address_of_an_unknown_host_but_ones_own() -> None:
    with mock.patch.object(socket, "getaddrinfo", side_effect=socket.gaierror):
        assert sockets.own_address("nobody.invalid") == "127.0.0.1"


def test_reads_are_of_just_so_many_bytes() -> None:
    ours, theirs = socket.socketpair()
    # with a limit the system may return a part of what is asked for
    ours.settimeout(10)

    def send() -> None:
        for piece in (b"ab", b"cde", b"f"):
            theirs.sendall(piece)
        theirs.close()

    threading.Thread(target=send).start()
    assert sockets.read(ours, 5) == b"abcde" and sockets.read(ours, 0) == b""
    with pytest.raises(ValueError, match="9"):
        sockets.read(ours, 9, most=8)
    with pytest.raises(EOFError):
        sockets.read(ours, 2)
    sockets.end(ours)


def test_an_end_wakes_who_waits() -> None:
    ours, theirs = socket.socketpair()
    woken: list[Any] = []

    def wait() -> None:
        try:
            sockets.read(ours, 1)
        except (EOFError, OSError) as error:
            woken.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    sockets.end(ours)
    waiting.join(10)
    assert woken and not waiting.is_alive()
    theirs.close()
