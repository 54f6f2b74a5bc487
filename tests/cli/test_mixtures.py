"""Folders of mixtures on the command line: continued, fine-tuned, exported; damaged ones are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.chats import TEMPLATES, save_tokenizer
from tests.conftest import Command
from tests.models.test_hugging_face import CASES, COMMON

PROMPT = "def add(a, b):"


def folder_of(name: str, path: Path) -> tuple[Path, transformers.PreTrainedModel]:
    """A tiny random model of transformers with a tokenizer beside it."""
    folder = save_tokenizer(path, TEMPLATES["smollm2"])
    vocab = transformers.AutoTokenizer.from_pretrained(folder).vocab_size + 8
    kind, change = CASES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, **COMMON | change | {"vocab_size": vocab}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    return folder, model


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("qwen2 moe", "qwen3 moe", "deepseek v2 groups")
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mixtral", "deepseek v3", *SLOW])
def test_generate_continues_as_transformers_does(
    command: Command, name: str, tmp_path: Path
) -> None:
    folder, model = folder_of(name, tmp_path / "model")
    code, out, err = command(
        "generate",
        "--checkpoint",
        folder,
        "--prompt",
        PROMPT,
        "--tokens",
        "9",
        "--temperature",
        "0",
    )
    assert code == 0, err
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(9):  # by hand, as special tokens end their own loop
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
    expected = tokenizer.decode(ids[0], skip_special_tokens=False)
    assert out.strip() == expected.strip() or (
        len(out.strip()) > len(PROMPT) and expected.startswith(out.strip())
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["deepseek v3", pytest.param("qwen3 moe", marks=pytest.mark.soak)]
)
def test_train_goes_on_from_it(
    command: Command, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = folder_of(name, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    small = ("data.seq_len=32", "train.steps=2", "train.batch=2", "train.threads=1", "observe.trackers=[]",
             "validation.every=0", "model.balance_loss=0.01")  # fmt: skip
    words = [word for setting in small for word in ("--set", setting)]
    code, _, err = command(
        "train", "quickstart", "--out", "run", "--from", folder, *words, "--layout", ""
    )
    assert code == 0, err
    code, _, err = command("export", "--from", "run", "--out", "exported")
    assert code == 0, err
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file("exported/model.safetensors"),
    )
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert any(".mlp.experts." in key for key in changed) and any(
        ".mlp.gate." in key for key in changed
    )
    assert (
        type(transformers.AutoModelForCausalLM.from_pretrained("exported")).__name__
        == json.loads((folder / "config.json").read_text())["architectures"][0]
    )


def test_a_missing_expert_or_an_unknown_router_is_one_line(
    command: Command, tmp_path: Path
) -> None:
    folder, _ = folder_of("deepseek v3", tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    gone = "model.layers.1.mlp.experts.2.down_proj.weight"
    save_file(
        {k: v for k, v in stored.items() if k != gone},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    asked = ("generate", "--checkpoint", folder, "--prompt", "a")
    started = (
        "train",
        "quickstart",
        "--from",
        folder,
        "--out",
        tmp_path / "run",
        "--layout",
        "shard=2",
    )
    for words in (asked, started):
        code, _, err = command(*words)
        assert (
            code == 1
            and f"5 of 6 experts for blocks.1.ffn.experts.down: {gone} is missing"
            in err
        )
        assert (
            err.count("weft: ") == 1
            and err.strip().splitlines()[-1].startswith("weft: ")
            and not (tmp_path / "run").exists()
        )
    config = json.loads((folder / "config.json").read_text()) | {"scoring_func": "hash"}
    (folder / "config.json").write_text(json.dumps(config))
    code, _, err = command(*started)
    assert (
        code == 1
        and "scoring_func = 'hash' is not supported" in err
        and err.count("\n") == 1
    )
