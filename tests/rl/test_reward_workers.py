"""Rewards in processes of their own: whatever a reward does, the other answers are scored, and nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from weft.errors import WeftError
from weft.recipe import Task
from weft.rl.build_task import reward_task
from weft.rl.reward_workers import RewardWorkers, Scored, reward_workers, task_words
from weft.rl.rollout import RewardQuestion

REWARD = """
import os, time

def judge(answer, question):
    print("this is no score")
    if answer == "raise":
        raise KeyError("lost")
    if answer == "hang":
        time.sleep(60)
    if answer == "grow":
        return len(bytearray(900 << 20))
    if answer == "end":
        os._exit(3)
    if answer == "leave":
        raise SystemExit(0)
    if answer == "deep":
        return judge("deep", question)
    odd = {"nan": float("nan"), "text": "much", "none": None, "huge": 10**400, "large": -1e300}
    return odd.get(answer, len(answer) * question.facts["factor"])
"""
QUESTION = RewardQuestion("?", facts={"factor": 0.5})


def table(folder: Path, **settings: Any) -> Task:
    file = folder / "reward.py"
    if not file.exists():
        file.write_text(REWARD)
    section = Task(reward=f"{file}:judge", **settings)
    return section


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardWorkers]:
    settings = table(
        tmp_path_factory.mktemp("rewards"), seconds=0.5, megabytes=256, workers=2
    )
    with reward_workers(settings) as workers:
        yield workers


def test_what_fails_has_no_score_and_all_else_has(workers: RewardWorkers) -> None:
    bad = ["raise", "nan", "text", "none", "huge", "large", "leave", "deep", "grow", "end", "hang"]  # fmt: skip
    answers = [word for each in bad for word in (each, "good")]
    scored = workers.scores([QUESTION] * len(answers), answers)
    assert scored[1::2] == [Scored(2.0)] * len(bad)
    assert all(score.value is None for score in scored[::2])
    whys = [score.why for score in scored[::2]]
    assert re.fullmatch(r"raised KeyError: 'lost' \(.*reward.py:7\)", whys[0])
    assert whys[1:4] == [
        "returned nan",
        "returned str, which is no number",
        "returned NoneType, which is no number",
    ]
    assert whys[4] == "returned an int that is too large"
    assert whys[5] == "returned -1e+300, more than 1e+15"
    assert whys[6].startswith("raised SystemExit: 0")
    assert whys[7].startswith("raised RecursionError")
    assert whys[8:] == [
        "needs more than 256 MB of memory",
        "its process ended, and the next one did, too",
        "took longer than 0.5 s",
    ]


def test_texts_of_any_kind_arrive(workers: RewardWorkers) -> None:
    odd = ["", "\n", '"}\\', "\u2028\x00", "\ud800", "é" * 300_000]
    lengths = [score.value for score in workers.scores([QUESTION] * len(odd), odd)]
    assert lengths == [len(text) / 2 for text in odd]


def test_killed_and_frozen_processes_lose_nothing(workers: RewardWorkers) -> None:
    """An answer whose process is killed from outside is scored by another one."""
    answers = ["a" * n for n in range(400)]
    done = threading.Event()

    def kill() -> None:
        for number in range(8):
            time.sleep(0.02)
            for pid in workers.pids[number % 2 : number % 2 + 1]:
                with suppress(ProcessLookupError):  # replaced meanwhile
                    os.kill(pid, signal.SIGSTOP if number == 5 else signal.SIGKILL)
            if done.is_set():
                return

    killer = threading.Thread(target=kill)
    killer.start()
    scored = workers.scores([QUESTION] * len(answers), answers)
    done.set()
    killer.join()
    values = [score.value for score in scored]
    # the one that was frozen may be late, and one may have met two kills
    assert sum(value is None for value in values) <= 3
    assert all(v in (None, n / 2) for n, v in enumerate(values))


def test_a_run_that_is_asked_to_end_waits_for_no_reward(workers: RewardWorkers) -> None:
    """It ends while the reward still hangs, not when its time is over."""

    def look() -> None:
        if any(worker.item is not None for worker in workers._workers):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workers.scores([QUESTION], ["hang"], look)
    assert workers.scores([QUESTION], ["good"]) == [Scored(2.0)]


def test_a_call_that_was_interrupted_does_not_disturb_the_next(
    workers: RewardWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            workers, "_replies", lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            workers.scores([QUESTION] * 2, ["hang", "aaaa"])
    assert workers.scores([QUESTION], ["good"]) == [Scored(2.0)]


def test_a_task_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    settings = table(tmp_path)
    words = task_words(settings)
    (tmp_path / "reward.py").write_text("judge = 1 / 0")
    with pytest.raises(WeftError, match=r"cannot be built: .*ZeroDivisionError"):
        RewardWorkers(words, 1).scores([QUESTION], ["good"])


def test_processes_end_with_their_owner(tmp_path: Path) -> None:
    with reward_workers(table(tmp_path, workers=1)) as workers:
        assert workers.scores([QUESTION], ["good"]) == [Scored(2.0)]
        (pid,) = workers.pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(WeftError, match="have been closed"):
        workers.scores([QUESTION], ["good"])


def test_wrong_functions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    for text, name, why in (
        (None, "judge", "there is no file"),
        ("import nothing_of_this_name", "judge", "cannot be imported: ModuleNotFound"),
        ("judge = 3", "judge", "has no function 'judge'"),
        ("def judge(answer): ...", "judge", "cannot be called with"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(WeftError, match=why):
            reward_task(Task(reward=f"{file}:{name}"))
