"""Connections of clients that send garbage, half a request or none: others are answered, and nothing is logged."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.running import Running, until
from weft.data.tokenizer import load_tokenizer

JSON = "Host: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a", "max_tokens": 2, "temperature": 0}'


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing is logged that is an error, and no task of the event loop fails."""
    with caplog.at_level(logging.WARNING):
        yield
    assert not caplog.records, [record.getMessage() for record in caplog.records]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = Running(load_tokenizer("bytes"))
    yield running
    until(running.empty)
    running.close()


def answers(server: Running, sent: bytes, wait: float = 10) -> list[tuple[int, bytes]]:
    """Status and body of every answer to ``sent``, until the server ends the connection."""
    with socket.create_connection(server.address, wait) as client:
        client.sendall(sent)
        client.settimeout(wait)
        came = b""
        while piece := client.recv(65536):
            came += piece
    split = re.split(rb"HTTP/1\.1 (\d+)[^\r]*\r\n", came)
    return [
        (int(code), rest.partition(b"\r\n\r\n")[2])
        for code, rest in zip(split[1::2], split[2::2], strict=True)
    ]


def post(*headers: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    head = "".join(f"{line}\r\n" for line in headers)
    return f"POST /v1/completions HTTP/{version}\r\n{JSON}{head}\r\n".encode() + body


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = f"Content-Length: {len(BODY)}"
SMUGGLED = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


HEADS = [
    (post(LENGTH, "Transfer-Encoding: chunked", body=CHUNKED + SMUGGLED), 400),
    (post("Transfer-Encoding: chunked", LENGTH, body=BODY + SMUGGLED), 400),
    (post(LENGTH, LENGTH, body=BODY + SMUGGLED), 400),
    (post(LENGTH, "Content-Length: 0", body=BODY + SMUGGLED), 400),
    (post(f"{LENGTH}, {len(BODY)}", body=BODY + SMUGGLED), 400),
    (post("Content-Length: +5"), 400), (post("Content-Length: 0x5"), 400), (post("Content-Length: -1"), 400),
    (post("Content-Length : 5"), 400),
    (post("Transfer-Encoding: chunked", body=CHUNKED + SMUGGLED, version="1.0"), 400),
    (post("Transfer-Encoding: gzip, chunked", body=CHUNKED), 501),
    (post("Transfer-Encoding: chunked", "Transfer-Encoding: identity", body=CHUNKED), 501),
    (post("X: a", " folded: b", LENGTH), 400), (post("X: a", "\tfolded", LENGTH), 400),
    (post("Transfer-Encoding: chunked", body=b"zz\r\nhi\r\n0\r\n\r\n"), 400),
    (post("Transfer-Encoding: chunked", body=b"-1\r\nhi\r\n0\r\n\r\n"), 400),
    (post("Transfer-Encoding: chunked", body=b"2\r\nhi!\r\n0\r\n\r\n" + SMUGGLED), 400),
    (post("Host: localhost", LENGTH), 400),
    (post("X: " + "x" * 300_000, LENGTH), 431), (post(*["X: y"] * 20_000, LENGTH), 431),
    (b"GET /health HTTP/1.1\nHost: localhost\n\n" + SMUGGLED, 400), (b"GET /health HTTP/1.1\r\n\r\n", 400),
    (b"GET /health\r\n\r\n", 400), (b"\x16\x03\x01\x02\x00\x01\x00", 400), (b"\r\n\r\n", 400), (b"\0" * 99, 400),
    (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400), (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 505),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "status"), HEADS, ids=range(len(HEADS)))
@pytest.mark.usefixtures("quiet")
def test_heads_that_programs_read_differently_end_the_connection(
    server: Running, sent: bytes, status: int
) -> None:
    ((code, body),) = answers(server, sent)
    assert code == status, body
    assert json.loads(body)["error"]["message"]
    assert server.client.get("/health").status_code == 200


