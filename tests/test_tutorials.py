"""The tutorials, typed as they stand: every file is written, every command run, and what a page shows is printed.

A block ``console`` has commands behind ``$`` and below each what it prints, or parts of it: a line ``...`` stands for
any lines, and numbers may be others. A block with a ``title`` is the file of that name. ``python -m
tests.test_tutorials PAGE`` runs one in a new folder and shows what its commands print.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from weft.cli.app import app as weft_app

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in sorted(ROOT.glob("docs/tutorials/*.md"))}
MARK = "== command"


class Command(NamedTuple):
    """A line that is typed, and the lines that the page shows below it."""

    typed: str
    shown: list[str]


def files_of(text: str) -> dict[str, str]:
    """The files that a page has the reader write, by their names."""
    blocks = re.findall(r'(?ms)^``` ?\w* ?title="([^"]+)"\n(.*?)^```$', text)
    return dict(blocks)


def commands_of(text: str) -> list[Command]:
    """The commands of a page in their order. A line that ends with a backslash goes on in the next one."""
    commands: list[Command] = []
    for block in re.findall(r"(?ms)^```console\n(.*?)^```$", text):
        for line in block.replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                commands.append(Command(line[2:], []))
            elif line.strip():
                commands[-1].shown.append(line)
    return commands


def typed(page: Path, folder: Path) -> list[str]:
    """Do in ``folder`` what a page says, in one shell; return what each command has printed."""
    text = page.read_text()
    for name, content in files_of(text).items():
        (folder / name).write_text(content)
    (folder / "bin").mkdir()
    weft = folder / "bin/weft"
    weft.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m weft "$@"\n')
    weft.chmod(0o755)
    path = f"{weft.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    lines = ["set -e"]
    for command in commands_of(text):
        lines += [f"echo '{MARK}'", command.typed]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )
    outputs = done.stdout.split(MARK + "\n")[1:]
    assert done.returncode == 0, done.stdout[-3000:]
    return outputs


def pattern(line: str) -> str:
    """A line that a page shows as an expression: numbers, names of processes and blanks may be others."""
    text = re.sub(r"\d[\d,.:e-]*", "0", line.strip())
    return re.sub(r"\s+", r"\\s+", re.escape(text).replace(r"\ ", " ")).replace(
        "0", r"[\d.,:e+-]+"
    )


def missing(command: Command, output: str) -> list[str]:
    """The lines that a page shows below a command and that are not printed in this order."""
    rest, lost = output, []
    for line in command.shown:
        if line.strip() == "...":
            continue
        match = re.search(pattern(line), rest)
        if match is None:
            lost.append(line)
        else:
            rest = rest[match.end() :]
    return lost


def parse(command: object, args: list[str]) -> None:
    """Let the command line's own parser read ``args`` without running anything."""
    while hasattr(command, "commands") and args and args[0] in command.commands:
        command, args = command.commands[args[0]], args[1:]
    command.make_context("weft", list(args), resilient_parsing=False)  # type: ignore[attr-defined]


def test_a_page_is_read_and_compared() -> None:
    text = '```toml title="a.toml"\nx = 1\n```\n\n```console\n$ weft \\\n  --version\nweft 1.0\n...\nend\n```\n'
    assert files_of(text) == {"a.toml": "x = 1\n"}
    (command,) = commands_of(text)
    assert command == Command("weft   --version", ["weft 1.0", "...", "end"])
    assert missing(command, "weft 2.13\nmore\nend\n") == []
    assert missing(command, "end\nweft 2.13\n") == ["end"]
    assert missing(command, "waft 2.13\nend\n") == ["weft 1.0"]


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_tutorial_is_there(name: str) -> None:
    """What can be seen without running it: commands are parsed, recipes read, and what modules import exists."""
    text = PAGES[name].read_text()
    for file, content in files_of(text).items():
        if file.endswith(".toml"):
            tomllib.loads(content)
        if file.endswith(".py"):
            for node in ast.parse(content).body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names)
    app = weft_app.parser
    typed_words = [shlex.split(c.typed, comments=True) for c in commands_of(text)]
    ours = [
        words[words.index("weft") + 1 :] for words in typed_words if "weft" in words
    ]
    assert ours
    for words in ours:
        ends = [
            words.index(end) for end in (">", "2>&1", "&", "||", "|") if end in words
        ]
        parse(app, words[: min(ends, default=None)])


@pytest.mark.soak
@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_does_what_it_says(name: str, tmp_path: Path) -> None:
    outputs = typed(PAGES[name], tmp_path)
    commands = commands_of(PAGES[name].read_text())
    assert len(outputs) == len(commands) > 2
    for command, output in zip(commands, outputs, strict=True):
        lost = missing(command, output)
        assert not lost, f"$ {command.typed}\nlacks {lost} in\n{output}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        for command, output in zip(
            commands_of(page.read_text()), typed(page, Path(name)), strict=True
        ):
            print(f"$ {command.typed}\n{output}", flush=True)
