"""The plugins of the example, from a folder with the example alone: a model, a loss, data, a callback and a tracker."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import started

EXAMPLE = Path(__file__).parents[2] / "examples/plugins"


def train_and_ask(folder: Path, weft: Callable[..., str]) -> None:
    """Train on two ranks and ask questions by ``weft(folder, *words)``, which returns what is printed."""
    shutil.copytree(EXAMPLE, folder)
    small = [
        "train.steps=4",
        "validation.every=2",
        "tasks=[{path='questions.jsonl'}]",
        "data.settings={largest=9}",
    ]
    words = [word for setting in small for word in ("--set", setting)]
    said = weft(folder, "train", "recipe.toml", *words)
    assert (
        "the best loss was" in said
        and "step 4: questions:" in said
        and "on shard=2" in said
    )
    rows = (folder / "runs/recipe/losses.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows].count(["train", "4"]) == 1
    asked = weft(folder, "eval", "questions.jsonl", "--from", "runs/recipe")
    assert asked.splitlines()[1].startswith("questions\t10\t")


@pytest.mark.slow
def test_the_plugins_of_the_example_train(tmp_path: Path) -> None:
    def weft(folder: Path, *words: str) -> str:
        done = started.run(*words, cwd=folder, main=started.trusting_plugins)
        assert done.returncode == 0, done.stderr
        return done.stdout

    train_and_ask(tmp_path / "mine", weft)
