"""One description of a model: what modules declare, and what other programs call the rows of the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import weft.models
from weft.checkpoint.convert.rules import rule_and_names
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.recipe import Adapter, ModelShape
from weft.shapes.foreign_names import gguf_name, hf_names
from weft.shapes.parameters import parameters
from weft.shapes.shape import shape_of, shape_of_sizes

SMALL: dict[str, Any] = {"vocab": 31, "layers": 3, "embed": 24, "heads": 4, "ffn": 40}
LATENT = {"kv_rank": 8, "head_dim": 6, "rope_dim": 4, "value_dim": 5}
MIXED = {"experts": 4, "expert_ffn": 16, "first_dense": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "qwen2": {"qkv_bias": True, "tied": True},
    "gemma3": {"qk_norm": True, "norm_after": True, "scaled_embedding": True, "activation": "gelu"},
    "mixtral": {"experts": 4, "expert_ffn": 16},
    "qwen2-moe": MIXED | {"shared_experts": 2, "shared_mix": "gate", "router": "pre-softmax", "qkv_bias": True},
    "deepseek": LATENT | MIXED | {"q_rank": 7, "shared_experts": 1, "router": "sigmoid", "balance": "step"},
    "score": {"output": "score"},
    "linear": {"mixer": "retention", "softmax_every": 2},
    "adapted": {"adapter": Adapter(kind="dora", tokens=(3, 5))},
    "quantized": {"adapter": Adapter(kind="qlora", targets=("wq", "down"))},
}  # fmt: skip


def test_modules_declare_no_sizes_of_their_own() -> None:
    """Only a plugin's module, of which no table knows anything, names dimensions outside of the table."""
    folder = Path(next(iter(weft.models.__path__)))
    naming = {
        p.name for p in folder.glob("*.py") if re.search(r"\bDim\(", p.read_text())
    }
    assert naming == {"plugin_model.py"}


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_is_what_modules_have(name: str) -> None:
    shape = ModelShape(**SMALL | SHAPES[name])
    logical = dict(Transformer(shape, Mesh.single()).logical_parameters())
    table = {row.name: row for row in parameters(shape)}
    assert logical.keys() == table.keys()
    for path, row in table.items():
        assert (logical[path].dims, logical[path].std) == (row.dims, row.std)
        assert logical[path].everywhere == (row.kind == "statistic")


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "qwen2-moe", "deepseek"])
def test_foreign_names_lead_back(name: str) -> None:
    shape = ModelShape(**SMALL | SHAPES[name])
    for row in parameters(shape):
        for theirs in hf_names(row.name, shape):
            _, ours = rule_and_names(theirs) or (None, ())
            assert ours == (row.name,)
        if not shape.mixtures:
            _, ours = rule_and_names(gguf_name(row.name)) or (None, ())
            assert ours == (row.name,)


@pytest.mark.parametrize("name", SHAPES)
def test_the_planner_counts_the_table(name: str) -> None:
    shape = ModelShape(**SMALL | SHAPES[name])
    kinds = ("adapter", "statistic", "stored")
    base = parameters(shape.model_copy(update={"adapter": None}))
    counted = sum(row.numel for row in base if row.kind not in kinds)
    assert shape_of(shape).parameters == pytest.approx(counted, rel=1e-12)


def test_sizes_alone_give_the_same_numbers() -> None:
    shape = shape_of(ModelShape(**SMALL, kv_heads=2))
    sizes = {"embed": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 40}
    assert shape_of_sizes(3, vocab=31, **sizes) == shape
    plain = shape_of_sizes(3, vocab=31, gated=False, **sizes)
    assert shape.parameters - plain.parameters == 3 * 24 * 40
