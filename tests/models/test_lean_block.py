"""Blocks in few operators against the blocks that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.layout.mesh import Mesh
from weft.models.invariant import invariant
from weft.models.lean_block import make_lean
from weft.models.products import read_only
from weft.models.rope import angles, frequencies
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train

SHAPE: dict[str, Any] = {
    "vocab": 128, "layers": 3, "embed": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "init_std": 0.2,
}  # fmt: skip


def build(word: str = "float", **shape: Any) -> Transformer:
    model = parallelize(ModelShape(**SHAPE | shape), Mesh.single(), Train(seed=3))[0]
    for name, parameter in model.named_parameters():
        if "norm" in name or name.split(".")[-1] in ("bq", "bk", "bv"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    read_only(model, word)
    make_lean(model)
    return model


def logits(model: Transformer) -> torch.Tensor:
    ids = torch.randint(0, 128, (1, 32), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([0, 20, 32], dtype=torch.int32)
    places = torch.tensor([[*range(20), *range(12)]])
    return model(ids, places, ends)


def without(model: Transformer) -> torch.Tensor:
    """The logits without few operators."""
    lean = [block.lean for block in model.blocks.values()]
    for block in model.blocks.values():
        block.lean = None
    expected = logits(model)
    for block, own in zip(model.blocks.values(), lean, strict=True):
        block.lean = own
    return expected


@pytest.mark.parametrize(
    "shape", [{}, {"qkv_bias": True, "tied": True}, {"window": 8, "full_every": 2}]
)
def test_few_operators_compute_what_the_block_computes(shape: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = build(**shape)
    lean = [block.lean for block in model.blocks.values()]
    if not all(lean):
        pytest.skip("a machine whose products are not packed")
    with torch.inference_mode():
        expected = without(model)
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
        lean[1].first.scale = lean[1].first.scale * 1.01
        assert not torch.allclose(logits(model), expected, rtol=1e-5, atol=1e-5)
        with invariant():  # which promises bits
            assert torch.equal(logits(model), without(model))


def test_norms_and_rotations_in_bfloat16_are_rounded_once() -> None:
    block = build("bfloat16").blocks["0"]
    if not block.lean:
        pytest.skip("a machine whose products in bfloat16 are not packed")
    torch.manual_seed(0)
    x = torch.randn(1, 9, 64).bfloat16()
    attend, seen = block.attention.attend, list[torch.Tensor]()
    block.attention.attend = lambda *heads: (seen.extend(heads[:2]), attend(*heads))[1]
    rope = angles(torch.arange(9)[None], frequencies(ModelShape(**SHAPE)), x.dtype)
    with torch.inference_mode():
        assert torch.equal(block.lean.first(x), block.attention_norm(x))
        ends = torch.tensor([0, 9], dtype=torch.int32)
        block(x, rope, ends)
        block.lean = None
        block(x, rope, ends)
    assert torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])
