"""Ranks leave in an order: all come to the end, groups go, what is buffered is written, and the process ends there.

Taking the interpreter down beside gloo's threads has aborted finished runs ("terminate called without an active
exception"). So here an interpreter that is taken down aborts, always.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import write_corpus
from weft.run.launch import launch

ROOT = Path(__file__).parents[2]

ABORTS = """
import atexit, os, sys
atexit.register(os.abort)
from weft.cli import run_command_line
run_command_line()
"""


def small(folder: Path) -> list[str]:
    values = (
        "model.layers=2", "model.embed=16", "model.heads=4", "model.kv_heads=2", "model.head_dim=4", "model.ffn=21",
        "data.seq_len=16", f"data.sources=[{{kind='jsonl',path='{write_corpus(folder)}'}}]", "data.tokenizer='bytes'",
        f"data.cache='{folder}/cache'", "train.batch=2", "train.steps=2", "observe.split_every=0",
        "observe.trackers=[]", "validation.every=0", "generate.tokens=1",
    )  # fmt: skip
    recipe = [str(ROOT / "recipes/quickstart.toml"), "--layout", "shard=2"]
    return recipe + [word for value in values for word in ("--set", value)]


def leave(*words: str, ranks: int = 2) -> int:
    """Exit code of ``weft`` with these words as ranks whose interpreters must not be taken down."""
    return launch([], ranks, [sys.executable, "-c", ABORTS, *words])


def test_one_rank_that_joins_others_ends_without_the_interpreter_s(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert leave("techniques", ranks=1) == 0
    assert "DiLoCo" in capfd.readouterr().out


@pytest.mark.soak
def test_ranks_of_verify_end_without_the_interpreter_s(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert leave("verify", *small(tmp_path), "--steps", "1") == 0
    out, err = capfd.readouterr()
    assert "parameters" in out and err == ""


@pytest.mark.soak
def test_ranks_of_train_and_generate_end_without_the_interpreter_s(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert leave("train", *small(tmp_path), "--out", str(tmp_path / "run")) == 0
    assert "checkpoint " in capfd.readouterr().out
    run = str(tmp_path / "run")
    assert (
        leave(
            "generate",
            "--checkpoint",
            run,
            "--prompt",
            "abc",
            "--tokens",
            "2",
            "--layout",
            "cp=2",
        )
        == 0
    )
    assert capfd.readouterr().out.startswith("abc")


@pytest.mark.soak
def test_two_hundred_short_runs_end_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "weft", "verify", *small(tmp_path), "--steps", "1"]
    for _ in range(200):
        assert launch([], 2, command) == 0
        assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_ranks_whose_output_nobody_reads_say_so(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    out = ["--out", str(tmp_path / "run")]
    words = [sys.executable, "-m", "weft", "train", *small(tmp_path), *out]
    done = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, timeout=240)
    os.close(writes)
    said = b"weft: error: nobody reads this command's output any more; let it go to a file\n"
    assert (done.returncode, done.stderr) == (1, said)
