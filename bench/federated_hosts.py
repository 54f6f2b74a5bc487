"""A server of federated training and clients behind address translation, with kills, returns and links cut.

    python bench/federated_hosts.py [--quick] [--policy NAME] [--kills N] [--out bench/results/federated_hosts.json]

Network namespaces: one is the wide net with the server; each client stands behind a gateway of its own that translates
addresses and lets nothing in. Clients are slowed down to speeds of 1, 1, 2 and 4 by stopping their processes for a part
of the time. Clients are killed (SIGKILL) and come back, links are cut for longer and for less than `federated.grace`,
the server is killed once and stopped once. `--rounds`: changes of the model after all of that. At the end the same
arrivals are replayed on the virtual clock, with the very local training of the clients, and both models are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from hosts import _run, _space, unavailable

from weft.checkpoint.address import open_storage
from weft.checkpoint.run_state import load_state
from weft.checkpoint.store import candidates, open_checkpoint
from weft.federated.federation_events import read_events
from weft.federated.trained_cohort import replayed_model
from weft.layout.mesh import Mesh
from weft.observe.run_metrics import read_metrics
from weft.recipe import load_recipe
from weft.recipe.toml import write_toml
from weft.train.setup import build_for_training, prepare

SERVER = "203.0.113.1"
CLIENTS, PORT = 4, 7800
#: How many times as long each client takes for a step.
SLOWNESS = (1, 1, 2, 4)
BEAT_S = 0.2


@contextmanager
def behind_gateways(count: int) -> Iterator[tuple[str, list[str]]]:
    """The names of the wide net and of ``count`` hosts, all with the same private address."""
    begin = f"fed-{os.getpid()}"
    with ExitStack() as stack:
        wide = f"{begin}-wide"
        _space(wide, stack)
        _run("ip", "-n", wide, "link", "set", "lo", "up")
        _run("ip", "-n", wide, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", wide, "addr", "add", f"{SERVER}/24", "dev", "bridge")
        _run("ip", "-n", wide, "link", "set", "bridge", "up")
        hosts = []
        for number in range(count):
            gate, host = f"{begin}-gate{number}", f"{begin}-host{number}"
            for name in (gate, host):
                _space(name, stack)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _wire(gate, "wan", f"203.0.113.{number + 2}/24", wide, f"port{number}")
            _run(
                "ip",
                "-n",
                wide,
                "link",
                "set",
                f"port{number}",
                "master",
                "bridge",
                "up",
            )
            _wire(gate, "lan", "192.168.7.1/24", host, "eth0")
            _run("ip", "-n", host, "addr", "add", "192.168.7.2/24", "dev", "eth0")
            _run("ip", "-n", host, "link", "set", "eth0", "up")
            _run("ip", "-n", host, "route", "add", "default", "via", "192.168.7.1")
            inside = ("ip", "netns", "exec", gate)
            _run(*inside, "sysctl", "-qw", "net.ipv4.ip_forward=1")
            rule = ("-t", "nat", "-A", "POSTROUTING", "-o", "wan", "-j", "MASQUERADE")
            _run(*inside, "iptables", *rule)
            for chain in ("FORWARD", "INPUT"):
                new = ("-i", "wan", "-m", "state", "--state", "NEW", "-j", "DROP")
                _run(*inside, "iptables", "-A", chain, *new)
            hosts.append(host)
        yield wide, hosts


def _wire(gate: str, device: str, address: str, other: str, end: str) -> None:
    pair = ("type", "veth", "peer", "name", end, "netns", other)
    _run("ip", "link", "add", device, "netns", gate, *pair)
    _run("ip", "-n", gate, "addr", "add", address, "dev", device)
    _run("ip", "-n", gate, "link", "set", device, "up")


class Stage:
    """Processes in namespaces, and what happens to them."""

    def __init__(self, folder: Path, wide: str, hosts: list[str]) -> None:
        self.folder, self.wide, self.hosts = folder, wide, hosts
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.over = threading.Event()

    def start(self, name: str, space: str, *words: object) -> None:
        line = [
            "ip",
            "netns",
            "exec",
            space,
            sys.executable,
            "-m",
            "weft",
            *map(str, words),
        ]
        with (self.folder / f"{name}.log").open("ab") as said:
            self.processes[name] = subprocess.Popen(
                line, stdout=said, stderr=subprocess.STDOUT
            )

    def serve(self, *words: object) -> None:
        count = self.said("server").count("clients join at")
        recipe, run = self.folder / "server.toml", self.folder / "server"
        self.start("server", self.wide, "train", recipe, "--out", run, *words)
        self.wait_for("server", "clients join at", count + 1)

    def join(self, number: int) -> None:
        name = f"client{number}"
        self.start(
            name, self.hosts[number], "client", "--join", self.folder / "server/invitation", "--data",
            self.folder / f"{name}.jsonl", "--name", name, "--out", self.folder / name, "--set",
            f"data.cache={self.folder}", "--set", "checkpoint.every=5",
        )  # fmt: skip

    def said(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(
        self, name: str, words: str, times: int = 1, limit: float = 900
    ) -> None:
        deadline = time.monotonic() + limit
        while self.said(name).count(words) < times:
            assert time.monotonic() < deadline, f"{name}: {self.said(name)[-2000:]}"
            time.sleep(0.1)

    def versions(self) -> int:
        with suppress(OSError, ValueError):
            return len(read_metrics(self.folder / "server").get("federated", []))
        return 0

    def reach(self, version: int, limit: float = 900) -> None:
        deadline = time.monotonic() + limit
        while self.versions() < version and self.processes["server"].poll() is None:
            assert time.monotonic() < deadline, self.said("server")[-3000:]
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def cut(self, number: int, seconds: float) -> None:
        """Cut a client's link for so long: packets are lost without an error."""
        port = f"port{number}"
        _run("ip", "-n", self.wide, "link", "set", port, "down")
        time.sleep(seconds)
        _run("ip", "-n", self.wide, "link", "set", port, "up")

    def slow_down(self) -> None:
        """Let clients run for a part of the time only, until the stage is over."""
        while not self.over.is_set():
            for phase in range(max(SLOWNESS)):
                for number, slowness in enumerate(SLOWNESS):
                    process = self.processes.get(f"client{number}")
                    if process is not None and process.poll() is None:
                        runs = phase % slowness == 0
                        with suppress(ProcessLookupError):
                            process.send_signal(
                                signal.SIGCONT if runs else signal.SIGSTOP
                            )
                if self.over.wait(BEAT_S):
                    break
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)

    def end(self, limit: float = 900) -> None:
        for name, process in self.processes.items():
            code = process.wait(limit)
            # a client that comes back after the end finds nobody, and says so
            late = name != "server" and " answer" in self.said(name).splitlines()[-1]
            assert code == 0 or late, f"{name}: {self.said(name)[-3000:]}"

    def close(self) -> None:
        self.over.set()
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def write_recipes(folder: Path, policy: str) -> None:
    """Write the server's recipe, texts of four kinds for the clients, and of all kinds for the server."""
    letters = ["abcdefgh", "efghijkl", "ijklmnop", "mnopqrst"]
    for number, own in enumerate([*letters, "".join(letters)]):
        rng = random.Random(number)
        name = f"client{number}.jsonl" if number < CLIENTS else "held-out.jsonl"
        with (folder / name).open("w") as file:
            for _ in range(60):
                words = [
                    "".join(rng.choice(own) for _ in range(3)) * 2
                    for _ in range(rng.randint(2, 12))
                ]
                file.write(json.dumps({"text": " ".join(words)}) + "\n")
    recipe = {
        "name": "hosts", "model": {"layers": 1, "embed": 32, "heads": 2},
        "train": {"batch": 4, "dtype": "float64", "threads": 1},
        "optimizer": {"kind": "sgd", "lr": 0.1, "warmup": 0, "schedule": "constant"},
        "checkpoint": {"every": 1, "keep": 3}, "validation": {"every": 1},
        "data": {
            "sources": [{"kind": "jsonl", "path": str(folder / "held-out.jsonl")}], "seq_len": 48,
            "cache": str(folder), "validation": 0.5,
        },
        "federated": {
            "policy": policy, "listen": f"{SERVER}:{PORT}", "steps": 4, "rounds": 100_000, "clients": CLIENTS,
            "patience": 120.0, "grace": 6.0,
        },
    }  # fmt: skip
    (folder / "server.toml").write_text(write_toml(recipe))


