"""From a model with SiLU to one with ReLU whose active neurons are predicted, by commands alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean

import pytest

from tests.conftest import Command
from weft.observe.run_metrics import read_metrics

RECIPE = """
[model]
{model}
[data]
sources = [{{ kind = "jsonl", path = "{texts}.jsonl" }}]
tokenizer = "bytes"
seq_len = 64
validation = 0.1
[train]
steps = {steps}
batch = 8
[optimizer]
lr = 5e-3
[validation]
every = 20
"""
SILU = "layers = 2\nembed = 32\nheads = 4\nffn = 128"


def losses(run: str) -> list[float]:
    return [record["loss"] for record in read_metrics(Path(run))["train"]]


@pytest.mark.soak
def test_from_silu_to_few_neurons_in_memory(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = random.Random(0)
    words = ["weft", "read", "layer", "disk", "token", "model", "the", "a"]
    texts = [" ".join(drawn.choices(words, k=40)) for _ in range(300)]
    Path("texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))  # fmt: skip
    Path("texts.txt").write_text("\n".join(texts[:60]))
    texts_path = tmp_path / "texts"
    from_silu = 'from = "silu"\nactivation = "relu"'
    runs = (
        ("silu", SILU, 120),
        ("same", 'from = "silu"', 1),
        ("begun", from_silu, 1),
        ("relu", from_silu, 80),
    )
    for name, model, steps in runs:
        Path(f"{name}.toml").write_text(RECIPE.format(model=model, texts=texts_path, steps=steps))  # fmt: skip
        code, _, err = command("train", f"{name}.toml", "--out", name)
        assert code == 0, err
    # of the same batch and weights
    assert losses("relu")[0] > losses("same")[0]
    assert mean(losses("relu")[-20:]) < mean(losses("silu")[-20:]) + 0.02, "it heals"

    train = ("predictor", "--texts", "texts.txt", "--rank", "12")
    code, out, err = command(*train, "--checkpoint", "silu", "--out", "p")
    assert code == 2 and "dense models with activation relu" in err, err
    for name in ("begun", "relu"):
        code, out, err = command(*train, "--checkpoint", name, "--out", f"{name}.p")
        assert code == 0 and "layer 1:" in out and f"written to {name}.p" in out, err
    code, _, err = command(*train, "--checkpoint", "relu", "--out", "relu.p")
    assert code == 1 and "exists already" in err, err

    write = (
        "generate",
        "--checkpoint",
        "relu",
        "--prompt",
        "the model",
        "--tokens",
        "30",
    )
    write = (*write, "--temperature", "0")
    code, expected, err = command(*write)
    assert code == 0, err
    code, out, err = command(*write, "--neurons-in", "disk", "--neurons", "0.9")
    assert code == 0 and out == expected, err
    assert "neurons were used, and" in err
    where = ("--neurons-in", "disk", "--predictor")
    code, out, err = command(*write, *where, "relu.p", "--neurons", "1")
    assert code == 0 and out[:12] == expected[:12], err
    for file, said in (("begun.p", "was trained for another model"), ("texts.txt", "cannot be read")):  # fmt: skip
        code, _, err = command(*write, *where, file)
        assert code == 2 and said in err and len(err.strip().splitlines()) == 1, err
