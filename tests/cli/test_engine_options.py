"""Options of an engine: both commands that hold one take the same, and an engine that is started gets them all."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.serve.running import build
from weft.cli.app import app
from weft.cli.cluster_engine import engine_command
from weft.cli.engine_options import read_engine_options
from weft.cli.serve import serve_command
from weft.errors import UsageError
from weft.generate.open_engine import EngineOptions
from weft.models.hugging_face import export

SHARED = inspect.signature(read_engine_options).parameters


def parsed(words: list[str]) -> EngineOptions:
    """The options that ``weft engine`` reads from these words."""
    command = app.parser.commands["engine"]
    params = command.make_context("engine", ["--join=h:1", *words]).params
    return read_engine_options(**{name: params[name] for name in SHARED})


def test_an_engine_that_is_started_gets_every_option(tmp_path: Path) -> None:
    plain = parsed(["--checkpoint=m"])
    assert parsed(plain.words()) == plain
    changed = EngineOptions(
        checkpoint="another", requests=3, waiting=0, budget=7, policy="chunked:5", cache=64,
        adapters=tmp_path / "a", models=None, ema=True, weights="int8", invariant=False,
        draft="small", ahead=4, early_layer=1, plugins=("json", "math"), layout="", host_cache=0.5,
        cache_folder=tmp_path, cache_folder_size=0.0, lend=True, cuda_graphs="off",
        attention="gathered",
    )  # fmt: skip
    names = [field.name for field in fields(plain)]
    same = {name for name in names if getattr(plain, name) == getattr(changed, name)}
    elsewhere = {
        "layers_in": "l", "window": 3, "least_rate": 0.5, "neurons_in": "n", "neurons": 0.5, "predictor": "p",
    }  # fmt: skip
    policy, keys = {"cache_policy": "window:64"}, {"keys_in": "k"}
    others = {"models", "invariant", "layout", "resident", "phases", "quota"}
    assert same == others | elsewhere.keys() | policy.keys() | keys.keys()
    assert parsed(changed.words()) == changed
    phases = {"phases": "split", "quota": "0.3"}
    for alone in (
        {"invariant": True},
        {"layout": "tp=2"},
        phases,
        policy,
        keys,
        elsewhere,
    ):
        other = replace(plain, **alone)
        assert parsed(other.words()) == other


def test_a_cache_engine_takes_what_concerns_it(tmp_path: Path) -> None:
    kept = ["--checkpoint=m", "--host-cache=2", f"--cache-folder={tmp_path}"]
    given = parsed([*kept, "--requests=3", "--draft=lookup"])
    words = given.words("cache")
    assert parsed(words) == replace(parsed(["--checkpoint=m"]), host_cache=2.0, cache_folder=tmp_path)  # fmt: skip
    with pytest.raises(UsageError, match="computes nothing; leave out --requests"):
        engine_command("m", join="h:1", role="cache", requests=3)
    for word, value in (
        ("lend", True), ("draft", "lookup"), ("model_name", "x"), ("plugin", ["json"]), ("drain", 5.0), ("share", 0.2),
    ):  # fmt: skip
        dashed = word.replace("_", "-")
        with pytest.raises(UsageError, match=f"rollouts .*; leave out --{dashed}"):
            engine_command("policy:", join="h:1", **{word: value})


def test_a_cache_engine_without_room_for_a_block_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_SECRET", "s")
    model = build()
    state = {name: value.detach() for name, value in model.state_dict().items()}
    export(state, model.shape, tmp_path)
    said = (
        r"has at least [\d,]+ bytes, more than the 1 bytes .*; give --host-cache .* or"
    )
    with pytest.raises(UsageError, match=said):
        engine_command(
            str(tmp_path), join="127.0.0.1:9", redial=0, role="cache", host_cache=1e-9
        )


def test_both_commands_take_them_all() -> None:
    for command in (serve_command, engine_command):
        parameters = inspect.signature(command).parameters
        assert {name: parameters[name].default for name in SHARED} == {
            name: parameter.default for name, parameter in SHARED.items()
        }
    with pytest.raises(UsageError, match="--invariant is for a model on one rank"):
        engine_command("m", join="h:1", invariant=True, layout="tp=2")
    with pytest.raises(UsageError, match="--resident is for --models"):
        serve_command("m", resident="2")


@pytest.mark.parametrize(
    "words",
    ["--layout=tp=2", "--invariant", "--lend", "--phases=split", "--cache-policy=window:9"],
)  # fmt: skip
def test_what_keys_in_files_do_not_go_with(words: str) -> None:
    with pytest.raises(UsageError, match=f"leave out {words.partition('=')[0]}"):
        parsed(["--checkpoint=m", "--keys-in=/d", words])


def test_an_empty_folder_for_keys_is_no_wish_to_keep_them_in_memory() -> None:
    with pytest.raises(UsageError, match="--keys-in is empty"):
        parsed(["--checkpoint=m", "--keys-in="])
    assert parsed(["--checkpoint=m"]).keys_in == ""
