"""Roles of reinforcement learning on the hosts of a Ray cluster: network namespaces with a file system of Ray's own.

Three hosts, of which the first has no cores for Ray: ``weft train`` runs there, and Ray places the process that writes
answers and the one with the reference model on the other two. The run is compared with one whose roles are on its own
host, bit by bit. Then hosts lose their cable and all their processes in the middle of a run: that of a process that
writes, whose run goes on with a process on the last host and ends with the same weights; and that of the reference
model, whose run ends with a line. Needs root and the package ray.

    python bench/rl_hosts.py [--parts placed,lost_rollouts] [--json bench/results/rl_hosts.json]
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from hosts import Host, hosts, unavailable
from step import machine, write

from weft.checkpoint.model import open_model

PORT, STORE = 6379, 80 << 20
#: Seconds that the commands of Ray may take, and a whole run.
RAY_S, RUN_S = 120.0, 240.0
#: After so many rollout phases of a run a host is lost.
PHASES = 5
RECIPE = """
[model]
layers = 1
embed = 32
heads = 2
ffn = 64
tied = true

[data]
seq_len = 16

[[tasks]]
reward = "{reward}:slow"
path = "{prompts}"
name = "letters"
every = 0
limit = 2

[rl]
method = "grpo"
group = 4
tokens = 3
{loss}

[roles]
placement = "{placement}"
{roles}

[train]
steps = {steps}
batch = 16
threads = 1
timeout = 90

[optimizer]
lr = 1e-3
warmup = 1
schedule = "constant"

[validation]
every = 0

[checkpoint]
every = 0
"""
REWARD = """
import time

def slow(answer, question):
    time.sleep(0.01)
    return sum(c.isascii() for c in answer) / 3
