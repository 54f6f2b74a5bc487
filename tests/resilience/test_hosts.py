"""Hosts as network namespaces: reached by address only, cut off and back, and gone at the end with what ran on them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from hosts import Host, hosts, unavailable

from weft.errors import WeftError

pytestmark = pytest.mark.skipif(bool(why := unavailable()), reason=why)

#: Answers every byte with itself; the other side asks until it has had an answer, or ``wait`` seconds have passed.
SERVER = "import socket; s = socket.create_server(('', 7000)); c, _ = s.accept()\nwhile d := c.recv(1): c.send(d)"
CLIENT = """
import socket, sys, time
for _ in range(600):  # until the other one listens
    try:
        c = socket.create_connection((sys.argv[1], 7000), 5); break
    except OSError:
        time.sleep(0.1)
for line in sys.stdin:
    c.settimeout(float(line))
    try:
        c.send(b"x"); print(len(c.recv(1)), flush=True)
    except TimeoutError:
        print("nothing", flush=True)
"""


@pytest.fixture
def pair() -> Iterator[tuple[Host, ...]]:
    with hosts(2, f"chaos-{os.getpid()}") as made:
        yield made


def talk(client: subprocess.Popen[str], seconds: float) -> str:
    assert client.stdin and client.stdout
    client.stdin.write(f"{seconds}\n")
    client.stdin.flush()
    return client.stdout.readline().strip()


@pytest.mark.sampled(2)
def test_a_pulled_cable_loses_what_is_sent_and_tells_nobody(
    pair: tuple[Host, ...],
) -> None:
    python = [sys.executable, "-I", "-S", "-c"]
    server = subprocess.Popen(pair[0].command([*python, SERVER]))
    client = None
    try:
        client = subprocess.Popen(
            pair[1].command([*python, CLIENT, pair[0].address]),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert talk(client, 60) == "1"
        pair[1].link(up=False)
        assert talk(client, 0.3) == "nothing"  # no error either
        pair[1].link(up=True)
        assert talk(client, 60) == "1"  # it was only late: the connection is the same
        assert server.pid in pair[0].processes()
    finally:
        for process in (server, client):
            if process:
                process.kill()
                process.wait()


def test_a_limited_cable_carries_no_more(pair: tuple[Host, ...]) -> None:
    pair[0].limit("8mbit")
    said = subprocess.run(
        ["ip", "netns", "exec", pair[0].name, "tc", "qdisc", "show"],
        capture_output=True,
        text=True,
    )
    assert "rate 8Mbit" in said.stdout
    pair[0].limit("16mbit")  # again, while it is there


def test_nothing_is_left_of_them() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        hosts(2, name := f"chaos-gone-{os.getpid()}") as made,
    ):
        left = subprocess.Popen(
            made[1].command([sys.executable, "-c", "import time; time.sleep(60)"])
        )
        while left.pid not in made[1].processes():
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert left.wait(60) == -9
    assert (
        name
        not in subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True
        ).stdout
    )
    assert not psutil.pid_exists(left.pid)


def test_a_name_that_is_taken_is_refused_with_what_ip_says() -> None:
    subprocess.run(
        ["ip", "netns", "add", f"chaos-taken-{os.getpid()}-host0"], check=True
    )
    try:
        with (
            pytest.raises(WeftError, match="File exists"),
            hosts(1, f"chaos-taken-{os.getpid()}"),
        ):
            pass
    finally:  # it is still there: hosts() ends what it has made, and nothing else
        subprocess.run(
            ["ip", "netns", "del", f"chaos-taken-{os.getpid()}-host0"], check=True
        )
