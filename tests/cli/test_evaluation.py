"""Ranks that die, stall or are asked to stop while a run evaluates."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.net.test_lost import TIMEOUT, lives, small
from tests.started import Started
from weft.checkpoint.store import committed_checkpoints


@pytest.mark.slow(40)
@pytest.mark.parametrize(("layout", "way", "code", "said"), [
    pytest.param("shard=2", signal.SIGKILL, 1, "rank 1 was killed by SIGKILL", marks=pytest.mark.soak),
    pytest.param("pp=2", signal.SIGSTOP, 1, f"rank 1 has not answered for {TIMEOUT} s and is stopped",
                 marks=pytest.mark.soak),
    ("tp=2", signal.SIGINT, 130, ""),
])  # fmt: skip
def test_while_questions_are_asked(
    tmp_path: Path, layout: str, way: signal.Signals, code: int, said: str
) -> None:
    """A rank is killed or stopped and named, nobody hangs; Ctrl-C leaves the questions, takes a step and saves."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(
            json.dumps({"prompt": f"{i}", "answer": "abc"}) + "\n"
            for i in range(10_000)
        )
    )
    more = [
        f"tasks=[{{path='{questions}'}}]",
        "validation.every=1000",
        "train.steps=9",
        "optimizer.ema=0.9",
    ]
    command, errors = (
        small(tmp_path, layout, *more, "optimizer.use_ema=true"),
        tmp_path / "stderr",
    )
    with errors.open("w") as stderr:
        parent = Started(
            *command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=stderr
        )
    metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and '"validation"' in metrics.read_text()):
        assert parent.poll() is None and time.monotonic() < deadline, errors.read_text()
        time.sleep(0.1)
    ranks = parent.ranks()
    if way == signal.SIGINT:
        parent.send_signal(way)
    else:
        ranks[1].send_signal(way)
    assert parent.wait(10 * TIMEOUT) == code, errors.read_text()
    text = errors.read_text()
    assert said in text and text.count("weft: error") == (code == 1), text
    assert not any(lives(rank) for rank in ranks)
    assert len(committed_checkpoints(tmp_path / "run/checkpoints")) == (code == 130)
    assert ("nobody waits for the answers" in metrics.read_text()) == (code == 130)
