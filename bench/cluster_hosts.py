"""One service over several hosts: a router and three engines, each on a host of its own, with cables to pull.

Hosts are network namespaces (:mod:`hosts`). A tiny model of random weights, float32. Clients on the router's host read
streams all the while, and each must get what a service of one engine writes when it has nothing else to do. Engines
join by ``weft engine --join``, drain and join anew, have their cables pulled, and move answers to each other over
cables of a given rate. One of them is cut over two ranks (``--layout tp=2``), of which one is stopped and killed. A
second service has roles.

    python bench/cluster_hosts.py [--rate 20mbit] [--clients 12] [--json bench/results/cluster_hosts.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from hosts import Host, hosts, unavailable
from service_faults import (
    SHAPE,
    Processes,
    Stream,
    Trial,
    export_tiny,
    free_port,
    metrics,
    patience,
    read_expected,
    scraped,
    undisturbed,
    until,
    write_expected,
)
from step import machine

#: Bytes of the keys and values of a token: layers, kv heads and their width, float32.
TOKEN = 2 * SHAPE.layers * SHAPE.kv_heads * (SHAPE.embed // SHAPE.heads) * 4

#: Where engines join, and how many ranks each engine has. With roles: what each engine does.
PORT, RANKS = 8100, (1, 1, 2)
ROLES = ("prefill", "decode", "decode")


#: Cases with a sampled token whose random number lies so near the border between two tokens that it falls on the other
#: side if it is computed with other rows of a batch. An engine of ranks cannot exclude that (--invariant).
BORDER = (19,)


class HostedService:
    """A router on the first of ``machines`` and an engine on each other one. ``roles``: of the engines."""

    kind = "hosts"

    def __init__(
        self, folder: Path, machines: tuple[Host, ...], roles: tuple[str, ...] = ("",) * 3
    ) -> None:  # fmt: skip
        self.folder, self.machines, self.roles = folder, machines, roles
        self.processes = Processes(folder)
        self.port = free_port()
        self.drained: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.engines: dict[str, subprocess.Popen[bytes]] = {}
        self.words = ["--checkpoint", str(folder / "tiny"), "--cache", "32768", "--requests", "64"]  # fmt: skip

    async def start(self) -> float:
        """Start all; return the seconds from the start of the engines until all have joined."""
        place = f"{self.machines[0].address}:{PORT}"
        file = self.folder / "cluster.toml"
        file.write_text(f'[cluster]\nlisten = "{place}"\n')
        self.processes.start(
            "router", "serve", *self.words, "--cluster", str(file), "--port", str(self.port),
            at=self.machines[0],
        )  # fmt: skip
        begun = time.monotonic()
        for number in range(1, len(self.machines)):
            self.start_engine(number)
        await self.has_joined(len(self.roles))
        return time.monotonic() - begun

    def start_engine(self, number: int) -> None:
        host, role = self.machines[number], self.roles[number - 1]
        name, ranks = f"engine-{number}", RANKS[number - 1]
        own = [
            "--join",
            f"{self.machines[0].address}:{PORT}",
            "--name",
            name,
            "--drain",
            "5",
        ]
        own += ["--role", role] * bool(role)
        # float32 as it is, where that is possible: else a draw between two tokens may depend on the batch
        own += ["--layout", f"tp={ranks}"] if ranks > 1 else ["--invariant"]
        self.engines[name] = self.processes.start(
            name, "engine", *self.words, *own, at=host
        )

    async def has_joined(self, engines: int) -> None:
        seconds = 120 + 6 * patience()  # the more, the more processes share a core

        async def enough() -> bool:
            return len(await scraped(self.port)) == engines

        if not await until(enough, seconds):
            raise TimeoutError(f"{engines} engines have not joined in {seconds} s")

    async def loss_of(self, name: str) -> float:
        """Seconds until the router has given the engine up."""
        begun = time.monotonic()

        async def gone() -> bool:
            return name not in await scraped(self.port)

        await until(gone, 20, every=0.05)
        return time.monotonic() - begun

    def sent(self) -> list[int]:
        """Bytes that each host has sent over its cable so far."""
        words = ("-s", "-j", "link", "show", "eth0")
        said = [
            json.loads(subprocess.check_output(["ip", "-n", host.name, *words]))
            for host in self.machines
        ]
        return [links[0]["stats64"]["tx"]["bytes"] for links in said]


def longest_gap(stream: Stream, at: float) -> float:
    """The longest time without anything new in a stream from the time ``at`` on."""
    times = [at, *(each for each in stream.times if each > at)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


class Show:
    """What is tried with a service while clients read. ``rows``: one for each, with its times and bytes."""

    def __init__(self, service: HostedService, trial: Trial) -> None:
        self.service, self.trial, self.rows = service, trial, list[dict[str, Any]]()

    async def counts(self) -> dict[str, float]:
        return await metrics(self.service.port)

    async def step(self, what: str, act: Callable[[], Any]) -> dict[str, Any]:
        """Do ``act``; note the longest time in which each reader got nothing, and what has travelled."""
        reading, at = [*self.trial.active], time.monotonic()
        before, sent = await self.counts(), self.service.sent()
        extra = await act() or {}
        done = time.monotonic()
        for _ in range(600):
            late = [s for s in reading if s in self.trial.active and s.times and s.times[-1] <= done]  # fmt: skip
            if not late:
                break
            await asyncio.sleep(0.1)
        waits = sorted(longest_gap(stream, at) for stream in reading)
        now = await self.counts()
        moved = {name: now[name] - before[name] for name in now if name.startswith(("answers_", "moved_"))}  # fmt: skip
        row = {
            "what": what, "seconds": round(done - at, 2), "streams": len(waits),
            "median_gap_s": round(waits[len(waits) // 2], 3) if waits else None,
            "longest_gap_s": round(waits[-1], 3) if waits else None,
            **moved, **extra,
            "sent_bytes": [b - a for a, b in zip(sent, self.service.sent(), strict=True)],
        }  # fmt: skip
        self.rows.append(row)
        print(f"  {json.dumps(row)}", flush=True)
        return row


async def mixed(show: Show) -> None:
    """Engines that do all: dispatch, a drain over the cable, a join, cut cables, the router's too, a killed rank."""
    service, machines = show.service, show.service.machines

    async def wait() -> None:
        await asyncio.sleep(4)

    async def drain() -> dict[str, Any]:
        process = service.engines["engine-1"]
        service.drained.append(("engine-1", process))
        begun = time.monotonic()
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
        return {"drained_s": round(time.monotonic() - begun, 2)}

    async def join() -> dict[str, Any]:
        begun = time.monotonic()
        service.start_engine(1)
        await service.has_joined(3)
        return {"joined_s": round(time.monotonic() - begun, 2)}

    async def pull(number: int) -> dict[str, Any]:
        machines[number].link(up=False)
        noticed = await service.loss_of(f"engine-{number}")
        await asyncio.sleep(3)
        machines[number].link(up=True)
        begun = time.monotonic()
        await service.has_joined(3)
        return {"noticed_s": round(noticed, 2), "joined_again_s": round(time.monotonic() - begun, 2)}  # fmt: skip

    async def isolate() -> dict[str, Any]:
        machines[0].link(up=False)
        await asyncio.sleep(4)
        machines[0].link(up=True)
        begun = time.monotonic()
        await service.has_joined(3)
        return {"joined_again_s": round(time.monotonic() - begun, 2)}

    async def freeze_rank() -> dict[str, Any]:
        """Stop the second rank of the engine that has two; the engine joins anew when it goes on."""
        rank = rank_processes(machines[3])[1]
        os.kill(rank, signal.SIGSTOP)
        try:
            noticed = await service.loss_of("engine-3")
            await asyncio.sleep(2)
        finally:
            os.kill(rank, signal.SIGCONT)
        begun = time.monotonic()
        await service.has_joined(3)
        return {"noticed_s": round(noticed, 2), "joined_again_s": round(time.monotonic() - begun, 2)}  # fmt: skip

    async def kill_rank() -> dict[str, Any]:
        """Kill the second rank of the engine that has two: the engine ends as a whole, and is started again."""
        process = service.engines["engine-3"]
        ranks = rank_processes(machines[3])
        os.kill(ranks[1], 9)
        noticed = await service.loss_of("engine-3")
        code = await asyncio.to_thread(process.wait, 30)
        service.processes.expect("engine-3", 1)
        left = machines[3].processes()
        service.start_engine(3)
        await service.has_joined(3)
        return {"noticed_s": round(noticed, 2), "exit_code": code, "processes_left": len(left)}  # fmt: skip

    await show.step("dispatch", wait)
    loads = await scraped(service.port)
    show.rows[-1]["tokens"] = {name: row["engine_tokens"] for name, row in loads.items()}  # fmt: skip
    await show.step("drain", drain)
    await show.step("join", join)
    await asyncio.sleep(1)
    await show.step("cable of an engine", lambda: pull(2))
    await show.step("cable of an engine of two ranks", lambda: pull(3))
    await show.step("cable of the router", isolate)
    await show.step("a rank is stopped", freeze_rank)
    await show.step("a rank is killed", kill_rank)


