"""A data run that is killed at any instant goes on, and ends as if it had never been."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.started import Started
from weft.curation.data_run import run_pipeline
from weft.curation.read_pipeline import build_pipeline

#: What Python does with files, as its audit hooks call it.
EVENTS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "shutil.rmtree")
TREE: dict[str, Any] = {
    "plugins": ["tests.my_operators"],
    "shards": 5,
    "steps": [
        {"operator": "lengths", "least": 3},
        {"operator": "same"},
        {"operator": "parts", "at": " "},
        {"operator": "same", "keep": "last"},
    ],
    "output": {"tokenizer": "bytes"},
}


def prepare(folder: Path) -> dict[str, Any]:
    """Write a source, and return a pipeline that reads it."""
    (folder / "data").mkdir(parents=True)
    for number in range(5):
        texts = [f"text {number} {line % 7} of {line}" for line in range(20)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"data/{number}.jsonl").write_text(lines)
    return TREE | {"sources": [{"kind": "jsonl", "path": str(folder / "data")}]}


def be_run(folder: str, workers: str, end: str) -> None:
    """Run the pipeline in ``folder``; at the event of number ``end``, from 1, the process is killed by itself."""
    seen = 0

    def count(event: str, _: object) -> None:
        nonlocal seen
        if event in EVENTS:
            seen += 1
            if seen == int(end):
                os.kill(os.getpid(), signal.SIGKILL)

    tree = json.loads((Path(folder) / "tree.json").read_text())
    pipeline = build_pipeline(tree)
    sys.addaudithook(count)
    run_pipeline(pipeline, Path(folder) / "out", int(workers))
    Path(folder, "events").write_text(str(seen))


def start(folder: Path, workers: int = 0, end: int = 0) -> Started:
    return Started(folder, workers, end, main=be_run)


def written(folder: Path) -> dict[str, bytes]:
    """All that is not of the folder of intermediate files, and of that nothing that is half written."""
    out = folder / "out"
    assert not list(out.rglob("*.part"))
    return {
        file.relative_to(out).as_posix(): file.read_bytes()
        for file in sorted(out.rglob("*"))
        if file.is_file() and ".work" not in file.parts
    }


def finish(folder: Path, tree: dict[str, Any]) -> dict[str, bytes]:
    run_pipeline(build_pipeline(tree), folder / "out", 0)
    return written(folder)


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.soak)])
def test_killed_run_ends_in_the_same_files(tmp_path: Path, kills: int) -> None:
    """Kills at events of files, for every day each once, and then to the end."""
    tree = prepare(tmp_path)
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    assert start(tmp_path).wait(60) == 0
    events = int((tmp_path / "events").read_text())
    whole = written(tmp_path)
    draw = random.Random(kills)
    cut_off = 0
    for _ in range(kills):
        shutil.rmtree(tmp_path / "out")
        for _ in range(2 if kills > 3 else 1):
            code = start(tmp_path, end=draw.randint(1, events)).wait(60)
            assert code in (0, -signal.SIGKILL)
            cut_off += code != 0
        assert finish(tmp_path, tree) == whole
    assert cut_off >= kills / 2


@pytest.mark.soak
def test_killed_run_with_workers_ends_in_the_same_files(tmp_path: Path) -> None:
    """Kills at random times, while processes do the tasks; these may live a moment longer than their parent."""
    tree = prepare(tmp_path)
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    began = time.monotonic()
    assert start(tmp_path, workers=2).wait(60) == 0
    seconds = time.monotonic() - began
    whole = written(tmp_path)
    draw = random.Random(7)
    for _ in range(30):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        process = start(tmp_path, workers=2)
        time.sleep(draw.uniform(0, seconds))
        process.kill()
        process.wait(60)
        assert finish(tmp_path, tree) == whole
