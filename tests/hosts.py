"""Two emulated hosts: network namespaces joined by a veth pair, each with its own address and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def available() -> bool:
    """Whether this machine lets us make network namespaces."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    made = subprocess.run(["ip", "netns", "add", "weft-probe"], capture_output=True)
    subprocess.run(["ip", "netns", "del", "weft-probe"], capture_output=True)
    return made.returncode == 0


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[tuple[list[str], list[str]]]:
    """Command prefixes that run a command on host 0 and on host 1. The link between them carries ``rate``."""
    names = [f"weft{os.getpid()}h{i}" for i in (0, 1)]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", "weftv0", "netns", names[0], "type", "veth", "peer", "name", "weftv1", "netns", names[1])
        for i, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"{ADDRESSES[i]}/24", "dev", f"weftv{i}")
            _ip("-n", name, "link", "set", f"weftv{i}", "name", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            shape = [
                "tc",
                "qdisc",
                "add",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "256kb",
                "latency",
                "50ms",
            ]
            subprocess.run(["ip", "netns", "exec", name, *shape], check=True, capture_output=True)
        yield tuple(["ip", "netns", "exec", n, "env", "GLOO_SOCKET_IFNAME=eth0"] for n in names)  # type: ignore[misc]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "pids", name], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
