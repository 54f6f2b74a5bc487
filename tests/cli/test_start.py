"""What keeps a run from starting costs one line before any rank starts; a full disk costs records, not the run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests import started
from tests.checkpoint import foreign as write
from tests.cli.test_commands import tiny
from tests.conftest import Command
from tests.models.test_hugging_face import write_config
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import WeftError
from weft.models.hugging_face import export
from weft.observe.run_metrics import read_metrics
from weft.pages import write as write_page
from weft.recipe import ModelShape, Recipe, load_recipe
from weft.shapes.config import shape_from_config
from weft.train.setup import prepare

__all__ = ["tiny"]


@contextmanager
def file_system(folder: Path, options: str) -> Iterator[None]:
    """A small file system of its own at ``folder``."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
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

    monkeypatch.setattr("weft.run.launch.launch", launch)


def load(path: str, *overrides: str) -> Recipe:
    return load_recipe(path, overrides)


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--out", "full"], 2, r"--out full already holds something; choose another folder or add --resume auto"),
    (["--out", "file"], 2, r"--out file is not a folder"),
    (["--out", "a" * 300], 2, r"cannot write --out a*: File name too long; choose another folder"),
    (["--out", "a" * 300, "--sweep", "train.steps=1,2"], 2, r"cannot write --out a*: File name too long; choose"),
    (["--resume", "a" * 300], 1, r"a{300}.*: File name too long"),
    (["--out", "file/run"], 1, r"cannot write where it should: cannot make .*file/run: Not a directory; .*\(--out\)"),
    (["--resume", "nowhere"], 1, r"nowhere does not exist; give a run folder or a checkpoint"),
    (["--resume", "full"], 1, r"no checkpoint in full"),
    (["--set", "checkpoint.to=file"], 1, r"cannot write where it should: cannot make .*file is not a folder"),
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
    assert (
        sorted(
            p for p in Path().rglob("*") if "cache" not in p.parts and p.name != "runs"
        )
        == before
    )


def test_weights_need_their_own_tokenizer(
    tiny: str, command: Command, unstarted: None, tmp_path: Path
) -> None:
    """Left out, it is the weights' own, or refused where these have none; written down it is the user's choice."""
    text = Path(tiny).read_text()
    Path(tiny).write_text(
        text.replace(
            text[text.index("[model]") : text.index("[data]")], '[model]\nfrom = "hf"\n'
        )
    )
    tokenizer = load_tokenizer("train:300", load(tiny).data.sources, tmp_path / "cache")
    config = write_config(tmp_path / "config", vocab_size=tokenizer.vocab)
    shape = shape_from_config(config)
    export(write.weights_of(shape), shape, tmp_path / "hf", files=tokenizer.files())
    job = prepare(load(tiny))
    assert not job.notes and job.corpus.tokenizer == tokenizer
    assert not prepare(load(tiny, "data.tokenizer=hf")).notes
    (note,) = prepare(load(tiny, "data.tokenizer=bytes")).notes
    assert re.search(
        r"'bytes' \(257 entries\) is not the tokenizer of 'hf' \(300\)", note
    )
    (note,) = prepare(load(tiny, "model.from=config/config.json")).notes
    assert "has no tokenizer and data.tokenizer is left out: it is 'bytes'" in note
    (tmp_path / "hf/tokenizer.json").unlink()
    code, _, err = command("train", tiny, "--layout", "shard=2")
    assert (
        code == 2
        and "weights have none: no tokenizer.json is beside them; set data.tokenizer = the path"
        in err
    )
    assert not prepare(load(tiny, "data.tokenizer=bytes")).notes


@pytest.mark.slow
def test_a_read_only_disk_and_a_full_one(
    tiny: str, command: Command, unstarted: None, tmp_path: Path
) -> None:
    with file_system(tmp_path / "disk", "size=1m,ro"):
        code, _, err = command(
            "train", tiny, "--layout", "shard=2", "--out", "disk/run"
        )
        assert code == 1 and re.search(
            r"disk/run: Read-only file system; .*--out", err
        ), err
        assert err.count("\n") == 1
    with file_system(tmp_path / "disk", "size=900k"):
        more = [
            "--set",
            "train.steps=12",
            "--set",
            "checkpoint.every=2",
            "--set",
            "observe.trackers=[]",
        ]
        done = started.run(
            "train", tiny, "--layout", "shard=2", "--out", "disk/run", *more
        )
        said = done.stdout + done.stderr
        assert "was not saved: cannot" in said, said
        # in the middle, at the end, and at the report that comes after it
        remedy = "No space left on device; make room on its disk"
        assert said.count("No space left") == said.count(remedy) >= 2, said
        assert done.stderr.endswith(f"{remedy}\n"), said
        with pytest.raises(WeftError, match=f"cannot write --html .*{remedy}"):
            write_page(tmp_path / "disk/page.html", b"x" * 1_000_000, "--html")
        assert "Traceback" not in said, said
        # the last checkpoint was not saved
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        kept = sorted(p.name for p in (tmp_path / "disk/run/checkpoints").iterdir())
        assert kept == ["step-000002", "step-000004"], "what failed takes up no room"
        assert read_metrics(tmp_path / "disk/run")["train"][-1]["step"] >= 4