async def with_roles(show: Show) -> None:
    """Prompts at one engine, answers at two: what travels is what the formula says."""

    async def wait() -> None:
        await asyncio.sleep(6)

    row = await show.step("roles", wait)
    row["bytes_of_a_token"] = TOKEN
    assert row["moved_bytes"] and row["moved_bytes"] % TOKEN == 0, row


def rank_processes(host: Host) -> list[int]:
    """The processes of ranks on ``host``, in the order of ranks: each leads a session, and nothing else there does."""
    return sorted(pid for pid in host.processes() if os.getsid(pid) == pid)


async def run_service(
    service: HostedService, scenario: Callable[[Show], Any], expected: list[Stream], given: argparse.Namespace
) -> dict[str, Any]:  # fmt: skip
    trial = Trial(service, 1, expected, given.clients)
    trial.asked = [case for case in trial.asked if case not in BORDER]
    show = Show(service, trial)
    clients: list[asyncio.Task[None]] = []
    try:
        joined = await service.start()
        print(f"  three engines have joined after {joined:.1f} s", flush=True)
        clients = [asyncio.create_task(trial.client(i)) for i in range(given.clients)]
        await asyncio.sleep(2)
        await scenario(show)
        trial.ended = True
        await asyncio.wait_for(asyncio.gather(*clients), 120)
    finally:
        trial.ended = True
        for client in clients:
            client.cancel()
        trial.wrong += await asyncio.to_thread(service.processes.close)
    for line in trial.wrong:
        print("  WRONG", line[:1000], flush=True)
    print(f"  {dict(trial.counts)}", flush=True)
    return {
        "roles": service.roles, "joined_s": round(joined, 2), "streams": trial.counts, "wrong": trial.wrong,
        "steps": show.rows,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="20mbit", help="of each cable, as tc has it")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--keep", type=Path, help="a folder for model and logs")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if why := unavailable():
        sys.exit(why)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        export_tiny(folder)
        expected = read_expected(folder) or asyncio.run(undisturbed(folder))
        write_expected(folder, expected)
        services = []
        for roles, scenario in ((("",) * 3, mixed), (ROLES, with_roles)):
            print(f"roles: {roles}", flush=True)
            with hosts(4, f"weft-{os.getpid()}", given.rate) as machines, ThreadPoolExecutor(1) as thread:  # fmt: skip
                # this process stays where it is: what hosts() ends would be this process too
                thread.submit(machines[0].enter).result()
                service = thread.submit(HostedService, folder, machines, roles).result()
                running = run_service(service, scenario, expected, given)
                services.append(thread.submit(asyncio.run, running).result())
    result = {"machine": machine(), "rate": given.rate, "clients": given.clients, "services": services}  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return any(each["wrong"] for each in services)


if __name__ == "__main__":
    sys.exit(main())
