"""Commands as a user types them: what they print, where they exit, and that mistakes cost one line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cases import write_corpus
from tests.conftest import Command
from tests.started import Started
from weft.checkpoint.kept_recipe import written_settings
from weft.checkpoint.store import committed_checkpoints
from weft.cli import run_command_line
from weft.errors import UsageError
from weft.observe.run_metrics import read_metrics
from weft.recipe import build_recipe, load_recipe

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "recipes/quickstart.toml")

TINY = """
[model]
layers = 2
embed = 24
heads = 4
kv_heads = 2
head_dim = 6
ffn = 40
[data]
sources = [{{ kind = "jsonl", path = "{corpus}" }}]
seq_len = 16
cache = "{cache}"
validation = 0.1
[train]
steps = 5
batch = 4
[validation]
every = 2
[observe]
split_every = 3
[generate]
prompt = "ab"
tokens = 5
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe of a job that takes a second, in an empty working folder."""
    path = tmp_path / "tiny.toml"
    path.write_text(
        TINY.format(corpus=write_corpus(tmp_path), cache=tmp_path / "cache")
    )
    monkeypatch.chdir(tmp_path)
    return str(path)


@pytest.mark.parametrize(("words", "code", "said"), [
    (["train", "nope.toml"], 1, r"recipe nope\.toml does not exist"),
    (["train"], 2, r"name a recipe, .*\(weft recipes lists them\), or continue a run: --resume runs/NAME"),
    (["train", "--resume", "auto"], 2, r"none is named; write weft train RECIPE --resume auto, or name the run"),
    (["train", "--resume", "nowhere"], 1, r"nowhere does not exist; give a run folder or a checkpoint"),
    (["train", "--resume", ""], 2, r"--resume is empty; give a run folder or a checkpoint, .*runs/NAME, or auto"),
    (["train", QUICKSTART, "--resume", ""], 2, r"--resume is empty; give a run folder or a checkpoint"),
    (["verify"], 2, r"Missing argument 'RECIPE'"),
    (["serve", "runs/one"], 2, r"'--from': name the model by it, as in '.*weft serve --checkpoint runs/mine'; see"),
    (["chat", "--checkpoint", "x"], 2, r"--checkpoint; the model needs none: '.*weft chat runs/mine'; see"),
    (["chat", "--lr", "x"], 2, r"No such option: --lr(?!.*--set)"),
    (["train", QUICKSTART, "--checkpoint", "x"], 2, r"No such option: --checkpoint; see"),
    (["trian", "x"], 2, r"No such command 'trian'"),
    (["train", QUICKSTART, "--layuot", "tp=2"], 2, r"No such option: --layuot"),
    (["train", QUICKSTART, "--layout", "tq=2"], 2, r"unknown axis 'tq'; did you mean 'tp'\?"),
    (["train", QUICKSTART, "--layout", "tp=x"], 2, r"tp = 'x': it should be a whole number"),
    (["train", QUICKSTART, "--layout", "dp=2,dp=4"], 2, r"dp is there twice; say it once"),
    (["train", QUICKSTART, "--layout", "dp=99999999"], 1, r"too little memory: 99999999 ranks take .* fewer ranks"),
    (["train", QUICKSTART, "--set", "model.embed=30000", "--layout", "dp=2"], 1, r"on 2 ranks need .*lower layout\.dp"),
    (["train", QUICKSTART, "--layout", "tp=0"], 2, r"tp = 0: it should be greater"),
    (["train", QUICKSTART, "--layout", "tp=16"], 2, r"tp=16 is more than the model's \d+ heads; use tp <= \d+"),
    (["train", QUICKSTART, "--layout", "cp=5,context=ulysses"], 2, r"Ulysses cannot split"),
    (["train", QUICKSTART, "--layout", "dp=2,ep=2"], 2, r"the model has none; leave ep out, or set model\.experts"),
    (["train", QUICKSTART, "--layout", "pp=8,schedule=zb-v"], 2, r"has 16 stages, too many for a model of 4 layers"),
    (["train", QUICKSTART, "--layout", "pp=2,schedule=zb-w"], 2, r"did you mean 'zb-v'\?"),
    (["train", QUICKSTART, "--layout", "pp=3,schedule=dualpipe"], 2, r"even number of ranks, got 3"),
    (["train", QUICKSTART, "--layout", "pp=4,skip=0.5"], 2, r"skip at most 33%"),
    (["train", QUICKSTART, "--set", "optimizer.post_validation=true"], 2, r"is for pipelines; set layout.pp above 1"),
    (["train", QUICKSTART, "--set", "model.layrs=2"], 2, r"unknown key 'model\.layrs'; did you mean 'layers'\?"),
    (["train", QUICKSTART, "--set", "steps=2"], 2, r"'steps'; did you mean 'train\.steps' or 'federated\.steps'\?"),
    (["train", "quickstart", "--set", "train.stepz=2"], 2, r"error: quickstart: unknown key .*did you mean 'steps'\?"),
    (["train", QUICKSTART, "--set", "modle.layers=2"], 2, r"unknown key 'modle'; did you mean 'model'\?"),
    (["train", QUICKSTART, "--set", "train.dtype=flot32"], 2, r"did you mean 'float32'\?"),
    (["train", QUICKSTART, "--set", "train.steps=-1"], 2, r"train\.steps = -1: it should be greater than or"),
    (["train", QUICKSTART, "--set", "train.steps=many"], 2, r"train\.steps = 'many': it should be a whole number"),
    (["train", QUICKSTART, "--set", "model.experts=3.5"], 2, r"3\.5: it should be a whole number or a list \(experts"),
    (["train", QUICKSTART, "--set", "model.layers=999999999999"], 2, r"it should be less than or equal to 100000"),
    (["train", QUICKSTART, "--set", "train.batch=99999999999999"], 2, r"it should be less than or equal to 10000000"),
    (["train", QUICKSTART, "--set", "data.seq_len=99999999999"], 2, r"data\.seq_len = 99999999999: it should be less"),
    (["train", QUICKSTART, "--set", "data.tokenizer=train:99999999999"], 2, r"a number of 257 .* to 16777216"),
    (["train", QUICKSTART, "--set", "train.lr=1"], 2, r"unknown key 'train\.lr'; did you mean 'optimizer\.lr'\?"),
    (["train", QUICKSTART, "--set", "data.path=x"], 1, r"data source x: there is no such file or folder; set 'path'"),
    (["train", str(Path(__file__).parent)], 2, r"is a folder; give a recipe, which is a TOML file"),
    (["train", QUICKSTART, "--set", "optimizer.lr=inf"], 2, r"optimizer\.lr = inf: it should be a finite number"),
    (["train", QUICKSTART, "--set", "train.steps"], 2, r"not of the form section\.key=value"),
    (["train", QUICKSTART, "--set", "model.heads=5", "--set", "model.kv_heads=2"], 2, r"multiple of kv_heads"),
    (["train", QUICKSTART, "--set", 'data.sources=[{kind="text"}]'], 2, r"needs 'path'"),
    (["train", QUICKSTART, "--set", 'data.sources=[{kind="text",path="none/*.txt"}]'], 1, r"none/\*\.txt"),
    (["train", QUICKSTART, "--set", "data.tokenizer=missing.json"], 1, r"missing\.json"),
    (["train", QUICKSTART, "--set", "model.vocab=100"], 2, r"tokenizer .* the model's vocabulary is 100"),
    (["train", QUICKSTART, "--set", "model.from=none.json"], 1, r"none\.json"),
    (["train", QUICKSTART, "--set", "model.embed=300000", "--set", "model.layers=99"], 1, r"too little memory"),
    (["train", QUICKSTART, "--resume", "nowhere"], 1, r"nowhere does not exist"),
    (["verify", QUICKSTART, "--dtype", "float8"], 2, r"--dtype 'float8' is not possible"),
    (["report", "nowhere"], 1, r"nowhere"),
    (["probe", "--out", str(Path(__file__).parent)], 1, r"cannot write --out .*Is a directory; name another file"),
    (["profile", str(Path(__file__).parent)], 2, r"cannot read the trace .*Is a directory$"),
    (["schedule", "gpipe", "--stages", "10000", "--microbatches", "10000"], 2, r"is too large for a table"),
    (["verifi", "x"], 2, r"No such command 'verifi'\. Did you mean 'verify'\? See '.*--help'$"),
    (["generate", "--checkpoint", "nowhere", "--prompt", "x"], 1, r"nowhere does not exist"),
    (["generate", "--checkpoint", "nowhere"], 2, r"either --prompt TEXT, --prompt-file FILE or --prompts FILE"),
    (["generate", "--checkpoint", "nowhere", "--prompt-file", "none.txt"], 2, r"none\.txt cannot be read: No such"),
    (["generate", "--checkpoint", "nowhere", "--prompt-file", sys.executable], 2, r"read: not text in UTF-8 \(byte"),
    (["generate", "--checkpoint", "nowhere", "--prompt", "x", "--stop", ""], 2, r"--stop is empty; give a text, or"),
    (["new", ""], 2, r"the new recipe has no name; say: weft new NAME"),
    (["new", "a" * 300], 1, r"cannot write a*\.toml: File name too long; choose another name"),
    (["new", "x", "--from", "a" * 300], 1, r"recipe a{300} does not exist; see 'weft recipes'"),
    (["train", "a" * 300], 1, r"recipe a{300} does not exist; see 'weft recipes'"),
    (["train", f"{'a' * 300}.toml"], 1, r"recipe a{300}\.toml does not exist; see 'weft recipes'"),
    (["train", QUICKSTART, "--set", f"data.path={'a' * 300}"], 1, r"error: a{300}: File name too long; name another$"),
    (["train", QUICKSTART, "--from", "a" * 300], 1, r"error: a{300}/.*: File name too long; name another$"),
    (["generate", "--from", "a" * 300, "--prompt", "x"], 1, r"error: a{300}/.*: File name too long; name another$"),
    (["report", "a" * 300], 1, r"error: a{300}/.*: File name too long; name another$"),
    (["plan", "a" * 300], 1, r"model 'a{300}' is neither a file nor built in; choose from: "),
    (["verify", QUICKSTART, "--random", "2", "--layout", "dp=2"], 2, r"--layout has no use with --random"),
    (["verify", QUICKSTART, "--random", "2", "--set", "layout.pp=2"], 2, r"--set layout\.pp has no use with --random"),
    (["verify", QUICKSTART, "--random", "2", "--set", "memory.tiels=2"], 2, r"did you mean 'tiles'\?"),
    (["generate", "--checkpoint", "nowhere", "--prompt", "x", "--layout", "dp=2"], 2, r"has no use for dp; leave it"),
    (["serve", "--checkpoint", "nowhere", "--layout", "shard=2"], 2, r"has no use for shard; leave it out"),
])  # fmt: skip
def test_mistakes_cost_one_line(
    words: list[str],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["weft", *words])
    with pytest.raises(SystemExit) as ended:
        run_command_line()
    out, err = capsys.readouterr()
    assert ended.value.code == code, err
    line = err.strip()
    assert re.search(said, line), line
    assert (
        "\n" not in line
        and line.startswith("weft: error: ")
        and "Traceback" not in out + err
    )
    assert not list(tmp_path.iterdir())


def test_an_empty_recipe_is_a_mistake(tmp_path: Path) -> None:
    """Nobody means to train what all defaults together give; with a value of its own it is a recipe."""
    empty = tmp_path / "empty.toml"
    empty.write_text("# to be written\n")
    with pytest.raises(
        UsageError,
        match=r"empty\.toml is empty; 'weft new NAME' writes a recipe to edit",
    ):
        load_recipe(empty, layout="dp=2")
    assert load_recipe(empty, ["train.steps=7"]).train.steps == 7


def test_data_in_the_place_of_a_recipe_are_named(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text('{"messages": []}')
    with pytest.raises(
        UsageError, match=r"is data, .*'weft train finetune --data .*talks\.jsonl'"
    ):
        load_recipe(str(path))


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_text("[train]\r\nsteps = 7\r\n", encoding="utf-8-sig", newline="")
    assert load_recipe(str(path)).train.steps == 7
    for text, said in (
        (b'name = "\xe9"', r"windows\.toml is not text in UTF-8 \(byte 8\)"),
        (b"[train", "not valid TOML"),
    ):
        path.write_bytes(text)
        with pytest.raises(UsageError, match=said):
            load_recipe(str(path))


@pytest.mark.slow
def test_train_report_generate_resume(
    tiny: str, launched: Command, tmp_path: Path
) -> None:
    """Two ranks, then this process alone, then two again."""
    command = launched
    code, out, err = command("train", tiny, "--layout", "shard=2", "--out", "run")
    assert code == 0, err
    assert "validation loss" in out and "report      run/report.html" in out
    assert "the model writes" in out
    records = read_metrics(tmp_path / "run")
    assert [r["step"] for r in records["train"]] == [1, 2, 3, 4, 5]
    head = records["run"][0]
    assert (
        records["split"] and head["layout"] == "shard=2" and head["peak_flops"] is None
    )
    assert (
        head["command"] == f"weft train {tiny} --layout shard=2 --out run"
        and head["host"]
        and head["versions"]
    )
    assert all(
        0 < r["memory_now_gib"] <= r["memory_gib"] + 0.01 for r in records["train"]
    )
    assert records["sample"][0]["samples"][0]["prompt"] == "ab"
    assert records["sample"][0]["samples"][0]["text"].strip() in out
    assert (tmp_path / "run/plotly.min.js").stat().st_size > 1_000_000
    assert (
        "already holds something"
        in command("train", tiny, "--layout", "shard=2", "--out", "run")[2]
    )

    changed = [
        "--set",
        "train.steps=9",
        "--set",
        "observe.trace=1",
        "--set",
        "observe.split_every=1",
    ]
    code, out, err = command("train", "--resume", "run", "--layout", "", *changed)
    assert code == 0, err
    assert (
        "trace       run/trace: a file per rank" in out
        and len(list(Path("run/trace").iterdir())) == 1
    )
    assert "resumed from run/checkpoints/step-000005" in out
    records = read_metrics(tmp_path / "run")
    assert [r["step"] for r in records["train"]] == list(range(1, 10))
    # after the traced step and its warm-up
    assert [r["step"] for r in records["split"] if r["step"] > 5] == [8, 9]
    code, text, _ = command(
        "generate",
        "--checkpoint",
        "run",
        "--prompt",
        "abc",
        "--tokens",
        4,
        "--temperature",
        0,
    )
    assert code == 0 and text.startswith("abc")
    words = ("generate", "--checkpoint", "run", "--prompt", "abc", "--tokens", 4)
    assert command(*words, "--weights", "int8")[1].startswith("abc")
    assert "weights cannot be 'int2'" in command(*words, "--weights", "int2")[2]
    code, _, err = command("export", "--checkpoint", "run", "--out", "hf")
    assert code == 0, err
    _, again, _ = command(
        "generate",
        "--checkpoint",
        "hf",
        "--prompt",
        "abc",
        "--tokens",
        4,
        "--temperature",
        0,
    )
    assert again == text
    (tmp_path / "prompt.txt").write_text("abc")
    words = (
        "generate",
        "--checkpoint",
        "run",
        "--prompt-file",
        "prompt.txt",
        "--tokens",
        4,
        "--temperature",
        0,
    )
    _, spread, err = command(*words, "--layout", "cp=2")
    assert "abc" + spread == text and "3 tokens of prompt over 2 ranks" in err, err


def test_ctrl_c_in_any_command_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of several ranks the first one says it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.recipe.load_recipe", interrupt)
    monkeypatch.setattr(sys, "argv", ["weft", "train", "quickstart"])
    for rank, said in (
        (None, "weft: interrupted\n"),
        ("0", "weft: interrupted\n"),
        ("1", ""),
    ):
        monkeypatch.delenv(
            "RANK", raising=False
        ) if rank is None else monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            run_command_line()
        assert (ended.value.code, capsys.readouterr().err) == (130, said)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "number"), [("", signal.SIGINT), ("shard=2", signal.SIGTERM)]
)
def test_a_double_signal_saves_and_resume_goes_on(
    tiny: str, command: Command, tmp_path: Path, layout: str, number: signal.Signals
) -> None:
    """An impatient Ctrl-C, or what ``timeout`` sends. What one rank or two have saved goes on in this process."""
    run = [
        "train",
        tiny,
        "--layout",
        layout,
        "--out",
        "run",
        "--set",
        "validation.every=0",
    ]
    process = Started(*run, "--set", "train.steps=100000", start_new_session=True)
    metrics = tmp_path / "run/metrics.jsonl"
    until = time.monotonic() + 240
    while time.monotonic() < until and not (
        metrics.exists() and '"kind": "train"' in metrics.read_text()
    ):
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)  # as a terminal does
    time.sleep(0.3)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number, (out, err)
    assert f"stopped by {number.name}" in out and "Traceback" not in out + err
    assert len(committed_checkpoints(tmp_path / "run/checkpoints")) == 1
    assert not [
        c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE
    ]
    step = int(
        committed_checkpoints(tmp_path / "run/checkpoints")[0].name.split("-")[1]
    )
    run[3] = ""
    code, _, err = command(*run, "--resume", "auto", "--set", f"train.steps={step + 2}")
    assert code == 0, err
    assert max(r["step"] for r in read_metrics(tmp_path / "run")["train"]) == step + 2


@pytest.mark.slow
def test_failure_in_a_rank_leaves_no_run_folder(
    tiny: str, launched: Command, tmp_path: Path
) -> None:
    code, _, err = launched(
        "train", tiny, "--layout", "shard=2", "--out", "run", "--resume", tmp_path
    )
    assert code == 1
    assert (
        err.strip().startswith("weft: error: no checkpoint in")
        and "\n" not in err.strip()
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_data_that_ends_stops_all_ranks(tiny: str, launched: Command) -> None:
    change = [
        "data.epochs=1",
        "train.steps=1000",
        "validation.every=0",
        "observe.split_every=0",
        "generate.tokens=1",
    ]
    words = [word for setting in change for word in ("--set", setting)]
    code, out, err = launched(
        "train", tiny, "--layout", "shard=2", "--out", "run", *words
    )
    assert code == 0, err
    assert "the data ended after" in out


@pytest.mark.slow
def test_verify_prints_and_exits(tiny: str, launched: Command) -> None:
    code, out, err = launched(
        "verify", tiny, "--layout", "tp=2", "--steps", "2", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    assert found["ok"] and all(
        found[k] <= 1e-10 for k in ("loss", "grad", "grad_norm", "param")
    )
    code, typed, _ = launched(
        "verify", tiny, "--layout", "dp=16,shard=32,tp=2", "--types", "--json"
    )
    assert code == 0 and json.loads(typed) == {
        "ok": True, "layout": "dp=16,shard=32,tp=2", "world": 1024, "fault": None,
    }  # fmt: skip


def test_every_recipe_is_valid() -> None:
    recipes = sorted((ROOT / "recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        recipe = load_recipe(path)
        again = build_recipe(written_settings(recipe.recorded(given=True)))
        assert again == recipe
        assert again.model_fields_set == recipe.model_fields_set
