"""Mistakes that cost nothing to see are said before anything is read or computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Command


def _no_work(*given: object, **named: object) -> None:
    raise AssertionError("this reads a model, or searches")


@pytest.fixture(autouse=True)
def nothing_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for work in (
        "weft.checkpoint.model.open_model", "weft.planner.layout_search.search",
        "weft.checkpoint.convert.write.open_foreign",
    ):  # fmt: skip
        monkeypatch.setattr(work, _no_work)


@pytest.mark.parametrize(("words", "code", "said"), [
    ("export --from run --out there", 1, "--out there exists already; choose another folder"),
    ("export --from run --out there --texts a --keep 2", 1, "--out there exists already; choose another folder"),
    ("checkpoint convert run --out there/x --to nothing", 2, "--to 'nothing' is not possible; "),
    ("eval missing.jsonl --from run", 2, "missing.jsonl is no file of questions; docs/how-to/evaluation.md says"),
    ("plan llama3-405x", 1, "model 'llama3-405x' is neither a file nor built in; did you mean 'llama3-405b'?"),
    ("plan llama3-405x --cluster h100", 1, "did you mean 'llama3-405b'?"),
    ("plan llama3-405x --here", 1, "did you mean 'llama3-405b'?"),
    ("plan llama3-8b --cluster h100 --gpus 8 --batch 8 --seq 512 --html there", 1, "cannot write --html there: "),
    ("plan llama3-8b --cluster h100 --gpus 8 --batch 8 --seq 512 --recipe there", 1, "cannot write --recipe there: "),
])  # fmt: skip
def test_cheap_checks_come_first(
    command: Command, words: str, code: int, said: str
) -> None:
    ended, _, err = command(*words.split())
    assert ended == code and said in err and err.count("\n") == 1
