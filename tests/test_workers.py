"""The processes that run the tests: what a test comes to is told as if it had run in pytest's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIRST = """
import os, pytest, warnings

@pytest.fixture(scope="session")
def whole():
    yield
    open(f"session-{os.getpid()}", "w").close()

@pytest.fixture(scope="module")
def once(whole):
    open("once", "a").write("begin ")
    yield
    open("once", "a").write("end ")

def test_passes(once, tmp_path):
    (tmp_path / "own").touch()

def test_fails(once):
    print("said before")
    assert 1 == 2

def test_warns(once):
    warnings.warn("take care")

def test_ends_its_process(once):
    os._exit(3)

@pytest.mark.skip(reason="not here")
def test_is_skipped(once):
    pass

def test_after_it(once):
    pass
"""
OTHER = """
import os
TOGETHER = "pair"

def test_names_its_process():
    open("{name}", "w").write(str(os.getpid()))
"""


def test_numpy_computes_with_as_many_threads_as_it_shall() -> None:
    """It asks once, when it is imported, and processes of tests share the cores."""
    threadpoolctl = pytest.importorskip("threadpoolctl")
    asked = int(os.environ["OPENBLAS_NUM_THREADS"])
    assert {
        library["num_threads"]
        for library in threadpoolctl.threadpool_info()
        if library["internal_api"] == "openblas"
    } <= {asked}


def test_outcomes_are_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(FIRST)
    for name in ("a", "b"):
        (tmp_path / f"test_{name}.py").write_text(OTHER.format(name=name))
    words = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "tests.workers", "--workers", "2"]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [*words, "--basetemp", tmp_path / "base", "."],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    said = done.stdout
    assert done.returncode == 1, said + done.stderr
    assert "2 failed, 5 passed, 1 skipped, 1 warning in " in said
    assert "assert 1 == 2" in said and "said before" in said and "take care" in said
    assert "the process ended within this test, with exit code 3" in said
    assert "not here" in said
    # in the process that ended and in the one that went on after it
    assert (tmp_path / "once").read_text() == "begin begin end "
    assert len([*tmp_path.glob("session-*")]) == 1
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
