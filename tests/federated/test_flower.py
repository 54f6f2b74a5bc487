"""The path over Flower, where its package is installed: in an environment of its own, with Flower's apps and messages.

python3.11 -m venv ENV && ENV/bin/pip install weft[flower] pytest
ENV/bin/python -m pytest tests/federated/test_flower.py
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.errors import UsageError
from weft.observe.run_metrics import read_metrics
from weft.recipe import load_recipe
from weft.recipe.toml import write_toml

flwr = pytest.importorskip("flwr")


@pytest.fixture(autouse=True)
def within_a_task() -> None:
    """Flower makes messages within a task of its own alone."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


class LoopbackGrid:
    """A grid whose nodes are apps in this process. ``app``: the app of every node; ``contexts``: by node."""

    def __init__(self, app: Any, contexts: dict[int, Any]) -> None:
        self.app, self.contexts = app, contexts
        self.workers = {node: ThreadPoolExecutor(1) for node in contexts}
        self.answers: dict[str, Future[Any]] = {}

    def get_node_ids(self) -> list[int]:
        return [*self.contexts]

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        identities = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = identity = str(uuid.uuid4())
            node = message.metadata.dst_node_id
            self.answers[identity] = self.workers[node].submit(
                self.app, message, self.contexts[node]
            )
            identities.append(identity)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        done = [i for i in message_ids if i in self.answers and self.answers[i].done()]
        return [self.answers.pop(i).result() for i in done]


def write_recipe(folder: Path, **federated: object) -> Path:
    for number in range(3):
        rng = random.Random(number)
        texts = [
            "".join(rng.choice("abcdef \n"[number:]) for _ in range(40))
            for _ in range(20)
        ]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"client{number}.jsonl").write_text(lines)
    recipe = {
        "name": "few", "model": {"layers": 1, "embed": 16, "heads": 2}, "train": {"batch": 2, "dtype": "float64"},
        "optimizer": {"kind": "sgd", "lr": 0.02, "warmup": 0}, "checkpoint": {"every": 2}, "validation": {"every": 0},
        "data": {"sources": [{"kind": "jsonl", "path": str(folder / "client2.jsonl")}], "seq_len": 24,
                 "cache": str(folder)},
        "federated": {"listen": "flower:0", "patience": 60.0, "steps": 2, "rounds": 3, "clients": 2, **federated},
    }  # fmt: skip
    (folder / "server.toml").write_text(write_toml(recipe))
    recipe["federated"] = {
        key: value for key, value in recipe["federated"].items() if key != "listen"
    }  # type: ignore[attr-defined]
    recipe["train"] |= {"steps": 1000}  # type: ignore[operator]
    recipe["federated"] |= {"join": "flower", "name": "any"}  # type: ignore[operator]
    (folder / "client.toml").write_text(write_toml(recipe))
    return folder / "server.toml"


def contexts(folder: Path) -> dict[int, Any]:
    from flwr.app import Context, RecordDict

    return {
        node: Context(
            run_id=1, node_id=node, state=RecordDict(), run_config={},
            node_config={
                "weft-recipe": str(folder / "client.toml"), "weft-data": str(folder / f"client{number}.jsonl"),
                "weft-name": f"client{number}", "weft-folder": str(folder / f"client{number}"),
            },
        )
        for number, node in enumerate((11, 22))
    }  # fmt: skip


@pytest.mark.slow(20)
@pytest.mark.parametrize("compress", ["none", "topk:0.1"])
def test_a_run_over_flower_is_that_of_the_virtual_clock(
    tmp_path: Path, compress: str
) -> None:
    from weft.federated import flower_app
    from weft.federated.trained_cohort import replayed_model, stored_model

    path = write_recipe(tmp_path, compress=compress)
    grid = LoopbackGrid(flower_app.client, contexts(tmp_path))
    outcome = flower_app.serve_over_flower(grid, load_recipe(path), tmp_path / "server")
    assert outcome.progress.step == 3
    records = read_metrics(outcome.run)["federated"]
    assert [sorted(r["clients"]) for r in records] == [["client0", "client1"]] * 3
    recipes = {
        f"client{n}": load_recipe(
            tmp_path / "client.toml", [f"federated.name=client{n}"], data=str(tmp_path / f"client{n}.jsonl")
        )
        for n in range(2)
    }  # fmt: skip
    replayed = replayed_model(
        load_recipe(path), outcome.run, recipes, tmp_path / "replay"
    )
    real = stored_model(load_recipe(path), outcome.run)
    for name, x in replayed.items():
        assert torch.allclose(real[name], x, rtol=0, atol=1e-13), name


def test_what_flower_cannot_carry_is_refused(tmp_path: Path) -> None:
    from weft.federated import flower_app

    recipe = load_recipe(write_recipe(tmp_path, secure=True))
    with pytest.raises(UsageError, match="one answer"):
        flower_app.serve_over_flower(
            LoopbackGrid(None, {}), recipe, tmp_path / "server"
        )
    with pytest.raises(UsageError, match="no weft-folder"):
        flower_app._setting({}, "weft-folder")


def test_telemetry_is_off() -> None:
    import os

    import weft.federated.flower_app  # noqa: F401

    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
