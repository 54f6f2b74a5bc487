"""Killed ranks of a run with rewards: it resumes from its checkpoints to the bits of a run without a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch

from tests.rl.test_rl_loader import TREE, letters, records
from weft.checkpoint.model import open_model
from weft.recipe.toml import write_toml

__all__ = ["letters"]

#: Two ranks that write and train in turn, and save after every second update.
KILLED = {
    **TREE,
    "layout": {"dp": 2},
    "rl": TREE["rl"] | {"keep": 100},
    "train": TREE["train"] | {"steps": 80},
    "roles": {"rollout": {"invariant": True}},
    "checkpoint": {"every": 2, "keep": 2},
    "resilience": {"survive": False},  # with fewer ranks, sums are rounded otherwise
}


def begun(recipe: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "weft", "train", str(recipe), "--out", str(out)]
    log = (out.parent / f"{out.name}.log").open("ab")
    return subprocess.Popen([*words, *more], stdout=log, stderr=log)


def parameters_of(run: Path) -> dict[str, torch.Tensor]:
    opened = open_model(str(run), "cpu", print)
    return {name: p.detach().clone() for name, p in opened.model.named_parameters()}


def ranks_of(run: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the run that are ranks: those that its launcher has forked."""
    with suppress(psutil.Error):
        children = psutil.Process(run.pid).children()
        return [child.pid for child in children if "train" in child.cmdline()]
    return []


def said_by(out: Path) -> str:
    return (out.parent / f"{out.name}.log").read_text()


def steps_done(out: Path) -> int:
    if not (out / "metrics.jsonl").is_file():
        return 0
    return max((row["step"] for row in records(out, "train")), default=0)


@pytest.mark.soak
@pytest.mark.slow(300)
def test_killed_ranks_go_on_to_the_bits_of_a_run_without_a_kill(
    tmp_path: Path, letters: dict[str, Any]
) -> None:
    recipe, whole, out = tmp_path / "r.toml", tmp_path / "whole", tmp_path / "out"
    recipe.write_text(write_toml(KILLED | {"tasks": [letters | {"workers": 1}]}))
    assert begun(recipe, whole).wait(300) == 0
    chance, run = Random(3), begun(recipe, out)
    for kill in range(5):
        goal, deadline = steps_done(out) + chance.randint(3, 10), time.monotonic() + 120
        while steps_done(out) < goal:
            assert run.poll() is None and time.monotonic() < deadline, said_by(out)
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.2))
        pids = ranks_of(run)
        # the launcher first where all are killed, so that it ends nobody
        for pid in [run.pid, *pids] if kill % 3 == 2 else [chance.choice(pids)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert run.wait(60) != 0  # the others end by themselves
        run = begun(recipe, out, "--resume", "auto")
    assert run.wait(300) == 0, said_by(out)
    assert said_by(out).count("resumed from") == 5
    rewards = {row["reward"] for row in records(whole, "rollout")}
    assert len(rewards) > 5, "nothing was learned"
    a, b = parameters_of(whole), parameters_of(out)
    assert all(torch.equal(a[name], b[name]) for name in a)
    # the answers too: each phase is written again as it was
    for file in sorted((whole / "answers").iterdir()):
        assert (out / "answers" / file.name).read_text() == file.read_text()
