"""What a user gets who has installed Weft and has no checkout: recipes, catalogue, and training from Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.examples.test_own_techniques import train_and_verify
from tests.examples.test_plugins import train_and_ask

ROOT = Path(__file__).parents[1]


def clone(folder: Path) -> Path:
    """A copy of the sources in ``folder``: pip builds where they are."""
    folder.mkdir()
    for name in ("weft", "recipes", "docs"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(source: Path, kind: str, folder: Path) -> Path:
    """The wheel that pip would build of ``source``, or the editable one, in ``folder``."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, folder],
        cwd=source,
        check=True,
        timeout=300,
        capture_output=True,
    )
    (wheel,) = folder.glob("weft-*.whl")
    return wheel


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with Weft from a wheel, and everything else from that of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build(clone(folder / "source"), "wheel", folder)
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / "env"],
        check=True,
        timeout=60,
    )
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder / "env")}))
    shutil.unpack_archive(wheel, site, "zip")
    # A path file of another environment is not read, so the checkout that is installed there stays out of sight.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "env/bin/python"


def run(python: Path, folder: Path, *words: str) -> str:
    """Standard output of ``python *words``, run in ``folder``, from where no checkout is to be found."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow(5)
def test_an_editable_install_is_found_beside_the_clone(tmp_path: Path) -> None:
    """The clone's folder is named weft, too: Python took it for the package, and ``weft.Recipe`` was not there."""
    source = clone(tmp_path / "weft")
    site = tmp_path / "site"
    shutil.unpack_archive(build(source, "editable", tmp_path), site, "zip")
    others = sysconfig.get_path("purelib")
    code = f"import site; site.addsitedir({str(site)!r}); import sys; sys.path.append({others!r}); "
    code += "import weft; from weft.recipe.shipped import shipped_recipes; "
    code += "print(weft.Recipe.__name__, weft.__file__, len(shipped_recipes()))"
    name, file, count = run(Path(sys.executable), tmp_path, "-S", "-c", code).split()
    assert (name, Path(file)) == ("Recipe", source / "weft/__init__.py")
    assert int(count) == len(list((ROOT / "recipes").glob("*.toml")))


@pytest.mark.slow
def test_the_wheel_is_all_there(python: Path, tmp_path: Path) -> None:
    """Recipes, techniques, pages, and the training of the README from Python."""
    code = "import weft; from weft.recipe import load_recipe; print(weft.__file__, load_recipe('quickstart').name)"
    said = run(python, tmp_path, "-c", code)
    assert str(python.parents[1]) in said and said.endswith(" quickstart\n")
    recipes = run(python, tmp_path, "-m", "weft", "recipes")
    assert len(recipes.splitlines()) == 1 + len(list((ROOT / "recipes").glob("*.toml")))
    assert "Rajbhandari et al. 2020" in run(
        python, tmp_path, "-m", "weft", "techniques"
    )
    run(python, tmp_path, "-m", "weft", "schedule", "1f1b", "--html", "1f1b.html")
    (example,) = re.findall(
        r"(?s)```python\n(.*?)```", (ROOT / "README.md").read_text()
    )
    (tmp_path / "example.py").write_text(example)
    said = run(python, tmp_path, "example.py").splitlines()[-1]
    assert re.fullmatch(
        r"runs/mine runs/mine/checkpoints/step-000020 \[\d.*, .*, .*]", said
    )
    assert (tmp_path / "runs/mine/report.html").stat().st_size > 10_000
    assert (tmp_path / "runs/mine/plotly.min.js").stat().st_size > 1_000_000


@pytest.mark.soak
def test_the_plugins_of_the_example_train(python: Path, tmp_path: Path) -> None:
    """From the wheel, with an interpreter for each rank; every day: tests/examples/test_plugins.py."""
    train_and_ask(
        tmp_path / "mine",
        lambda folder, *words: run(python, folder, "-m", "weft", *words),
    )


@pytest.mark.soak
def test_the_techniques_of_the_example_train(python: Path, tmp_path: Path) -> None:
    """Five techniques outside the package, with the wheel; every day: tests/examples/test_own_techniques.py."""
    train_and_verify(
        tmp_path / "own",
        lambda folder, *words: run(python, folder, "-m", "weft", *words),
    )
