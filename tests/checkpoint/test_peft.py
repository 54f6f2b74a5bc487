"""Adapters as PEFT has them, beside PEFT itself: what either saves the other loads, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.checkpoint.convert.peft import (
    CONFIG,
    TENSORS,
    PeftAdapter,
    read_adapter,
    write_adapter,
)
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.models.adapters import merged_parameters
from weft.models.hugging_face import export, hf_values
from weft.models.transformer import Transformer
from weft.models.values import with_adapter
from weft.parallel.build import parallelize
from weft.recipe import Adapter, ModelShape, Train

SHAPE = ModelShape(
    vocab=97,
    layers=2,
    embed=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=40,
    init_std=0.1,
    norm_eps=1e-6,
)
TOKENS = torch.arange(40).view(2, 20) * 7 % 97

ADAPTERS = [
    Adapter(rank=3, alpha=7),
    Adapter(rank=4, rank_stabilised=True, targets=("q_proj", "down")),
    Adapter(kind="dora", rank=2, targets=("wq", "wv", "wo", "up")),
    Adapter(rank=2, targets=("blocks.1.attention.*",)),
    Adapter(
        rank=2,
        rank_pattern={"q_proj": 5, "blocks.1.ffn.*": 1},
        alpha_pattern={"wq": 3, "down": 40},
        dropout=0.1,
    ),
    Adapter(
        kind="dora",
        rank=2,
        rank_stabilised=True,
        rank_pattern={"blocks.0.*": 3},
        alpha_pattern={"up": 2.5},
    ),
]


def logits(model: Transformer) -> torch.Tensor:
    ends = torch.tensor([0, 20, 40], dtype=torch.int32)
    with torch.no_grad():
        return model(TOKENS, torch.arange(20).expand(2, 20), ends)


def trained(adapter: Adapter, base: Path) -> Transformer:
    """A model of Weft's whose adapter is not zero any more."""
    shape = SHAPE.model_copy(update={"adapter": adapter})
    model, state = parallelize(
        shape, Mesh.single(), Train(), with_adapter(hf_values(base), shape, 0)
    )
    for h in state.learning:
        h.local += 0.1 * torch.randn(
            h.local.shape, generator=torch.Generator().manual_seed(len(h.name))
        )
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama, as transformers reads it."""
    folder = tmp_path_factory.mktemp("base") / "model"
    state = parallelize(SHAPE, Mesh.single(), Train())[1]
    export({h.name: h.local for h in state.held}, SHAPE, folder)
    return folder


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
def test_peft_loads_ours_and_we_load_theirs(
    adapter: Adapter, base: Path, tmp_path: Path
) -> None:
    peft, transformers = (
        pytest.importorskip("peft"),
        pytest.importorskip("transformers"),
    )
    ours = trained(adapter, base)
    write_adapter(
        dict(ours.named_parameters()), ours.shape, str(base), tmp_path / "ours"
    )
    llama = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(llama, tmp_path / "ours")
    with torch.no_grad():
        assert (theirs(TOKENS).logits - logits(ours)).abs().max() < 1e-5

    theirs.save_pretrained(tmp_path / "theirs")
    found = PeftAdapter(tmp_path / "theirs")
    assert found.base == str(base)
    shape = SHAPE.model_copy(update={"adapter": found.adapter})
    mine, adapted = hf_values(base), found.values(shape)
    again, _ = parallelize(shape, Mesh.single(), Train(), lambda n, logical, box: (
        adapted if ".adapters." in n else mine)(n, logical, box))  # fmt: skip
    assert torch.equal(logits(again), logits(ours))


@pytest.mark.parametrize("pattern", [
    {"q_proj": 5}, {"model.layers.0.self_attn.q_proj": 3, ".*down_proj": 1}, {"layers.1.*": 4, "^model.layers.0.*": 2},
])  # fmt: skip
def test_patterns_that_peft_has_made_are_read(
    pattern: dict[str, int], base: Path, tmp_path: Path
) -> None:
    peft, transformers = (
        pytest.importorskip("peft"),
        pytest.importorskip("transformers"),
    )
    config = peft.LoraConfig(
        r=2, lora_alpha=9, target_modules="all-linear", rank_pattern=pattern, lora_dropout=0.25,
        alpha_pattern={key: 3 * rank + 1 for key, rank in pattern.items()}, init_lora_weights=False,
    )  # fmt: skip
    llama = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(llama, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    found = PeftAdapter(tmp_path / "theirs")
    assert (
        found.adapter.dropout == 0.25
        and len(set(found.adapter.rank_pattern.values()) | {2}) > 1
    )
    shape = SHAPE.model_copy(update={"adapter": found.adapter})
    mine, adapted = hf_values(base), found.values(shape)
    again, _ = parallelize(shape, Mesh.single(), Train(), lambda n, logical, box: (
        adapted if ".adapters." in n else mine)(n, logical, box))  # fmt: skip
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    # Adapters of random values are large, and float32 rounds by what is inside the model.
    assert (logits(again) - expected).abs().max() < 1e-4 * expected.abs().max().clamp(1)
    # As the server adds it to a row.
    plain, _ = parallelize(SHAPE, Mesh.single(), Train(), mine)
    for number, form in enumerate(read_adapter(tmp_path / "theirs", plain).forms):
        assert {factors.rank for factors in form} == {
            again.blocks[str(number)]
            .get_submodule(f.module)
            .adapters[f.name]
            .a.shape[0]
            for f in form
        }


@pytest.mark.parametrize("adapter", [*ADAPTERS, Adapter(kind="qlora", rank=3)], ids=str)
def test_merged_equals_unmerged(adapter: Adapter, base: Path) -> None:
    model = trained(adapter, base)
    merged = merged_parameters(model)
    plain, _ = parallelize(
        SHAPE, Mesh.single(), Train(), lambda name, logical, box: merged[name]
    )
    assert (logits(plain) - logits(model)).abs().max() < 1e-5


def test_adapters_for_another_model_are_refused_in_one_line(
    base: Path, tmp_path: Path
) -> None:
    model = trained(ADAPTERS[0], base)
    write_adapter(
        dict(model.named_parameters()), model.shape, None, tmp_path / "adapter"
    )
    found = PeftAdapter(tmp_path / "adapter")
    for change in ({"ffn": 48}, {"layers": 1}, {"layers": 3}, {"kv_heads": 4}):
        other = SHAPE.model_copy(update=change | {"adapter": ADAPTERS[0]})
        with pytest.raises(
            WeftError,
            match=r"is an adapter for another model: base_model\.model\..* give the",
        ) as no:
            found.values(other)
        assert "\n" not in str(no.value)


@pytest.mark.parametrize(("change", "said"), [
    ({"bias": "all"}, "bias = 'all' is not supported; 'none' is"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
    ({"r": "three"}, "has no usable"),
    ({"r": None}, "has no usable"),
])  # fmt: skip
def test_what_weft_would_compute_otherwise_is_refused(
    change: dict[str, Any], said: str, base: Path, tmp_path: Path
) -> None:
    model = trained(ADAPTERS[0], base)
    write_adapter(
        dict(model.named_parameters()), model.shape, None, tmp_path / "adapter"
    )
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(WeftError, match=said) as no:
        PeftAdapter(tmp_path / "adapter")
    assert "\n" not in str(no.value)


def test_damaged_files_are_one_line(base: Path, tmp_path: Path) -> None:
    model = trained(ADAPTERS[0], base)
    folder = tmp_path / "adapter"
    write_adapter(dict(model.named_parameters()), model.shape, None, folder)
    with pytest.raises(WeftError, match="exists already"):
        write_adapter(dict(model.named_parameters()), model.shape, None, folder)
    data = (folder / TENSORS).read_bytes()
    for damaged in (data[:50], b"", data[:-5]):
        (folder / TENSORS).write_bytes(damaged)
        with pytest.raises(WeftError, match="missing or damaged"):
            PeftAdapter(folder)
    (folder / TENSORS).unlink()
    with pytest.raises(WeftError, match="missing or damaged"):
        PeftAdapter(folder)