def play(stage: Stage, kills: int, rounds: int) -> None:
    """Start all, and let happen what is to happen, spread over the run."""
    stage.serve()
    for number in range(CLIENTS):
        stage.join(number)
    threading.Thread(target=stage.slow_down, daemon=True).start()
    rng = random.Random(0)
    for number in range(kills):
        stage.reach(stage.versions() + 1)
        client = rng.randrange(CLIENTS)
        joined = f"client client{client} has joined"
        times = stage.said("server").count(joined)
        stage.kill(f"client{client}")
        time.sleep(rng.uniform(0.5, 2.0))
        stage.join(client)
        stage.wait_for("server", joined, times + 1)
        if number == kills // 3:
            stage.cut((client + 1) % CLIENTS, 3.0)  # less than the grace
        if number == kills // 2:
            stage.kill("server")
            stage.serve("--resume", "auto")
        if number == 2 * kills // 3:
            stage.cut((client + 2) % CLIENTS, 30.0)  # until both ends know
    # all of it happens during the run, however fast the machine is: only now its end is set
    stage.reach(stage.versions() + 2)
    stage.processes["server"].terminate()
    stage.processes["server"].wait(300)
    stage.serve(
        "--resume", "auto", "--set", f"federated.rounds={stage.versions() + rounds}"
    )
    stage.end()


