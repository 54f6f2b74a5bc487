"""Ranks that are forks: only where that is safe, with the variables and the exit codes of interpreters."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from tests import started
from weft import plugins
from weft.run import forked
from weft.run.signals import requests


def try_to_fork(how: str) -> None:
    """Fork two ranks, and say how many came; those that came end without a word."""
    requests.program = None if how == "somebody else's program" else print
    if how == "a plugin":
        plugins.loaded.add("anything")
    if how == "a thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    ranks = forked.fork_ranks([], 2, ["weft.errors"])
    for rank in ranks:
        os.close(rank._environment)
    print(len(ranks), [rank.wait(60) for rank in ranks])


@pytest.mark.parametrize("how", ["", "a plugin", "a thread", "somebody else's program"])
def test_what_is_not_safe_is_left_to_interpreters(how: str) -> None:
    done = started.run(how, main=try_to_fork)
    assert (done.stdout, done.stderr) == ("0 []\n" if how else "2 [1, 1]\n", "")


def test_a_variable_switches_it_off() -> None:
    done = started.run("", main=try_to_fork, env=os.environ | {forked.FORK: "0"})
    assert done.stdout == "0 []\n"


def show(folder: str) -> None:
    """Fork two ranks that write what they are to files; print their exit codes."""

    def be_rank() -> None:
        known = {name: os.environ.get(name) for name in ("RANK", "HOME", "LEFT")}
        text = json.dumps([sys.argv[1:], known, os.getsid(0) == os.getpid()])
        Path(folder, os.environ["RANK"]).write_text(text)
        sys.exit(int(os.environ["RANK"]) * 3)

    requests.program, os.environ["LEFT"] = be_rank, "what the launcher has"
    print("once")  # what is in a buffer is not written by forks again
    ranks = forked.fork_ranks(["train", "x y"], 2, [])
    for number, rank in enumerate(ranks):
        rank.begin({"RANK": str(number), "HOME": "/"})
    print([rank.wait(60) for rank in ranks], [rank.poll() for rank in ranks])


def test_a_fork_is_what_an_interpreter_would_be(tmp_path: Path) -> None:
    done = started.run(tmp_path, main=show)
    assert (done.stdout, done.stderr) == ("once\n[0, 3] [0, 3]\n", "")
    for rank in "01":
        known = {"RANK": rank, "HOME": "/", "LEFT": None}
        assert json.loads((tmp_path / rank).read_text()) == [
            ["train", "x y"],
            known,
            True,
        ]
