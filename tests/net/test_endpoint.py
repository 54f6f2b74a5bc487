"""Endpoints: many channels behind one listener, strangers that keep nobody waiting, both families of addresses."""

from __future__ import annotations

import builtins
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.measured import eventually
from weft.errors import UsageError
from weft.net import endpoint as module
from weft.net.endpoint import Endpoint, process_endpoint
from weft.net.wire import SealedConnection, WireBroken


@pytest.fixture
def endpoints() -> Iterator[list[Endpoint]]:
    found: list[Endpoint] = []
    yield found
    for endpoint in found:
        endpoint.close()


def echo(connection: SealedConnection) -> None:
    """Say everything back, with the name of who has dialled."""
    try:
        while True:
            frame = connection.receive()
            connection.send(frame.head | connection.hello, [frame.payload])
    except OSError:
        connection.close()


def ask(connection: SealedConnection, **head: Any) -> dict[str, Any]:
    connection.send(head)
    return connection.receive(limit=20).head


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("encrypt", ["auto", "always"])
def test_channels_share_a_listener_and_nothing_else(
    endpoints: list[Endpoint], host: str, encrypt: Any
) -> None:
    if encrypt == "always":
        pytest.importorskip("cryptography")
    try:
        endpoints += [Endpoint(host, 0, encrypt) for _ in range(2)]
    except UsageError:
        pytest.skip("no IPv6 here")
    first, second = endpoints
    for name in ("copies", "streams"):
        first.open(name, f"secret of {name}", echo)
    copies = second.open("copies", "secret of copies", echo)
    streams = second.open("other", "secret of streams", echo)
    one = copies.dial(first.address, {"rank": 1}, 20)
    two = streams.dial(first.address, {"rank": 2}, 20, name="streams")
    assert ask(one, a=1) == {"a": 1, "rank": 1}
    assert ask(two, a=2) == {"a": 2, "rank": 2}
    with pytest.raises(WireBroken):  # the secret of another channel
        copies.dial(first.address, {}, 20, name="streams")
    with pytest.raises(WireBroken):
        copies.dial(first.address, {}, 20, name="nobody's")
    with pytest.raises(ValueError, match="open already"):
        first.open("copies", "", echo)
    copies.close()
    with pytest.raises(OSError):
        ask(one, a=3)
    with pytest.raises(WireBroken, match="channel copies is closed"):
        copies.dial(first.address, {}, 20)
    assert ask(two, a=4)["a"] == 4
    first.close()
    with pytest.raises(OSError):
        ask(two, a=5)
    with pytest.raises(ConnectionRefusedError):
        streams.dial(first.address, {}, 20)


