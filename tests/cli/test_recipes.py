"""Recipes by name, and recipes to edit."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import Command
from weft.errors import WeftError
from weft.recipe import Recipe, load_recipe
from weft.recipe.schema import recipe_schema
from weft.recipe.shipped import (
    catalogue_rows,
    find_recipe,
    recipe_headline,
    shipped_recipes,
)
from weft.recipe.template import template

#: What is said of all settings, made once for all recipes.
SCHEMA = cache(recipe_schema)


@pytest.fixture(autouse=True)
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_recipe_goes_by_its_name_and_a_file_wins(tmp_path: Path) -> None:
    assert (
        load_recipe("quickstart")
        == load_recipe("quickstart.toml")
        == load_recipe(shipped_recipes()["quickstart"])
    )
    assert load_recipe("quickstart", ["train.steps=3"], "dp=2").layout.dp == 2
    (tmp_path / "quickstart.toml").write_text("[train]\nsteps = 7\n")
    assert load_recipe("quickstart").train.steps == 7
    (tmp_path / "zero").mkdir()  # a folder is no recipe
    assert load_recipe("zero").layout.shard == 4
    (tmp_path / "plain").write_text("[train]\nsteps = 9\n")
    assert load_recipe("plain").train.steps == 9 and find_recipe("plain") is None


@pytest.mark.parametrize(
    ("name", "said"), [("zrro", "did you mean 'zero'"), ("xyzzy", "see 'weft recipes'")]
)
def test_an_unknown_name_is_answered_with_what_there_is(name: str, said: str) -> None:
    with pytest.raises(WeftError, match=said):
        load_recipe(name)


def test_recipes_are_listed_with_what_they_show(command: Command) -> None:
    code, out, _ = command("recipes")
    lines = [line.split("\t") for line in out.splitlines()]
    assert code == 0 and [line[0] for line in lines[1:]] == list(shipped_recipes())
    assert all(len(line) == 4 for line in lines)
    assert ["quickstart", "4", "shard=2,tp=2"] in [line[:3] for line in lines]
    for path in shipped_recipes().values():
        first = path.read_text().splitlines()[0]
        assert (
            first.startswith("# ")
            and first.endswith(".")
            and recipe_headline(path) == first[2:]
        )


def test_techniques_are_whole_in_a_pipe(command: Command) -> None:
    code, out, _ = command("techniques")
    assert (
        code == 0
        and len(out.splitlines()) == 1 + len(catalogue_rows())
        and "…" not in out
    )
    assert all(len(line.split("\t")) == 6 for line in out.splitlines())


def test_plan_takes_a_recipe_by_name(command: Command) -> None:
    code, out, err = command(
        "plan", "quickstart", "--cluster", "h100", "--gpus", 2, "--top", 1
    )
    assert code == 0 and "quickstart.toml" in out, err


@pytest.mark.parametrize("source", list(shipped_recipes()))
def test_a_new_recipe_is_the_old_one_and_says_all_defaults(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.recipe.template.recipe_schema", SCHEMA)
    text = template(shipped_recipes()[source].read_text(), "mine.toml")
    Path("mine.toml").write_text(text)
    old = load_recipe(source).model_copy(update={"name": "mine"})
    assert load_recipe("mine.toml") == old
    # Every setting is there, and a comment that is made a setting is true: nothing changes.
    for section in Recipe.model_fields.keys() - {"name"}:
        assert re.search(rf"(?m)^#?(\[+{section}\b|{section} = )", text), section
    bare = re.sub(r"(?m)^#(?=\w+ = (?!\.\.\.))", "", text)
    absent = "|".join(
        name
        for name, field in Recipe.model_fields.items()
        if field.default in (None, ())
    )
    bare = re.sub(rf"(?m)^#(?=\[+(?!\[*({absent})))", "", bare)
    bare = re.sub(rf"(?s)\n#\[+({absent})].*?(?=\n#?\[|\Z)", "", bare)
    # whose levels leave no room for `to` and `every` beside them
    if source != "levels":
        Path("mine.toml").write_text(bare)
        assert load_recipe("mine.toml") == old


def test_new_begins_with_ten_settings_and_has_all_on_request(command: Command) -> None:
    assert command("new", "short")[0] == command("new", "long", "--all")[0] == 0
    short, long = Path("short.toml").read_text(), Path("long.toml").read_text()
    settings = re.findall(r"(?m)^(\w+) = ", short)
    assert len(settings) == 10 and not re.search(r"(?m)^#\w+ = ", short)
    assert (
        "# Largest learning rate, which is reached at the end of the warm-up.\nlr = 4e-3"
        in short
    )
    assert len(re.findall(r"(?m)^#\w+ = ", long)) > 150
    assert load_recipe("short").train == load_recipe("long").train


def test_new_writes_a_file_once(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("new", "mine", "--from", "ring")
    assert code == 0 and "weft train mine.toml" in out
    assert load_recipe("mine").layout.context == "ring"
    assert command("new", "mine")[0] == 2 and command("new", "other", "--from", "rign")[
        2
    ].count("did you mean 'ring'")
    code, _, err = command("new", "none/mine")
    assert code == 1 and "No such file or directory" in err
    assert os.listdir(tmp_path) == ["mine.toml"]


def test_new_on_a_full_disk_leaves_nothing(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_part(path: Path, text: str) -> int:
        path.write_bytes(text.encode()[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as within:
        within.setattr(Path, "write_text", write_part)
        code, _, err = command("new", "mine")
    assert code == 1 and "make room on its disk" in err
    assert not os.listdir(tmp_path) and command("new", "mine")[0] == 0


@pytest.mark.slow
def test_the_shell_completes_commands_and_recipes() -> None:
    def offered(*words: str) -> list[str]:
        env = os.environ | {
            "_WEFT_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["weft", *words]),
        }
        run = "import sys; sys.argv = ['weft']; from weft.cli import run_command_line; run_command_line()"
        env |= {"COMP_CWORD": str(len(words))}
        done = subprocess.run(
            [sys.executable, "-c", run],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.split()

    assert offered("tr") == ["train"]
    Path("quick.toml").touch()
    assert offered("train", "quic") == ["quickstart", "quick.toml"]


@pytest.mark.slow
def test_version_and_verbose(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_DEBUG", raising=False)
    assert command("-v")[:2] == command("--version")[:2] and command("-v")[
        1
    ].startswith("weft ")
    monkeypatch.setenv("WEFT_DEBUG", "")  # set back after the test
    done = subprocess.run(
        [sys.executable, "-m", "weft", "-v", "train", "xyzzy"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" in done.stderr and done.stderr.splitlines()[-1].startswith(
        "weft: error: recipe xyzzy"
    )
