"""Packed copies of weights against the parameters that they copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.test_lean_block import SHAPE, logits
from weft.layout.mesh import Mesh
from weft.models.packed_copies import PackedCopies
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train


def build(dtype: str = "float32", **shape: Any) -> Transformer:
    train = Train(seed=3, dtype=dtype)
    return parallelize(ModelShape(**SHAPE | shape), Mesh.single(), train)[0]


def is_packed(model: Transformer) -> bool:
    return model.logits is not None


@pytest.mark.parametrize(
    "shape",
    [
        {"tied": True},
        {"qk_norm": True},
        {"adapter": {"kind": "lora", "rank": 4, "targets": ["wq", "up"]}},
    ],
)
def test_copies_are_of_the_newest_weights_and_leave_nothing(
    shape: dict[str, Any],
) -> None:
    model = build(**shape)
    copies = PackedCopies(model)
    lean = not shape.get("qk_norm")
    with torch.inference_mode():
        for turn in range(2):
            expected = logits(model)
            with copies:
                if not is_packed(model):
                    pytest.skip("a machine whose products are not packed")
                assert all(bool(b.lean) == lean for b in model.blocks.values())
                assert (logits(model) - expected).abs().max() < 1e-4 * expected.std()
                if turn:
                    break
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.data.mul_(1.5).add_(0.01)
                # what is packed is of the weights before
                stale = logits(model)
            assert not is_packed(model)
            assert not any(block.lean for block in model.blocks.values())
            fresh = logits(model)
            assert (fresh - stale).abs().max() > 0.1 * fresh.std()
    assert not any(getattr(m, "products", None) for m in model.modules())


def test_weights_without_a_kernel_are_used_where_they_lie() -> None:
    model = build("float64")
    with torch.inference_mode():
        expected = logits(model)
        with PackedCopies(model):
            assert not is_packed(model)
            assert torch.equal(logits(model), expected)
