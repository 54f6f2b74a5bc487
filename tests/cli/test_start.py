"""What keeps a run from starting costs one line before any rank starts; a full disk costs records, not the run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import foreign as write
from tests.cli.test_commands import tiny, weft
from tests.conftest import Command
from tests.models.test_hf import write_config
from weft.data.tokenizer import load_tokenizer
from weft.model_config import shape_from_config
from weft.models.hf import export
from weft.observe.metrics import read_metrics
from weft.recipe import Recipe, load_recipe
from weft.train.setup import prepare

__all__ = ["tiny"]


@contextmanager
def file_system(folder: Path, options: str) -> Iterator[None]:
    """A small file system of its own at ``folder``."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a file system here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def unstarted(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*words: Any, **more: Any) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("weft.cli.train.launch", launch)


def load(path: str, *overrides: str) -> Recipe:
    return load_recipe(path, overrides)


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--out", "full"], 2, r"--out full already holds something; choose another folder or add --resume auto"),
    (["--out", "file"], 2, r"--out file is not a folder"),
    (["--out", "file/run"], 1, r"cannot write where it should: cannot make .*file/run: Not a directory; .*\(--out\)"),
    (["--resume", "nowhere"], 1, r"nowhere does not exist; give a run folder or a checkpoint"),
    (["--resume", "full"], 1, r"no checkpoint in full"),
    (["--set", "checkpoint.to=file"], 1, r"cannot write where it should: cannot make .*file: File exists"),
    (["--set", "model.from=m.gguf"], 1, r"m\.gguf is not a whole GGUF file"),
    (["--set", "model.from=file"], 1, r"file is no checkpoint that Weft knows"),
    (["--set", "model.from=bad.json"], 1, r"cannot read bad\.json: it is not JSON; give a Hugging Face config\.json"),
    (["--set", "model.from=full"], 1, r"full is no checkpoint that Weft knows"),
    (["--set", "model.from=full/none"], 1, r"full/none does not exist; give a checkpoint"),
    (["--set", "model.from=mp"], 1, r"model_optim_rng\.pt cannot be read by torch\.load"),
])  # fmt: skip
def test_mistakes_are_found_before_ranks_start(
    tiny: str, command: Command, unstarted: None, words: list[str], code: int, said: str
) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    Path("file").write_bytes(b"x")
    Path("m.gguf").write_bytes(b"GGUF\xff\xfe")
    Path("bad.json").write_bytes(b"GGUF\xff\xfe")
    Path("mp/mp_rank_00").mkdir(parents=True)
    Path("mp/mp_rank_00/model_optim_rng.pt").write_bytes(b"x")
    before = sorted(Path().rglob("*"))
    found, _, err = command("train", tiny, "--layout", "shard=2", *words)
    line = err.strip()
    assert found == code and re.search(said, line), line
    assert "\n" not in line and "codec" not in line
    assert sorted(p for p in Path().rglob("*") if "cache" not in p.parts and p.name != "runs") == before


def test_weights_need_their_own_tokenizer(tiny: str, command: Command, unstarted: None, tmp_path: Path) -> None:
    """Left out, it is the weights' own, or refused where these have none; written down it is the user's choice."""
    text = Path(tiny).read_text()
    Path(tiny).write_text(text.replace(text[text.index("[model]") : text.index("[data]")], '[model]\nfrom = "hf"\n'))
    tokenizer = load_tokenizer("train:300", load(tiny).data.sources, tmp_path / "cache")
    config = write_config(tmp_path / "config", vocab_size=tokenizer.vocab)
    shape = shape_from_config(config)
    export(write.weights_of(shape), shape, tmp_path / "hf", files=tokenizer.files())
    job = prepare(load(tiny))
    assert not job.notes and job.corpus.tokenizer == tokenizer
    assert not prepare(load(tiny, "data.tokenizer=hf")).notes
    (note,) = prepare(load(tiny, "data.tokenizer=bytes")).notes
    assert re.search(r"'bytes' \(257 entries\) is not the tokenizer of 'hf' \(300\)", note)
    (note,) = prepare(load(tiny, "model.from=config/config.json")).notes
    assert "has no tokenizer and data.tokenizer is left out: it is 'bytes'" in note
    (tmp_path / "hf/tokenizer.json").unlink()
    code, _, err = command("train", tiny, "--layout", "shard=2")
    assert code == 2 and "weights have none: no tokenizer.json is beside them; set data.tokenizer = the path" in err
    assert not prepare(load(tiny, "data.tokenizer=bytes")).notes


@pytest.mark.slow
def test_a_read_only_disk_and_a_full_one(tiny: str, tmp_path: Path) -> None:
    with file_system(tmp_path / "disk", "size=1m,ro"):
        done = weft("train", tiny, "--layout", "shard=2", "--out", "disk/run")
        assert done.returncode == 1 and re.search(r"disk/run: Read-only file system; .*--out", done.stderr), done.stderr
        assert done.stderr.count("\n") == 1
    with file_system(tmp_path / "disk", "size=900k"):
        more = ["--set", "train.steps=12", "--set", "checkpoint.every=2", "--set", "observe.trackers=[]"]
        done = weft("train", tiny, "--layout", "shard=2", "--out", "disk/run", *more)
        said = done.stdout + done.stderr
        assert "was not saved: cannot" in said and "No space left on device" in said, said
        assert "Traceback" not in said, said
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr  # the last checkpoint was not saved
        kept = sorted(p.name for p in (tmp_path / "disk/run/checkpoints").iterdir())
        assert kept == ["step-000002", "step-000004"], "what failed takes up no room"
        assert read_metrics(tmp_path / "disk/run")["train"][-1]["step"] >= 4