def compared(folder: Path) -> dict[str, float]:
    """Figures of the real run beside its replay on the virtual clock."""
    server = load_recipe(folder / "server.toml")
    clients = {
        f"client{n}": load_recipe(
            folder / f"client{n}/recipe.toml", [f"data.cache={folder}"], data=str(folder / f"client{n}.jsonl")
        )
        for n in range(CLIENTS)
    }  # fmt: skip
    replayed = replayed_model(server, folder / "server", clients, folder / "replay")
    job = prepare(server)
    built = build_for_training(job.shape, Mesh.single(), job.recipe)
    start = {h.name: h.local.detach().clone() for h in built.state.learning}
    places = candidates(open_storage(str(folder / "server/checkpoints")))
    load_state(open_checkpoint(places[0]), built.state)
    real = {h.name: h.local.detach() for h in built.state.learning}
    moved = max(float((real[n] - start[n]).abs().max()) for n in real)
    apart = max(float((real[n] - replayed[n]).abs().max()) for n in real)
    losses = [r["loss"] for r in read_metrics(folder / "server")["validation"]]
    kinds = [e.kind for e in read_events(folder / "server")]
    return {
        "moved": moved, "difference": apart, "relative_difference": apart / moved, "first_loss": losses[0],
        "last_loss": losses[-1], "updates": kinds.count("update"), "joins": kinds.count("join"),
        "leaves": kinds.count("leave"), "changes": len(read_metrics(folder / "server")["federated"]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--policy", default="fedbuff")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--out", type=Path, default=Path("bench/results/federated_hosts.json")
    )
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    kills, rounds = (2, 3) if given.quick else (given.kills, given.rounds)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = given.folder or Path(
            stack.enter_context(tempfile.TemporaryDirectory())
        )
        folder.mkdir(parents=True, exist_ok=True)
        write_recipes(folder, given.policy)
        wide, hosts = stack.enter_context(behind_gateways(CLIENTS))
        stage = Stage(folder, wide, hosts)
        stack.callback(stage.close)
        began = time.monotonic()
        play(stage, kills, rounds)
        seconds = time.monotonic() - began
        figures = compared(folder)
    assert figures["relative_difference"] < 1e-9, figures
    assert figures["joins"] >= CLIENTS + kills, figures
    result = {
        "policy": given.policy, "clients": CLIENTS, "slowness": SLOWNESS, "kills": kills, "server_kills": 1,
        "links_cut": 2, "rounds": rounds, "seconds": round(seconds, 1), **figures,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if not given.quick:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
