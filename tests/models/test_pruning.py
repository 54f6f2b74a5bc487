"""Which elements pruning keeps, and pruned models in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.chats import TEMPLATES, save_tokenizer
from tests.conftest import Command
from tests.models.test_products import build
from weft.checkpoint.model import open_model
from weft.errors import UsageError
from weft.models.hugging_face import export, hf_values, tokenizer_files
from weft.models.pruning import check_prunable, keep_largest, prune_weights
from weft.models.rope import angles
from weft.models.sparse_matrix import PARTS
from weft.recipe import Adapter, ModelShape
from weft.registry import find

TEXT = "the user asks, the assistant answers: weather in Paris is 21 degrees " * 4


@given(
    scores=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    share=st.floats(0, 0.99),
)
def test_exactly_the_share_is_dropped_and_nothing_larger(
    scores: list[int], share: float
) -> None:
    """Also where many scores are equal."""
    row = torch.tensor([scores], dtype=torch.float32)
    kept = keep_largest(row, share)
    assert int((~kept).sum()) == round(share * len(scores))
    if kept.any() and (~kept).any():
        assert row[~kept].max() <= row[kept].min()


def test_wanda_weighs_rows_by_the_norms_of_what_pruned_blocks_give() -> None:
    model, plain = build(), build()
    ids = torch.randint(0, 128, (600,), generator=torch.Generator().manual_seed(0))
    names = prune_weights(model, find("pruner", "wanda").implementation(), 0.5, ids.tolist())  # fmt: skip
    assert len(names) == 2 * 7
    pieces = ids.split(512)
    texts = [plain.embedding(piece[None]) for piece in pieces]
    inputs = torch.cat([plain.blocks["0"].attention_norm(x)[0] for x in texts])
    weight, norms = plain.blocks["0"].attention.wk, inputs.norm(dim=0)
    limits = (weight.abs() * norms).median(1, keepdim=True).values
    expected = weight * (weight.abs() * norms > limits)
    torch.testing.assert_close(model.blocks["0"].attention.wk, expected)
    # the second block reads what the pruned first one writes
    written = []
    for x in texts:
        rope = angles(torch.arange(x.shape[1])[None], model.freq, x.dtype)
        ends = torch.tensor([0, x.shape[1]], dtype=torch.int32)
        written.append(model.run_block(0, x, rope, ends))
    inputs = torch.cat([plain.blocks["1"].attention_norm(x)[0] for x in written])
    weight, norms = plain.blocks["1"].attention.wk, inputs.norm(dim=0)
    limits = (weight.abs() * norms).median(1, keepdim=True).values
    expected = weight * (weight.abs() * norms > limits)
    torch.testing.assert_close(model.blocks["1"].attention.wk, expected)
    assert not model.blocks["0"].attention.products


def saved(folder: Path) -> Path:
    """A model in Hugging Face's form with a tokenizer."""
    beside = save_tokenizer(folder.parent / "tokenizer", TEMPLATES["smollm2"])
    files = tokenizer_files(beside)
    model = build(vocab=512)
    export(dict(model.named_parameters()), model.shape, folder, None, files)
    return folder


@pytest.mark.parametrize(
    "by", [pytest.param("magnitude", marks=pytest.mark.soak), "wanda"]
)
def test_a_pruned_model_is_read_by_every_command(
    command: Command, tmp_path: Path, by: str
) -> None:
    folder, out, text = saved(tmp_path / "model"), tmp_path / "pruned", tmp_path / "text"  # fmt: skip
    text.write_text(TEXT)
    words = ["--data", text] if by == "wanda" else []
    code, said, err = command("prune", "--from", folder, "--share", 0.7, "--by", by, *words, "--out", out)  # fmt: skip
    assert not code, err
    stored = load_file(out / "model.safetensors")
    weights = [n.removesuffix(".values") for n in stored if n.endswith(".values")]
    parts = {weight + part: stored[weight + part] for weight in weights for part in PARTS}  # fmt: skip
    held = sum(x.nbytes for x in parts.values())
    size = sum(8 * x.numel() for n, x in parts.items() if n.endswith(".weight"))
    rows = sum(x.numel() for n, x in parts.items() if n.endswith(".offsets"))
    kept = sum(x.numel() for n, x in parts.items() if n.endswith(".values"))
    assert held == size // 8 + kept * 4 + rows * 8 and kept == pytest.approx(0.3 * size, rel=0.01)  # fmt: skip
    assert f"{size - kept:,} of {size:,} elements" in said and f"{held:,} bytes" in said
    model = open_model(str(out), "cpu", print).model
    values, shape = hf_values(out, model.shape), model.shape
    for name, logical in model.logical_parameters():
        whole = model.get_parameter(name)
        if whole.dim() == 2:
            box = (3, 5), (1, whole.shape[1] - 2)
            assert torch.equal(values(name, logical, box), whole[3:5, 1:-2])
    # in its form, and as a dense model for other programs
    prompt = ["--prompt", "the weather", "--tokens", 6, "--temperature", 0]
    texts = [
        command("generate", "--checkpoint", where, *prompt, *more)[1]
        for where, more in [(out, []), (out, ["--weights", "sparse"])]
    ]
    assert texts[0] == texts[1]
    with pytest.raises(RuntimeError, match="size"):
        transformers.AutoModelForCausalLM.from_pretrained(out)
    assert not command("export", "--from", out, "--out", tmp_path / "dense")[0]
    again = open_model(str(tmp_path / "dense"), "cpu", print).model
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    ours = model.blocks["1"].ffn.down
    assert torch.equal(again.blocks["1"].ffn.down, ours)
    assert torch.equal(theirs.model.layers[1].mlp.down_proj.weight, ours)
    assert shape == again.shape
    assert not command("checkpoint", "convert", out, "--out", tmp_path / "weft")[0]
    weft = open_model(str(tmp_path / "weft"), "cpu", print).model
    assert torch.equal(weft.blocks["1"].ffn.down, ours)


@pytest.mark.parametrize(("words", "line"), [
    (["--share", 1], "--share 1.0 is no part"), (["--share", 0.5, "--by", "wanda"], "--by wanda reads a text"),
    (["--share", 0.5, "--data", "x"], "--by magnitude reads no text"),
    (["--share", 0.5, "--by", "wonda"], "did you mean 'wanda'"),
    (["--share", 0.5, "--by", "wanda", "--data", "nowhere"], "--data nowhere cannot be read"),
    (["--share", 0.5, "--dtype", "int3"], "--dtype 'int3'"),
])  # fmt: skip
def test_what_cannot_be_pruned_is_one_line(
    command: Command, tmp_path: Path, words: list[object], line: str
) -> None:
    code, _, err = command("prune", "--from", tmp_path, "--out", tmp_path / "out", *words)  # fmt: skip
    assert code == 2 and line in err and err.count("\n") == 1


@pytest.mark.parametrize("shape", [
    {"experts": 4}, {"kv_rank": 16, "rope_dim": 8}, {"ffn": 64, "small_ffn": 16}, {"adapter": Adapter(rank=2, alpha=4)},
])  # fmt: skip
def test_other_models_are_refused(shape: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        check_prunable(ModelShape(vocab=8, **shape), "model")
