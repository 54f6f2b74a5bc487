"""``weft experts``: one command trains experts of different size apart, and what it leaves is a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Command
from weft.train.expert_set import read_expert_set

SHARED = [
    "layout.island=1", "layout.shard=1", "sync.update=average", "sync.every=1", "sync.compress=none",
    "data.seq_len=64", "train.batch=4", "optimizer.lr=1e-2", "model.heads=2",
]  # fmt: skip


def experts(*more: str) -> list[str]:
    words = ["experts", "islands"]
    for setting in SHARED:
        words += ["--set", setting]
    return [*words, *more]


def documents(path: Path, alphabet: str) -> str:
    """Steps of one or two letters up an alphabet, of which the next letter is half known."""
    lines = []
    for number in range(60):
        at, text = number, ""
        for step in range(100):
            at += 1 + (number * 7 + step * step) % 3 // 2
            text += alphabet[at % len(alphabet)]
        lines.append(json.dumps({"text": text}) + "\n")
    path.write_text("".join(lines))
    return f"data.kind=jsonl data.path={path}"


@pytest.mark.usefixtures("forked_python")
@pytest.mark.slow(10)
def test_experts_that_were_trained_apart_answer_as_a_model(
    launched: Command, tmp_path: Path
) -> None:
    letters = documents(tmp_path / "letters.jsonl", "abcdefgh")
    digits = documents(tmp_path / "digits.jsonl", "0123456789")
    words = experts(
        "--expert", f"letters {letters} model.embed=24 model.layers=2",
        "--expert", f"digits {digits} model.embed=16 model.layers=1",
        "--set", "train.steps=40", "--out", str(tmp_path / "set"),
    )  # fmt: skip
    first = launched(*words, "--only", "digits")
    assert "not joined yet: letters" in first[1]
    rows = json.loads(launched(*words, "--only", "letters", "--json")[1])
    assert [row["name"] for row in rows] == ["letters", "digits"]
    assert rows[0]["flops"] > 2 * rows[1]["flops"]
    assert read_expert_set(tmp_path / "set") is not None
    both = tmp_path / "both.jsonl"
    both.write_text(
        "".join(
            (tmp_path / f"{name}.jsonl").read_text() for name in ("letters", "digits")
        )
    )
    asked = "eval", "--checkpoint", str(tmp_path / "set"), "--held-out", str(both)
    loss = json.loads(launched(*asked, "--json")[1])["held-out"]
    assert loss["loss"] < 0.8 * min(each["loss"] for each in loss["members"])
    written = launched(
        "generate", "--checkpoint", str(tmp_path / "set"), "--prompt", "01234567",
        "--tokens", "12", "--temperature", "0",
    )  # fmt: skip
    assert set(written[1].strip()) <= set("0123456789")


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--expert", "a=b"], "begin with a name"),
        (["--expert", "../a"], "begin with a name"),
        (["--expert", "code model.layers"], "no section.key=value"),
        (["--expert", "code", "--expert", "code"], "two experts are named"),
        (["--expert", "code", "--only", "prose"], "none of the experts"),
        (["--expert", "code", "--top", "2"], "--top 2 of 1"),
        (["--expert", "code", "--prior", "-1"], "--prior"),
        (["--expert", "code", "--expert", "prose data.tokenizer=gpt2"], "tokenizers"),
    ],
)
def test_what_cannot_be_joined_is_refused_before_anything_is_trained(
    command: Command, tmp_path: Path, more: list[str], word: str
) -> None:
    code, _, said = command(*experts(*more), "--out", str(tmp_path / "set"))
    assert code == 2 and word in said and said.count("\n") == 1
    assert not (tmp_path / "set").exists()
