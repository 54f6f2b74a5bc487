"""Five techniques of a user's own, outside the package: they train, and are proved as Weft's own ones are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import started

EXAMPLE = Path(__file__).parents[2] / "examples/techniques"

#: Layouts and settings under which ``weft verify`` compares the example with one device.
PROVED = (
    ("island=2,pp=2,schedule=early-1f1b", ("sync.compress=none", "sync.every=1")),
    ("cp=3,context=upward-ring", ()),
)


def train_and_verify(folder: Path, weft: Callable[..., str]) -> None:
    """Train on four ranks, and prove what is exact, by ``weft(folder, *words)``, which returns what is printed."""
    train(folder, weft)
    for layout, settings in PROVED:
        words = [word for setting in settings for word in ("--set", setting)]
        said = weft(folder, "verify", "recipe.toml", "--layout", layout, *words)
        assert "equal" in said, said


def train(folder: Path, weft: Callable[..., str]) -> None:
    """Train the example on four ranks, in a folder of its own."""
    shutil.copytree(EXAMPLE, folder)
    said = weft(folder, "train", "recipe.toml")
    assert "on island=2,pp=2" in said and "step 8/8" in said


def weft_here(folder: Path, *words: str) -> str:
    """Run a command of this checkout in ``folder``; what it prints."""
    done = started.run(*words, cwd=folder, main=started.trusting_plugins)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow(8)
def test_the_techniques_of_the_example_train(tmp_path: Path) -> None:
    train(tmp_path / "own", weft_here)


@pytest.mark.soak
def test_the_techniques_of_the_example_are_equal_to_one_device(tmp_path: Path) -> None:
    train_and_verify(tmp_path / "own", weft_here)