"""
WRITERS = "rollout = { ranks = 1, threads = 1 }"
REFERENCE = "reference = { ranks = 1, threads = 1 }"
#: A loss with a reference model.
DIVERGENCE = 'loss = { kl = "k3", kl_weight = 0.1 }'
#: How processes of roles are told apart, by words of their commands.
ROLES = {"rollout": "policy:", "reference": "weft.rl.role_process"}


class Cluster:
    """A Ray cluster over ``places``, and runs on the first of them. ``folder``: for all files."""

    def __init__(self, places: Sequence[Host], folder: Path) -> None:
        self.places, self.folder = places, folder
        # by which the hosts of this cluster know each other
        self.token = secrets.token_hex(32)
        (folder / "reward.py").write_text(REWARD)
        lines = [json.dumps({"prompt": f"say {i}", "answer": ""}) for i in range(64)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        self.address = f"{places[0].address}:{PORT}"
        for number, host in enumerate(places):
            # by which Ray finds the address of its own host
            route = ["ip", "-n", host.name, "route", "add", "default", "dev", "eth0"]
            subprocess.run(route, check=True)
            first = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            joins = first if not number else [f"--address={self.address}"]
            words = [
                "-m", "ray.scripts.scripts", "start", *joins, f"--node-ip-address={host.address}",
                f"--num-cpus={min(number, 1)}", f"--object-store-memory={STORE}", "--disable-usage-stats",
            ]  # fmt: skip
            done = subprocess.run(
                self.inside(number, words), timeout=RAY_S, capture_output=True, text=True
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"ray start on {host.name}: {done.stdout}{done.stderr}")  # fmt: skip
            print(f"Ray runs at {host.address}", flush=True)

    def inside(self, number: int, words: Sequence[str]) -> list[str]:
        """The command that runs Python with ``words`` on a host, where /tmp/ray is the host's own."""
        own = self.folder / f"ray-{number}"
        own.mkdir(exist_ok=True)
        Path("/tmp/ray").mkdir(exist_ok=True)
        mounted = 'mount --bind "$0" /tmp/ray && exec "$@"'
        # Ray notices that a host is lost within seconds
        beat = ["period_ms=1000", "timeout_ms=1000", "initial_delay_ms=1000", "failure_threshold=3"]  # fmt: skip
        checks = [f"RAY_health_check_{each}" for each in beat]
        access = ["RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={self.token}"]
        shell = [
            "env",
            *checks,
            *access,
            "unshare",
            "-m",
            "sh",
            "-c",
            mounted,
            str(own),
        ]
        return self.places[number].command([*shell, sys.executable, *words])

    def train(
        self, name: str, placement: str, roles: Sequence[str], steps: int,
        watch: Callable[[subprocess.Popen[str], Path], None],
    ) -> dict[str, Any]:  # fmt: skip
        """Run ``weft train`` on the first host, and return its exit code, lines and seconds.

        ``watch``: is called with the process and its folder as soon as it has started.
        """
        recipe, out = self.folder / f"{name}.toml", self.folder / name
        with_reference = any(role is REFERENCE for role in roles)
        recipe.write_text(RECIPE.format(
            reward=self.folder / "reward.py", prompts=self.folder / "prompts.jsonl", placement=placement,
            roles="\n".join(roles), steps=steps, loss=DIVERGENCE if with_reference else "",
        ))  # fmt: skip
        words = ["-m", "weft", "train", str(recipe), f"--out={out}"]
        begun = time.perf_counter()
        process = subprocess.Popen(
            self.inside(0, words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | {"RAY_ADDRESS": self.address}, start_new_session=True,
        )  # fmt: skip
        try:
            watch(process, out)
            said, _ = process.communicate(timeout=RUN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        seconds = time.perf_counter() - begun
        print(said, flush=True)
        return {"code": process.returncode, "said": said.splitlines(), "seconds": seconds}  # fmt: skip

    def host_of(self, role: str) -> int | None:
        """The number of the host on which the process of a role runs; None if none does."""
        for number, host in enumerate(self.places):
            for pid in host.processes():
                with suppress(psutil.Error):
                    words = psutil.Process(pid).cmdline()
                    if (
                        any(ROLES[role] in word for word in words)
                        and "unshare" not in words
                    ):
                        return number
        return None

    def lose(self, number: int) -> None:
        """Pull a host's cable, and then end all that runs there, as where the power fails."""
        host = self.places[number]
        host.link(up=False)
        for pid in host.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def phases_of(out: Path) -> int:
    """How many rollout phases a run has recorded."""
    with suppress(FileNotFoundError):
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return sum('"kind": "rollout"' in line or '"kind":"rollout"' in line for line in lines)  # fmt: skip
    return 0


def await_phases(process: subprocess.Popen[str], out: Path, count: int) -> None:
    """Wait until the run has recorded so many rollout phases, or has ended."""
    while process.poll() is None and phases_of(out) < count:
        time.sleep(0.1)


def digest(out: Path) -> str:
    """A hash of a run's weights."""
    from weft.cache import digest as digest_of

    opened = open_model(str(out), "cpu", print)
    named = sorted(opened.model.named_parameters())
    return str(digest_of([[name, p.detach().contiguous().numpy().tobytes().hex()] for name, p in named]))  # fmt: skip


def placed_run(cluster: Cluster) -> dict[str, Any]:
    """Compare a run whose roles are on other hosts with one whose roles are on its own."""
    places = dict[str, int | None]()

    def look(process: subprocess.Popen[str], out: Path) -> None:
        await_phases(process, out, 1)
        places.update({role: cluster.host_of(role) for role in ROLES})

    both = [WRITERS, REFERENCE]
    here = cluster.train("here", "local", both, 20, nothing)
    placed = cluster.train("placed", "ray", both, 20, look)
    assert here["code"] == placed["code"] == 0
    return {
        "seconds_here": here["seconds"], "seconds_placed": placed["seconds"], "hosts": {**places},
        "weights_equal": digest(cluster.folder / "here") == digest(cluster.folder / "placed"),
    }  # fmt: skip


def nothing(process: subprocess.Popen[str], out: Path) -> None:
    """Leave a run alone."""


def lost_host(
    cluster: Cluster, role: str, lost: list[Host]
) -> Callable[[subprocess.Popen[str], Path], None]:
    """Return a function that loses the host of a ``role`` in the middle of a run, and adds the host to ``lost``."""

    def watch(process: subprocess.Popen[str], out: Path) -> None:
        await_phases(process, out, PHASES)
        number = cluster.host_of(role)
        assert number is not None and number > 0, f"{role} runs on host {number}"
        lost.append(cluster.places[number])
        cluster.lose(number)

    return watch


def lost_rollouts(cluster: Cluster) -> dict[str, Any]:
    """Lose the host of a process that writes answers, and compare with a run that loses nothing."""
    lost = list[Host]()
    plain = cluster.train("plain", "local", [WRITERS], 60, nothing)
    watch = lost_host(cluster, "rollout", lost)
    survived = cluster.train("survived", "ray", [WRITERS], 60, watch)
    code, (host,) = survived["code"], lost
    return {
        "code": code, "seconds": survived["seconds"], "seconds_undisturbed": plain["seconds"],
        "line": next((line for line in survived["said"] if f"host {host.address}" in line), ""),
        "weights_equal": not code and digest(cluster.folder / "plain") == digest(cluster.folder / "survived"),
    }  # fmt: skip


def lost_reference(cluster: Cluster) -> dict[str, Any]:
    """Lose the host of the reference model."""
    lost = list[Host]()
    watch = lost_host(cluster, "reference", lost)
    ended = cluster.train("ended", "ray", [REFERENCE], 60, watch)
    (host,) = lost
    return {
        "code": ended["code"], "seconds": ended["seconds"],
        "line": next((line for line in ended["said"] if f"host {host.address}" in line), ""),
    }  # fmt: skip


#: The parts of the campaign. Each host is lost once at most.
PARTS = {"placed": placed_run, "lost_rollouts": lost_rollouts, "lost_reference": lost_reference}  # fmt: skip


def main() -> None:
    """Make the hosts and the cluster, and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help="which to run; others stay in the file")  # fmt: skip
    args = parser.parse_args()
    if why := unavailable():
        raise SystemExit(why)
    torch.set_num_threads(1)
    results = machine()
    if args.json and args.json.exists():
        results = json.loads(args.json.read_text()) | results
    name = f"rl-{secrets.token_hex(2)}"
    with tempfile.TemporaryDirectory() as folder, hosts(3, name) as places:
        cluster = Cluster(places, Path(folder))
        for part in args.parts.split(","):
            results[part] = PARTS[part](cluster)
            print(part, results[part], flush=True)
            if args.json:
                write(results, args.json)


if __name__ == "__main__":
    main()
