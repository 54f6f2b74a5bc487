"""A reward model that the run serves: the same rewards as when every process loads it, bytes counted, ended with it."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.generate.test_best_answer import words_model
from tests.rl.test_rl_loader import TREE, recipe, records
from tests.started import Started
from weft.api import start as train
from weft.errors import UsageError, WeftError
from weft.layout.mesh import Mesh
from weft.recipe import Recipe
from weft.recipe.roles_section import RewardRole
from weft.rl import reward_servers
from weft.rl.reward_servers import RewardServers, served_folder
from weft.train.setup import prepare

START = TREE["rl"] | {"start": {"steps": 0}}


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    """A reward model of words, which likes six best."""
    folder = tmp_path / "judge"
    kind = transformers.LlamaForSequenceClassification
    model = words_model(folder, kind, num_labels=1)
    with torch.no_grad():
        model.score.weight[0] = torch.arange(16) / 4 + 0.3
    model.save_pretrained(folder)
    return folder


def given(judge: Path | str, folder: Path, ranks: int) -> Recipe:
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"begin {i}", "answer": "six"}) for i in range(32)]
    prompts.write_text("\n".join(lines) + "\n")
    task: dict[str, Any] = {
        "reward": "reward-model",
        "model": str(judge),
        "path": str(prompts),
    }
    task |= {"workers": 1, "megabytes": 4096, "seconds": 60, "limit": 1, "every": 0}
    roles = {"reward": {"ranks": ranks, "threads": 1}} if ranks else None
    steps = TREE["train"] | {"steps": 2}
    return recipe(tasks=[task], rl=START, roles=roles, train=steps)


@pytest.mark.slow(10)
def test_a_run_with_a_served_reward_model_is_the_same(
    judge: Path, tmp_path: Path, forked_python: list[Started]
) -> None:
    loaded = train(given(judge, tmp_path, 0), out=tmp_path / "loaded")
    served = train(given(judge, tmp_path, 1), out=tmp_path / "served")
    phases = records(served.run, "rollout")
    assert [r["reward"] for r in records(loaded.run, "rollout")] == [r["reward"] for r in phases]  # fmt: skip
    for phase in phases:
        assert phase["reward"] > 1 and phase["unscored"] == 0
        # at least the question, and {"score": x}, for each of 16 answers
        assert phase["reward_sent_bytes"] > 16 * len('{"messages": [{"role"')
        assert phase["reward_received_bytes"] >= 16 * len('{"score":0.0}')
    (server,) = (each for each in forked_python if str(judge) in each.args)
    assert server.poll() is not None


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    tasks = given("http://127.0.0.1:1/v1", tmp_path, 1)
    assert [served_folder(task) for task in tasks.tasks] == [""]
    with pytest.raises(UsageError, match="no \\[\\[tasks\\]\\] has reward = 'reward-m"):
        prepare(tasks)
    without = recipe(roles={"reward": {"device": "cuda"}})
    with pytest.raises(UsageError, match=r"set roles\.reward\.ranks = 1, or leave it"):
        prepare(without)


@pytest.mark.slow(5)  # by a real interpreter
def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    nowhere = given(tmp_path / "no", tmp_path, 1).tasks
    with pytest.raises(WeftError, match=r"/no \(roles.reward\) has ended with exit co"):
        RewardServers(nowhere, RewardRole(ranks=1), Mesh.single(), 60.0)


def test_a_run_that_is_asked_to_end_waits_for_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, calls = threading.Event(), list[str]()

    class Loading(io.StringIO):
        """Lines of a server that says nothing before it ends."""

        def __next__(self) -> str:
            ended.wait(30)
            raise StopIteration

    class Server:
        stdout = Loading()

        def terminate(self) -> None:
            calls.append("terminate")
            ended.set()

        def wait(self, timeout: float | None = None) -> int:
            return 0

    monkeypatch.setattr(reward_servers, "_start", lambda *words: Server())
    tasks = given("judge", tmp_path, 1).tasks
    role = RewardRole(ranks=1)
    with pytest.raises(WeftError, match="asked to end before the server of the reward"):
        RewardServers(tasks, role, Mesh.single(), 20.0, lambda: True)
    assert calls == ["terminate"]