def chatty(folder: Path, sources: Any, cache: Path) -> Tokenizer:
    """A tokenizer with a chat template, whose turns end with a token of its own."""
    tokenizer = load_tokenizer("train:300", sources, cache)
    tokenizer.save(folder)
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    model.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": template})
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [301, 0]}')
    return load_tokenizer(str(folder))


@pytest.mark.slow(3)
def test_a_model_by_name_is_the_same_for_every_command(
    tiny: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained, exported, converted, continued: tokenizer, template and what ends a turn stay with the model."""
    tokenizer = chatty(
        tmp_path / "tokenizer", load(tiny).data.sources, tmp_path / "cache"
    )
    assert tokenizer.stops == (301, 0)
    shape = ModelShape(vocab=tokenizer.vocab, layers=1, embed=32, heads=2, ffn=32)
    export(write.weights_of(shape), shape, tmp_path / "hf", files=tokenizer.files())
    quiet = ["--set", "train.steps=1", "--set", "validation.every=0"]
    code, _, err = command("train", tiny, "--from", "hf", "--out", "run", *quiet)
    assert code == 0, err
    assert command("verify", tiny, "--from", "hf", "--steps", 1)[0] == 0
    assert command("verify", tiny, "--from", "hf", "--types")[0] == 0
    assert command("export", "--from", "run", "--out", "out")[0] == 0
    assert json.loads(Path("out/generation_config.json").read_text())[
        "eos_token_id"
    ] == [301, 0]
    assert json.loads(Path("out/config.json").read_text())["eos_token_id"] == [301, 0]
    assert (
        load_tokenizer("out") == tokenizer
        and load_tokenizer("out").chat_template == tokenizer.chat_template
    )
    assert load_tokenizer("out").stops == (301, 0)
    assert command("checkpoint", "convert", "hf", "--out", "converted")[0] == 0
    seen: list[list[int]] = []

    def submit(
        engine: Any, ids: list[int], count: int, how: Any, stops: Any
    ) -> list[None]:
        seen.append([*ids, *stops])
        return [None]

    def stream(engine: Any, one: None) -> Iterator[int]:
        return iter(tokenizer.encode("fine").tolist())

    monkeypatch.setattr("weft.generate.engine.Engine.submit", submit)
    monkeypatch.setattr("weft.generate.engine.Engine.stream", stream)
    Path("talk.json").write_text(
        '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]'
    )
    for name in ("hf", "out", "run", "converted"):
        said = command(
            "generate",
            "--from",
            name,
            "--chat",
            "--prompt",
            "Hi",
            "--system",
            "Be brief.",
        )
        assert said[:2] == (0, "fine\n"), said
        assert (
            command(
                "generate", "--checkpoint", name, "--chat", "--prompt-file", "talk.json"
            )[0]
            == 0
        )
    written = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert seen == [[*tokenizer.encode(written, special=True), 301, 0]] * 8
    # What a user says is no special token.
    command("generate", "--from", "hf", "--chat", "--prompt", "<|im_end|>")
    assert seen[-1].count(301) == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("words", "said"), [
    (["--prompt-file", "bad.json"], "the conversation is not JSON"),
    (["--prompt-file", "none.json"], "has no messages; give a list of objects"),
    (["--prompt-file", "odd.json"], "message 2 of the conversation is no object with 'role' and 'content'"),
    (["--prompt", "Hi"], "hf has no chat template; do without chat"),
])  # fmt: skip
def test_conversations_that_cannot_be_continued(
    tiny: str, command: Command, tmp_path: Path, words: list[str], said: str
) -> None:
    tokenizer = load_tokenizer("bytes")
    shape = ModelShape(vocab=tokenizer.vocab, layers=1, embed=16, heads=2, ffn=16)
    export(write.weights_of(shape), shape, tmp_path / "hf", files=tokenizer.files())
    for name, text in (
        ("bad", "{"),
        ("none", '{"messages": []}'),
        ("odd", '[{"role": "user"}, 3]'),
    ):
        Path(f"{name}.json").write_text(text)
    code, _, err = command("generate", "--from", "hf", "--chat", *words)
    assert code in (1, 2) and said in err and "\n" not in err.strip()
    code, _, err = command("generate", "--from", "hf", "--system", "x", "--prompt", "y")
    assert code == 2 and "--system is for --chat" in err


def test_the_hub_is_asked_last_and_offline_it_is_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked: list[Any] = []

    def snapshot(repository: str, revision: str | None = None, **more: Any) -> str:
        asked.append((repository, revision))
        raise hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    code, _, err = command("generate", "--from", "nobody/none@v2", "--prompt", "x")
    assert code == 1 and asked == [("nobody/none", "v2")]
    assert re.search(
        r"nobody/none@v2 is no folder here, and the Hugging Face hub cannot be reached",
        err,
    )
    assert (
        "\n" not in err.strip() and "go online, or give a folder or a GGUF file" in err
    )
    Path("runs").mkdir()
    # a mistake, and no model of somebody
    code, _, err = command("generate", "--from", "runs/none", "--prompt", "x")
    assert code == 1 and len(asked) == 1 and "runs/none does not exist" in err
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    code, _, err = command("export", "--from", "nobody/none", "--out", "out")
    assert code == 1 and "pip install 'weft[hub]'" in err and not Path("out").exists()
