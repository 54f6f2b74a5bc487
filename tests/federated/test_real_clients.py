"""A server and clients in processes of their own: the model is the one to which a virtual clock comes."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.started import Started
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

#: Policies with settings of theirs, and what a real run of them is compared by.
POLICIES = [
    "fedavg",
    "fedbuff",
    "fedasync",
    "fedfix",
    "fedcompass",
    "fedavg-m",
    "scaffold",
    "scaffold-m",
]


def write_texts(folder: Path, number: int) -> Path:
    rng, path = random.Random(number), folder / f"client{number}.jsonl"
    with path.open("w") as file:
        for _ in range(30):
            text = "".join(
                rng.choice("abcdefgh \n"[number:])
                for _ in range(rng.choice([5, 20, 60]))
            )
            file.write(json.dumps({"text": text}) + "\n")
    return path


class Federation:
    """A server and clients as processes. ``federated``: settings of the section; ``tree``: of the recipe."""

    def __init__(
        self, folder: Path, tree: dict[str, object], **federated: object
    ) -> None:
        self.folder, self.clients = folder, dict[str, Path]()
        recipe = {
            "name": "few", "model": {"layers": 1, "embed": 16, "heads": 2},
            "train": {"batch": 2, "dtype": "float64", "threads": 1},
            "optimizer": {"kind": "sgd", "lr": 0.02, "warmup": 0},
            "checkpoint": {"every": 2}, "validation": {"every": 0}, "data": {"seq_len": 24, "cache": str(folder)},
            "federated": {"listen": "127.0.0.1:0", "patience": 120.0, "steps": 3, "rounds": 4, "clients": 2}
            | federated,
            **tree,
        }  # fmt: skip
        self.recipe = folder / "server.toml"
        self.recipe.write_text(write_toml(recipe))
        self.run = folder / "server"
        self.processes: dict[str, Started] = {}

    def start(self, name: str, *words: object) -> Started:
        with (self.folder / f"{name}.log").open("ab") as said:
            self.processes[name] = Started(
                *words, stdout=said, stderr=subprocess.STDOUT
            )
        return self.processes[name]

    def serve(self, *words: object) -> None:
        count = self.said("server").count("clients join at")
        self.start("server", "train", self.recipe, "--out", self.run, *words)
        self.wait_for("server", "clients join at", count + 1)

    def join(self, number: int, *words: object) -> None:
        name = f"client{number}"
        data = self.folder / f"{name}.jsonl"
        if not data.exists():
            write_texts(self.folder, number)
        self.clients[name] = data
        self.start(
            name, "client", "--join", self.run / "invitation", "--data", data, "--name", name, "--out",
            self.folder / name, "--set", f"data.cache={self.folder}", *words,
        )  # fmt: skip

    def said(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(
        self, name: str, words: str, times: int = 1, limit: float = 300
    ) -> None:
        deadline = time.monotonic() + limit
        while self.said(name).count(words) < times:
            assert time.monotonic() < deadline, (
                f"{name} has not said {words!r}: {self.said(name)}"
            )
            code = self.processes[name].poll()
            assert code is None, f"{name} has ended with {code}: {self.said(name)}"
            time.sleep(0.1)

    def end(self, limit: float = 400) -> None:
        """Wait until all have ended well."""
        for name, process in self.processes.items():
            code = process.wait(limit)
            # a client that comes back after the end finds nobody, and says so
            late = name != "server" and " answer" in self.said(name).splitlines()[-1]
            assert code == 0 or late, f"{name}: {self.said(name)}"

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def model(self) -> dict[str, torch.Tensor]:
        """The server's last model, and the one that it began with under ``start.`` names."""
        job = prepare(load_recipe(self.recipe))
        built = build_for_training(job.shape, Mesh.single(), job.recipe)
        start = {
            f"start.{h.name}": h.local.detach().clone() for h in built.state.learning
        }
        checkpoints = candidates(open_storage(str(self.run / "checkpoints")))
        load_state(open_checkpoint(checkpoints[0]), built.state)
        return start | {h.name: h.local.detach().clone() for h in built.state.learning}

    def replayed(self) -> dict[str, torch.Tensor]:
        """The model to which a virtual clock comes with the recorded events."""
        recipes = {
            name: load_recipe(
                self.folder / name / "recipe.toml",
                [f"data.cache={self.folder}"],
                data=str(data),
            )
            for name, data in self.clients.items()
        }
        return replayed_model(
            load_recipe(self.recipe), self.run, recipes, self.folder / "replay"
        )


def same(real: dict[str, torch.Tensor], replayed: dict[str, torch.Tensor]) -> None:
    for name, x in replayed.items():
        moved = float((real[name] - real[f"start.{name}"]).abs().max())
        assert moved > 1e-5, name
        assert float((real[name] - x).abs().max()) <= 1e-10 * moved, name


@pytest.mark.slow(30)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_three_processes_come_to_the_model_of_the_virtual_clock(
    tmp_path: Path, policy: str
) -> None:
    with Federation(tmp_path, {}, policy=policy) as federation:
        federation.serve()
        for number in range(2):
            federation.join(number)
        federation.end()
        same(federation.model(), federation.replayed())
        records = read_metrics(federation.run)["federated"]
        assert len(records) == 4 and all(record["loss"] > 0 for record in records)
        assert "client1" in (federation.run / "federation.html").read_text()


@pytest.mark.slow(40)
@pytest.mark.soak
@pytest.mark.parametrize(
    ("policy", "every", "compress"), [("fedavg", 1, "none"), ("scaffold", 3, "topk:0.1")]
)  # fmt: skip
def test_a_server_and_a_client_that_are_killed_go_on(
    tmp_path: Path, policy: str, every: int, compress: str
) -> None:
    """SIGKILL to the server, then to a client: both come back, and the model is that of what counted."""
    about = {"policy": policy, "compress": compress}
    tree = {"checkpoint": {"every": every}}
    with Federation(tmp_path, tree, rounds=16, grace=3.0, **about) as federation:
        federation.serve()
        for number in range(2):
            federation.join(number)
        federation.wait_for("server", "step-000003")
        federation.processes["server"].kill()
        federation.processes["server"].wait()
        federation.serve("--resume", "auto")
        federation.wait_for("server", "step-000006")
        federation.processes["client1"].kill()
        federation.processes["client1"].wait()
        federation.join(1)
        federation.end()
        assert len([e for e in read_events(federation.run) if e.kind == "leave"]) >= 3
        same(federation.model(), federation.replayed())


@pytest.mark.slow(30)
@pytest.mark.soak
def test_a_stopped_server_is_waited_for(tmp_path: Path) -> None:
    """SIGTERM: the server saves and lets its clients wait; with --resume all goes on."""
    with Federation(tmp_path, {}, rounds=8) as federation:
        federation.serve()
        for number in range(2):
            federation.join(number)
        federation.wait_for("server", "step-000002")
        federation.processes["server"].send_signal(signal.SIGTERM)
        assert federation.processes["server"].wait(60) == 128 + signal.SIGTERM
        federation.serve("--resume", "auto")
        federation.end()
        same(federation.model(), federation.replayed())