def test_strangers_keep_nobody_waiting_and_are_put_out(
    endpoints: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than may try at a time, silent, loud, or drop by drop; members come in meanwhile."""
    monkeypatch.setattr(module, "HELLO_S", 0.5)
    monkeypatch.setattr(module, "STRANGERS", 20)
    endpoints += [Endpoint("127.0.0.1"), Endpoint("127.0.0.1")]
    first, second = endpoints
    heard: list[Any] = []
    first.open("copies", "secret", lambda connection: heard.append(connection))
    dials, rng = second.open("copies", "secret", echo), random.Random(1)
    strangers = [socket.create_connection(first.address) for _ in range(40)]
    for number, stranger in enumerate(strangers):
        said = [
            b"",
            b"GET / HTTP/1.1\r\n\r\n" * 9,
            rng.randbytes(30),
            rng.randbytes(99),
        ]
        with_suppressed(stranger, said[number % 4])
    begun = time.monotonic()
    member = dials.dial(first.address, {}, 20)
    assert time.monotonic() - begun < 10
    dripping = socket.create_connection(first.address)
    for _ in range(80):
        with_suppressed(dripping, b"x")
        time.sleep(0.01)
    for stranger in [*strangers, dripping]:
        stranger.settimeout(20)
        try:
            while stranger.recv(100):
                pass
        except ConnectionResetError:
            pass
        stranger.close()
    assert len(heard) == 1 and not first._strangers
    member.close()


def with_suppressed(sock: socket.socket, data: bytes) -> None:
    with suppress(OSError):
        sock.sendall(data)


def test_a_frozen_listener_is_given_up() -> None:
    """The system takes the connection; nobody speaks."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = Endpoint("127.0.0.1")
        channel = endpoint.open("copies", "secret", echo)
        begun = time.monotonic()
        with pytest.raises(OSError, match=r"nothing has come for 0\.\d+ s"):
            channel.dial(silent.getsockname(), {}, 0.3)
        threading.Timer(0.2, channel.close).start()
        with pytest.raises(OSError):
            channel.dial(silent.getsockname(), {}, 60)
        assert time.monotonic() - begun < 30
        endpoint.close()


def test_a_listener_without_the_secret_learns_nothing() -> None:
    """Who only pretends to be the endpoint gets a hello, and no message."""
    endpoint, heard = Endpoint("127.0.0.1"), bytearray()
    channel = endpoint.open("copies", "secret", echo)
    with socket.create_server(("127.0.0.1", 0)) as false:

        def pretend() -> None:
            connection, _ = false.accept()
            connection.sendall(bytes(32))
            heard.extend(connection.recv(4096))
            connection.sendall(bytes(16))
            heard.extend(connection.recv(4096))
            connection.close()

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(WireBroken, match="does not know the channel's secret"):
            channel.dial(false.getsockname(), {"rank": 1}, 20)
        thread.join()
    assert b"secret" not in heard and heard.count(b"rank") == 1
    endpoint.close()


def test_what_must_be_encrypted_is_not_taken_in_plain(
    endpoints: list[Endpoint],
) -> None:
    pytest.importorskip("cryptography")
    endpoints += [Endpoint("127.0.0.1", 0, how) for how in ("always", "never")]
    first, second = endpoints
    channels = [one.open("copies", "secret", echo) for one in endpoints]
    with pytest.raises(WireBroken):
        channels[1].dial(first.address, {}, 20)
    # who need not encrypt can, if the other end does
    assert ask(channels[0].dial(second.address, {}, 20), a=1) == {"a": 1}


def test_without_its_package_encryption_is_refused_in_a_line(
    endpoints: list[Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("cryptography"):
            raise ImportError(name)
        return imports(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'weft\[secure\]'"):
        Endpoint("127.0.0.1", 0, "always")
    endpoints.append(Endpoint("127.0.0.1"))  # needs none
    channel = endpoints[0].open("copies", "secret", echo)
    with pytest.raises(UsageError, match="needs the package cryptography"):
        channel.dial(("8.8.8.8", 9), {}, 1)


def test_a_port_that_is_taken_is_refused_in_a_line(endpoints: list[Endpoint]) -> None:
    endpoints.append(Endpoint("127.0.0.1"))
    port = endpoints[0].address[1]
    with pytest.raises(UsageError, match=rf"cannot listen at 127.0.0.1 port {port}: "):
        Endpoint("127.0.0.1", port)


def test_a_process_has_one_endpoint() -> None:
    first = process_endpoint("127.0.0.1")
    assert process_endpoint() is first
    first.close()
    second = process_endpoint("127.0.0.1")
    assert second is not first
    second.close()


FORK = """
import os, socket, time
from weft.net.endpoint import Endpoint, process_endpoint
endpoint = process_endpoint("127.0.0.1")
opened = []
channel = endpoint.open("x", "secret", opened.append)
other = Endpoint("127.0.0.1")
mine = other.open("x", "secret", print).dial(endpoint.address, {}, 20)
while not opened: time.sleep(0.01)
read, write = os.pipe()
begun, begins = os.pipe()
if not (child := os.fork()):
    fresh = process_endpoint("127.0.0.1")
    assert fresh is not endpoint and fresh.address != endpoint.address
    os.write(begins, b"!")
    os.read(read, 1)
    os._exit(0)
os.read(begun, 1)
endpoint.close()
try:
    print("ended" if mine.poll(20) and not mine.socket.recv(1) else "open")
except ConnectionResetError:
    print("ended")
try:
    socket.create_connection(endpoint.address)
    print("listens")
except ConnectionRefusedError:
    print("refused")
os.write(write, b"!")
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_holds_nothing_open() -> None:
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True
    )
    assert said.stdout.split() == ["ended", "refused"], said.stderr


def test_connections_that_are_over_leave_no_thread(endpoints: list[Endpoint]) -> None:
    endpoints += [Endpoint("127.0.0.1"), Endpoint("127.0.0.1")]
    first, second = endpoints
    first.open("echo", "secret", echo)
    channel = second.open("echo", "secret", echo)
    for _ in range(20):
        connection = channel.dial(first.address, {}, 20)
        assert ask(connection, a=1) == {"a": 1}
        connection.close()
    del connection
    eventually(
        lambda: not [t for t in threading.enumerate() if t.name == "weft-echo"], 20
    )
