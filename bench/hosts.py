"""Simulated hosts on one machine: network namespaces, each with an address, joined by a switch with cables to pull.

A process on a host sees that host's loopback device and ``eth0``, and reaches the other hosts only through the latter.
All hosts share the machine's processes and files. Making them takes Linux, root and the command ``ip``.

Cables can have a delay, on kernels without netem too: a process holds every frame for that long (``hosts.py DELAY N``).
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fcntl import ioctl
from struct import pack

from weft.errors import WeftError

#: Of Linux: what setns(2) is to change.
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """A namespace, its address, and the port of the switch (a namespace too) that its cable is plugged into."""

    name: str
    address: str
    switch: str
    port: str

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs ``words`` on this host; gloo uses its network there."""
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            "env",
            "GLOO_SOCKET_IFNAME=eth0",
            *words,
        ]

    def link(self, up: bool) -> None:
        """Put the cable in, or pull it: packets are then lost without an error."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "up" if up else "down")

    def limit(self, rate: str, burst: str = "256kb") -> None:
        """Let no more than ``rate`` ("100mbit") go out, or come in; after a rest, so much at once: ``burst``."""
        for space, device in ((self.name, "eth0"), (self.switch, self.port)):
            bucket = ("tbf", "rate", rate, "burst", burst, "latency", "50ms")
            _run(
                "ip",
                "netns",
                "exec",
                space,
                "tc",
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                *bucket,
            )

    def enter(self) -> None:
        """Move this thread, and those that it starts, to this host; open sockets stay on the host they are on."""
        with open(f"/run/netns/{self.name}") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                raise WeftError(
                    f"cannot enter the host {self.name}: {os.strerror(ctypes.get_errno())}"
                )

    def processes(self) -> list[int]:
        """The numbers (pid) of the processes on this host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]


def unavailable() -> str:
    """Why this machine makes no hosts; empty if it does."""
    if not shutil.which("ip"):
        return "hosts need network namespaces, and so Linux with the command ip (package iproute2)"
    if os.geteuid() != 0:
        return "hosts need network namespaces, which only root may make"
    try:
        with hosts(1, f"weft-probe-{os.getpid()}"):
            return ""
    except WeftError as error:
        return (
            f"hosts need network namespaces, which this machine does not make: {error}"
        )


#: Bytes of a frame on cables with a delay: few frames, as a process handles each of them.
LONG_FRAME = 16000


@contextmanager
def hosts(
    count: int,
    name: str = "",
    rate: str = "",
    delay_s: float = 0.0,
    burst: str = "256kb",
) -> Iterator[tuple[Host, ...]]:
    """``count`` hosts, each with a cable of ``rate`` (else as fast as the machine) to a switch.

    At the end they are gone, and so is everything that still runs on them. ``name`` is what their names begin with.
    ``delay_s``: how long a frame takes from any host to any other. ``burst``: bytes that a cable which has rested
    carries at once, before its rate counts.
    """
    name = name or f"weft-{os.getpid()}"
    switch = f"{name}-switch"
    made = tuple(
        Host(f"{name}-host{i}", f"10.77.0.{i + 1}", switch, f"port{i}")
        for i in range(count)
    )
    with ExitStack() as stack:
        stack.enter_context(_ended_by_signals())
        _space(switch, stack)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in made:
            _space(host.name, stack)
            _wire(host)
            if rate:
                host.limit(rate, burst)
        if delay_s:
            stack.enter_context(_delayed(made, delay_s))
        yield made


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end the program as Ctrl-C does, so that the hosts are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _delayed(made: Sequence[Host], delay_s: float) -> Iterator[None]:
    """Put a process in the switch's place that holds every frame for ``delay_s``, and then brings it to its host."""
    switch = made[0].switch
    words = ("ip", "netns", "exec", switch, sys.executable, __file__)
    relay = subprocess.Popen(
        [*words, str(delay_s), str(len(made))], stdout=subprocess.PIPE
    )
    try:
        assert relay.stdout is not None
        if not relay.stdout.readline():
            raise WeftError("cables with a delay need TAP devices (/dev/net/tun)")
        for number, host in enumerate(made):
            cut, long = f"cut{number}", ("mtu", str(LONG_FRAME))
            _run("ip", "-n", switch, "link", "add", cut, "type", "bridge")
            for device in (host.port, f"far{number}"):
                _run("ip", "-n", switch, "link", "set", device, *long, "master", cut, "up")  # fmt: skip
            _run("ip", "-n", switch, "link", "set", cut, "up")
            _run("ip", "-n", host.name, "link", "set", "eth0", "mtu", str(LONG_FRAME))
        yield
    finally:
        relay.kill()
        relay.wait()


def hold_frames(delay_s: float, count: int) -> None:
    """Be a switch of ``count`` TAP devices "far...", which hands every frame on so much later.

    A cable is no program: the process goes before all others, so that hosts which compute do not slow frames down.
    """
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ends = list[int]()
    for number in range(count):
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        # TUNSETIFF: a TAP device, frames alone
        ioctl(end, 0x400454CA, pack("16sH", f"far{number}".encode(), 0x1002))
        ends.append(end)
    print("there", flush=True)
    held: deque[tuple[float, int, bytes]] = deque()
    behind = dict[bytes, int]()  # by a host's address on its card
    while True:
        left = max(0.0, held[0][0] - time.monotonic()) if held else 1.0
        for end in select.select(ends, [], [], left)[0]:
            with suppress(BlockingIOError):
                while True:
                    frame = os.read(end, 65536)
                    behind[frame[6:12]] = end
                    held.append((time.monotonic() + delay_s, end, frame))
        while held and held[0][0] <= time.monotonic():
            _, end, frame = held.popleft()
            to = behind.get(frame[:6])
            for other in [e for e in ends if e != end] if to is None else [to]:
                with suppress(OSError):  # a full queue loses a frame, as any does
                    os.write(other, frame)


def _space(name: str, stack: ExitStack) -> None:
    """Make a namespace; ``stack`` ends it and what runs in it."""

    def end() -> None:
        for pid in _run("ip", "netns", "pids", name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", name)

    _run("ip", "netns", "add", name)
    stack.callback(end)


def _wire(host: Host) -> None:
    # Made between two namespaces at once, so that no name is in use in this one.
    ends = (
        "eth0",
        "netns",
        host.name,
        "type",
        "veth",
        "peer",
        "name",
        host.port,
        "netns",
        host.switch,
    )
    _run("ip", "link", "add", *ends)
    _run("ip", "-n", host.switch, "link", "set", host.port, "master", "bridge", "up")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for device in ("eth0", "lo"):
        _run("ip", "-n", host.name, "link", "set", device, "up")


def _run(*words: str) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except subprocess.CalledProcessError as error:
        raise WeftError(f"{' '.join(words)}: {error.stderr.strip()}") from None


if __name__ == "__main__":
    hold_frames(float(sys.argv[1]), int(sys.argv[2]))