@pytest.mark.usefixtures("quiet")
def test_requests_in_one_piece_are_answered_in_their_order(server: Running) -> None:
    ends = post("Connection: close", LENGTH)
    chunked = post("Transfer-Encoding: chunked", body=CHUNKED)
    found = answers(
        server,
        SMUGGLED
        + post(LENGTH)
        + chunked
        + post(LENGTH, body=b"x" * len(BODY))
        + SMUGGLED
        + ends,
    )
    assert [code for code, _ in found] == [200, 200, 200, 400, 200, 200]
    garbage_behind = answers(server, post(LENGTH) + b"\0\1\2 garbage\r\n\r\n")
    assert [code for code, _ in garbage_behind] == [200, 400]


@pytest.mark.usefixtures("quiet")
def test_who_does_not_send_is_given_up_and_others_are_answered(
    monkeypatch: Any,
) -> None:
    """Nothing, half a head, no body, half a body, half of a second head, drops of a head."""
    monkeypatch.setattr("weft.serve.connections.HEAD_S", 0.4)
    monkeypatch.setattr("weft.serve.connections.BODY_S", 0.4)
    monkeypatch.setattr("weft.serve.connections.REST_S", 0.4)
    server = Running(load_tokenizer("bytes"))
    whole = post(LENGTH)
    with ExitStack() as stack:
        kinds = [
            b"",
            b"GET / HT",
            post(LENGTH, body=b""),
            whole[:-5],
            whole + b"GET",
            post("Content-Length: 99999999"),
        ]
        clients = [
            stack.enter_context(socket.create_connection(server.address))
            for _ in kinds * 20
        ]
        for client, sent in zip(clients, kinds * 20, strict=True):
            client.sendall(sent)
        until(lambda: len(server.uvicorn.server_state.connections) > 100)
        dripping = stack.enter_context(socket.create_connection(server.address))
        began = time.monotonic()
        with pytest.raises(OSError, match=r"reset|[Pp]ipe"):
            while time.monotonic() - began < 20:
                dripping.sendall(b"G")
                assert (
                    server.post("completions", prompt="a", max_tokens=1).status_code
                    == 200
                )
                time.sleep(0.05)
        until(lambda: len(server.uvicorn.server_state.connections) <= 1)
        said = [client.recv(65536).split(b" ")[1:2] for client in clients[:6]]
        assert said == [[], [b"408"], [b"408"], [b"408"], [b"200"], [b"408"]]
    server.close()


@pytest.mark.usefixtures("quiet")
def test_where_there_are_too_many_the_idlest_makes_way() -> None:
    """Half-open connections in any number keep nobody out; connections that are being answered stay."""
    server = Running(load_tokenizer("bytes"), connections=8)
    asked = {"prompt": "a", "max_tokens": 300, "stream": True, "ignore_eos": True}
    with (
        ExitStack() as stack,
        server.client.stream("POST", "/v1/completions", json=asked) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        for _ in range(25):
            half = stack.enter_context(socket.create_connection(server.address))
            half.sendall(b"GET /health HTTP/1.1\r\nHost:")
            assert answers(server, LAST)[0][0] == 200
        assert len(server.uvicorn.server_state.connections) <= 9
        assert [line for line in lines if line][-1] == "data: [DONE]"
    until(server.empty)
    slow = server.engine.step
    server.engine.step = lambda: (time.sleep(0.05), slow())[1]  # type: ignore[method-assign]
    with ExitStack() as stack:
        for _ in range(8):
            busy = stack.enter_context(socket.create_connection(server.address))
            long = json.dumps(asked).encode()
            busy.sendall(post(f"Content-Length: {len(long)}", body=long))
        until(lambda: len(server.service._open) == 8)
        ((code, body),) = answers(server, SMUGGLED)
        assert code == 503 and b"8 connections are open" in body
    until(server.empty)
    server.close()


@pytest.mark.usefixtures("quiet")
def test_who_does_not_read_is_given_up(monkeypatch: Any) -> None:
    monkeypatch.setattr("weft.serve.connections.WRITE_S", 0.3)
    server = Running(load_tokenizer("bytes"))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(server.address)
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000)
        until(lambda: not server.uvicorn.server_state.connections)
    server.close()


