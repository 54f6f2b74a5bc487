"""What connections between ranks have in common: addresses of both families, and an end that all hear of."""

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


def test_an_end_wakes_who_waits() -> None:
    ours, theirs = socket.socketpair()
    woken: list[Any] = []

    def wait() -> None:
        try:
            woken.append(ours.recv(1))
        except OSError as error:
            woken.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    sockets.end_connection(ours)
    waiting.join(10)
    assert woken and not waiting.is_alive()
    theirs.close()
