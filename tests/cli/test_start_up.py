"""Commands that need no PyTorch do not wait for it: it takes seconds to import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer.main
from rich.text import Text
from typer.core import TyperGroup

from tests.conftest import Command
from weft.cli.app import Commands, app

RUN = """
import sys
sys.argv = ["weft", *{words}]
try:
    from weft.cli import run_command_line
    run_command_line()
finally:
    heavy = {{"torch", "numpy", "scipy", "plotly", "transformers"}} & sys.modules.keys()
    if {words} == ["--help"]:  # 0.23 s of processor time, half of it typer's and rich's
        heavy |= {{"pydantic", "jinja2", "psutil", "weft.recipe.recipe"}} & sys.modules.keys()
    print("imported", *heavy, file=sys.stderr)
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("words", "code"), [
    (["--help"], 0),
    (["train", "--help"], 0),
    (["checkpoint", "--help"], 0),
    (["checkpoint", "convert", "--help"], 0),
    (["recipes"], 0),
    (["techniques"], 0),
    (["schedule", "zb-v"], 0),
    (["train", "no-such-recipe"], 1),
    (["train", "quickstart", "--set", "train.stepz=1"], 2),
])  # fmt: skip
def test_no_pytorch_for_what_needs_none(words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(words=words)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-1] == "imported"


EARLY = """
import importlib, os, signal, sys, tomllib

class Now:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                print("swallowed, as PyTorch's imports do")

sys.meta_path.insert(0, Now())
sys.argv = ["weft", "recipes"]
with open({project!r}, "rb") as file:
    module, function = tomllib.load(file)["project"]["scripts"]["weft"].split(":")
getattr(importlib.import_module(module), function)()
"""


@pytest.mark.parametrize("module", ["weft.cli", "weft.run.failure", "weft.cli.app"])
def test_ctrl_c_while_a_command_is_imported_costs_one_line(module: str) -> None:
    """The first imports come before any command's own handling of Ctrl-C, but after the entry point's."""
    project = str(Path(__file__).parents[2] / "pyproject.toml")
    for rank, said in (("0", "weft: interrupted\n"), ("1", "")):
        words = [sys.executable, "-c", EARLY.format(module=module, project=project)]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"RANK": rank},
        )
        assert (done.returncode, done.stderr) == (130, said)


def test_the_entry_point_comes_before_all_imports() -> None:
    """Until it handles Ctrl-C, Python answers with a traceback."""
    code = "import sys; before = {*sys.modules}; import weft.__main__; print(*sorted({*sys.modules} - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.split() == ["weft", "weft.__main__", "weft.version"]


def test_the_parser_is_made_once_per_process(command: Command) -> None:
    assert command("--version")[0] == 0
    with mock.patch.object(typer.main, "get_command", side_effect=AssertionError):
        assert command("--version")[0] == 0
        assert command("recipes", "--no-such")[0] == 2


def test_a_command_that_is_added_later_is_there(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("added")[0] == 2
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    app.command("added")(lambda: 0)
    assert command("added")[0] == 0


def test_nobody_reads_what_a_command_prints() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    for word in ("data", "techniques"):
        words = [sys.executable, "-m", "weft", word]
        done = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, timeout=240)
        assert (done.returncode, done.stderr) == (1, b"")
    os.close(writes)


def test_output_on_a_full_disk_is_one_line() -> None:
    for word in ("techniques", "--version"):
        with Path("/dev/full").open("w") as full:
            words = [sys.executable, "-m", "weft", word]
            done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=240)  # fmt: skip
        said = "weft: error: cannot write the output or a file: No space left on device; make room on its disk\n"
        assert (done.returncode, done.stderr) == (1, said)


def test_streams_may_be_closed() -> None:
    words = ["sh", "-c", '"$0" -m weft recipes <&- >&-', sys.executable]
    done = subprocess.run(words, stderr=subprocess.PIPE, timeout=240)
    assert (done.returncode, done.stderr) == (0, b"")


BROKEN = """
import sys, types

def app(**more):
    raise BrokenPipeError(32, "Broken pipe")

sys.modules["weft.cli.app"] = types.SimpleNamespace(app=app)
from weft.__main__ import main
main()
"""


def test_another_broken_pipe_is_a_failure_with_a_line() -> None:
    words = [sys.executable, "-c", BROKEN]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "Broken pipe" in done.stderr and "Traceback" not in done.stderr
    with (
        mock.patch.object(TyperGroup, "invoke", side_effect=BrokenPipeError(32, "Broken pipe")),
        pytest.raises(RuntimeError, match="Broken pipe"),
    ):  # fmt: skip
        Commands().invoke(mock.Mock())


@pytest.mark.parametrize(("width", "words"), [
    (60, ["generate"]),
    (80, ["serve"]),
])  # fmt: skip
def test_help_cuts_no_name(width: int, words: list[str]) -> None:
    """A table hides the end of what has no room in its column, such as the ``y`` of ``--cache-policy``."""
    done = subprocess.run(
        [sys.executable, "-m", "weft", *words, "--help"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"COLUMNS": str(width)},
    )
    assert done.returncode == 0
    assert not re.search(r"\S(…|\.\.\.$)", done.stdout)


def test_help_says_all_that_it_is_given() -> None:
    """Every parameter has a text, and none of them has brackets that rich takes for a style, which it does not show."""

    def walk(command: Any, path: str) -> Iterator[tuple[str, str]]:
        yield path, command.help or ""
        yield from ((f"{path}: {one.name}", one.help or "") for one in command.params)
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{path} {name}")

    texts = dict(walk(app.parser, "weft"))
    assert [where for where, text in texts.items() if not text] == []
    assert [
        where
        for where, text in texts.items()
        if Text.from_markup(text).plain != text.replace("\\[", "[")
    ] == []