def test_a_drain_that_runs_out_ends_streams_with_an_error(
    quiet: None, monkeypatch: Any
) -> None:
    server = Running(load_tokenizer("bytes"), drain=0.3)
    slow = server.engine.step
    server.engine.step = lambda: (time.sleep(0.02), slow())[1]  # type: ignore[method-assign]
    asked = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True}
    whole: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: whole.append(server.post("completions", **asked))
    )
    waiting.start()
    with (
        socket.create_connection(server.address) as half,
        httpx.Client(base_url=server.client.base_url) as client,
    ):
        half.sendall(post("Content-Length: 9999", body=b"{"))
        with client.stream(
            "POST", "/v1/completions", json=asked | {"stream": True}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            until(lambda: len(server.service._open) == 2)
            server.uvicorn.should_exit = True
            last, done = [line for line in lines if line][-2:]
        assert (
            done == "data: [DONE]"
            and "the server ends"
            in json.loads(last.removeprefix("data: "))["error"]["message"]
        )
        half.settimeout(20)
        assert half.recv(4096).startswith(b"HTTP/1.1 503")
    waiting.join(60)
    assert (
        whole[0].status_code == 503
        and whole[0].json()["error"]["code"] == "server_ends"
    )
    assert server.said == [
        "2 answers were not at the end after 0.3 s (--drain), and cut"
    ]
    server.close()


def test_told_twice_it_ends_at_once(quiet: None) -> None:
    server = Running(load_tokenizer("bytes"), drain=60)
    slow = server.engine.step
    server.engine.step = lambda: (time.sleep(0.02), slow())[1]  # type: ignore[method-assign]
    asked = {"prompt": "a", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    with httpx.stream(
        "POST", f"{server.client.base_url}/v1/completions", json=asked, timeout=60
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.uvicorn.should_exit = True
        time.sleep(0.3)
        server.uvicorn.force_exit = True
        assert "the server ends" in [line for line in lines if line][-2]
    server.close()
    assert time.monotonic() - began < 20 and "told to end at once" in server.said[0]


def garbage(random: Random) -> bytes:
    """A request with random bytes in it, random bytes, or none; also several in one piece."""
    kind = random.randrange(5)
    whole = bytearray(
        random.choice(
            [post(LENGTH), SMUGGLED, post("Transfer-Encoding: chunked", body=CHUNKED)]
        )
    )
    if kind == 0:
        return random.randbytes(random.randrange(2000))
    if kind == 1:
        return bytes(whole[: random.randrange(len(whole))])
    if kind == 2:
        return bytes(whole) * random.randrange(1, 20)
    for _ in range(random.randrange(1, 6)):
        at = random.randrange(len(whole))
        whole[at : at + random.randrange(3)] = random.randbytes(random.randrange(4))
    return bytes(whole)


def attack(server: Running, count: int, seed: int) -> None:
    """``count`` clients that send garbage and go away, some without reading; others are answered all the time."""
    random = Random(seed)
    for number in range(count):
        with socket.create_connection(server.address, 10) as client:
            client.sendall(garbage(random))
            if number % 3 == 0:
                client.settimeout(0.02)
                with suppress(OSError):
                    client.recv(4096)
            elif number % 3 == 1:
                # reset, not closed
                client.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
                )
        if number % 10 == 0:
            assert (
                server.post("completions", prompt="a", max_tokens=1).status_code == 200
            )
    until(server.empty)


@pytest.mark.slow(4)
@pytest.mark.usefixtures("quiet")
def test_garbage_of_300_connections(server: Running) -> None:
    attack(server, 300, 0)
    until(lambda: len(server.uvicorn.server_state.connections) <= 1)
    assert server.service.failure is None


@pytest.mark.soak
@pytest.mark.usefixtures("quiet")
def test_garbage_of_5000_connections_leaves_memory_flat(server: Running) -> None:
    held = []
    for seed in range(5):
        attack(server, 1000, seed)
        held.append(psutil.Process(os.getpid()).memory_info().rss)
    assert held[-1] - held[1] < 16 * 2**20, [size // 2**20 for size in held]


def test_a_broken_request_is_refused_as_its_client_reads_it(
    server: Running, quiet: None
) -> None:
    """Of a body that turns out to be garbage the path is known, and so the form of errors."""
    for path, outer in (("/v1/messages", "error"), ("/v1/completions", None)):
        head = f"POST {path} HTTP/1.1\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n"
        ((status, body),) = answers(server, head.encode() + b"ZZ\r\n")
        assert status == 400 and json.loads(body).get("type") == outer
