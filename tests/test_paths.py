"""Paths of users that lead nowhere: a link to itself, a home folder of nobody. Commands say so in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import weft
from tests.conftest import Command
from weft.paths import home_path, real_path


@pytest.fixture
def loop(tmp_path: Path) -> str:
    link = tmp_path / "loop"
    link.symlink_to("loop")
    return str(link)


def test_paths_that_lead_nowhere_stay_as_they_are(loop: str, tmp_path: Path) -> None:
    assert real_path(loop) == Path(loop) and real_path(f"{loop}/a") == Path(loop, "a")
    assert home_path("~nobody-at-all/x") == Path("~nobody-at-all/x")
    (tmp_path / "to").symlink_to(tmp_path / "a")
    assert real_path(tmp_path / "to" / "..") == tmp_path.resolve()
    assert home_path("~/x") == Path.home() / "x" and home_path("a~") == Path("a~")


@pytest.mark.parametrize("words", [
    ["report", "LOOP"], ["report", "~nobody-at-all/x"], ["doctor", "LOOP"], ["train", "LOOP"],
    ["train", "quickstart", "--set", "data.kind=text", "--set", "data.path=LOOP"],
    ["train", "quickstart", "--set", "data.kind=text", "--set", "data.path=~nobody-at-all/x"],
    ["train", "quickstart", "--resume", "LOOP"], ["generate", "--checkpoint", "LOOP", "--prompt", "a"],
    ["generate", "--checkpoint", "~nobody-at-all/x", "--prompt", "a"],
], ids=" ".join)  # fmt: skip
def test_commands_say_so(
    command: Command, loop: str, tmp_path: Path, words: list[str]
) -> None:
    out = ["--out", str(tmp_path / "out")] if words[0] == "train" else []
    code, _, said = command(*[word.replace("LOOP", loop) for word in words], *out)
    assert code and said.count("weft: error:") == 1, said
    assert "traceback" not in said.lower() and "RuntimeError" not in said
    assert re.search(r"loop|~nobody-at-all|Too many levels", said)


def test_no_other_way_is_taken() -> None:
    """``resolve`` and ``expanduser`` of pathlib raise RuntimeError, which names no remedy."""
    folder = Path(weft.__file__).parent
    left = [
        str(file)
        for file in folder.rglob("*.py")
        if re.search(r"\.(resolve|expanduser)\(\)", file.read_text(encoding="utf-8"))
    ]
    assert not left
