"""Tasks of data sets of prompts, and how their answers are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.errors import WeftError
from weft.recipe import Task
from weft.rl.answer_scorers import SCORERS
from weft.rl.build_task import reward_task
from weft.rl.prompt_task import read_prompts
from weft.rl.reward_task import RewardTask


def dataset(path: Path, seed: int = 0, **settings: Any) -> RewardTask:
    section = Task(reward="dataset", path=str(path), **settings)
    return reward_task(section, seed)


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


RECORDS = [{"prompt": f"{n}*2=", "answer": str(2 * n), "level": n} for n in range(40)]


def test_every_prompt_is_asked_once_in_each_round(tmp_path: Path) -> None:
    task = dataset(write(tmp_path / "prompts.jsonl", RECORDS), scorer="number")
    training = {str(task.question(i).prompt) for i in range(100)}
    size = len(training)
    assert 25 < size < 40
    rounds = [
        [str(task.question(i).prompt) for i in range(n * size, (n + 1) * size)]
        for n in range(3)
    ]
    assert all(set(asked) == training for asked in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    held_out = {str(task.question(i, held_out=True).prompt) for i in range(40)}
    assert training | held_out == {str(r["prompt"]) for r in RECORDS}
    assert not training & held_out
    question = task.question(0)
    factor = int(question.facts["level"])
    assert question.answer == str(2 * factor)
    assert task.score(question, f"I say {2 * factor}.00") == 1
    assert task.score(question, f"I say {2 * factor + 1}") == 0


def test_parquet_reads_as_json_lines(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pa.Table.from_pylist(RECORDS), tmp_path / "prompts.parquet"
    )
    lines = write(tmp_path / "prompts.jsonl", RECORDS)
    assert read_prompts(str(tmp_path / "prompts.parquet")) == read_prompts(str(lines))


def test_messages(tmp_path: Path) -> None:
    """A turn of the assistant at the end is the right answer."""
    asked = [{"role": "user", "content": "2*3=?"}]
    answered = [*asked, {"role": "assistant", "content": "6"}]
    path = write(tmp_path / "chats.jsonl", [{"messages": answered}, {"prompt": asked}])
    first, second = read_prompts(str(path))
    assert first.prompt == second.prompt == asked
    assert (first.answer, second.answer) == ("6", "")


def test_a_file_of_its_own_for_evaluation(tmp_path: Path) -> None:
    """Its prompts are never asked in training, though the other file has them, too."""
    path = write(tmp_path / "prompts.jsonl", RECORDS)
    apart = write(tmp_path / "apart.jsonl", RECORDS[:3])
    task = dataset(path, held_out=str(apart))
    assert [task.question(i, held_out=True).prompt for i in range(3)] == [
        r["prompt"] for r in RECORDS[:3]
    ]
    asked = {str(task.question(i).prompt) for i in range(37)}
    assert asked == {str(r["prompt"]) for r in RECORDS[3:]}


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([{"answer": "6"}], r"prompts.jsonl:1: it has no prompt; name it 'prompt' or"),
        ([RECORDS[0], 3], r"prompts.jsonl:2: a question is an object"),
        ([{"prompt": 3}], r":1: 'prompt' is a text, or a list of messages"),
        ([{"messages": [{"role": "user"}]}], r":1: message 1 \(user\) is empty"),
    ],
)
def test_wrong_records_are_named(tmp_path: Path, records: list[Any], why: str) -> None:
    task = dataset(write(tmp_path / "prompts.jsonl", records))
    with pytest.raises(WeftError, match=why):
        task.question(0)


def test_too_few_prompts(tmp_path: Path) -> None:
    task = dataset(write(tmp_path / "prompts.jsonl", [{"prompt": "a"}]))
    with pytest.raises(WeftError, match=r"held out"):
        task.question(0)
        task.question(0, held_out=True)
    with pytest.raises(WeftError, match=r"set tasks.path to a file of prompts"):
        reward_task(Task(reward="dataset")).question(0)


@pytest.mark.parametrize(
    ("scorer", "answer", "right", "reward"),
    [
        ("exact", " 6\n", "6", 1),
        ("exact", "6.", "6", 0),
        ("contains", "It is Rome.", "Rome", 1),
        ("contains", "anything", " ", 0),
        ("number", "first 3, then 1,234.50", "#### 1234.5", 1),
        ("number", "-5", "5", 0),
        ("number", "none", "5", 0),
        ("number", "\u0665", "5", 0),
        ("number", "5" * 5000, "5" * 5000, 0),
        ("regex", "<b>6</b>\n", r"<b>\d</b>", 1),
        ("regex", "x<b>6</b>", r"<b>\d</b>", 0),
    ],
)
def test_scorers(scorer: str, answer: str, right: str, reward: float) -> None:
    assert SCORERS[scorer](answer, right) == reward
