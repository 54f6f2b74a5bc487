"""Weights in four bits: the same for every cut, as small as the formula, and as close as normal values allow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.layout.mesh import Mesh
from weft.models import nf4
from weft.parallel.build import parallelize
from weft.recipe import Adapter, ModelShape, Train


def stored(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales = nf4.quantized_rows(weight)
    steps, about = nf4.quantized_scales(scales.flatten())
    return codes, steps.view(scales.shape), about


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 400), st.integers(1, 200), st.data())
def test_any_rows_are_those_of_the_whole(
    rows: int, width: int, data: st.DataObject
) -> None:
    weight = torch.randn(
        rows, width, generator=torch.Generator().manual_seed(rows * 1000 + width)
    )
    whole = dict(zip(("codes", "scales", "about"), stored(weight), strict=True))
    for part, values in whole.items():
        lo = data.draw(st.integers(0, len(values)))
        hi = data.draw(st.integers(lo, len(values)))
        box = ((lo, hi), (0, values.shape[1]))
        assert torch.equal(
            nf4.stored_values(
                part, nf4.RowReader(lambda a, b: weight[a:b], rows, width), box
            ),
            values[lo:hi],
        )
    lo = data.draw(st.integers(0, rows - 1))
    codes, scales, about = whole.values()
    all_rows = nf4.dequantized(codes, scales, about, 0, width, torch.float32)
    assert torch.equal(
        nf4.dequantized(codes[lo:], scales[lo:], about, lo, width, torch.float32),
        all_rows[lo:],
    )


def test_normal_values_lose_a_tenth_and_what_is_stored_stays() -> None:
    weight = torch.randn(512, 576, generator=torch.Generator().manual_seed(0))
    codes, scales, about = stored(weight)
    again = nf4.dequantized(codes, scales, about, 0, 576, torch.float32)
    assert (again - weight).norm() / weight.norm() < 0.1
    assert torch.equal(nf4.quantized_rows(again)[0], codes)
    half = nf4.dequantized(codes, scales, about, 0, 576, torch.bfloat16)
    assert torch.equal(half, again.bfloat16())


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(3, 70), torch.full((2, 64), 1e-30), torch.tensor([[5.0, -5.0, 0.0]])],
)
def test_weights_without_any_spread(weight: torch.Tensor) -> None:
    again = nf4.dequantized(*stored(weight), 0, weight.shape[1], torch.float64)
    assert again.isfinite().all() and (again - weight).abs().max() <= 1e-6


def test_bytes_held_are_at_most_0_27_of_bfloat16() -> None:
    """Of SmolLM2-135M's own sizes: four bits, one scale of a byte for 64, 8 bytes for 256 scales."""
    shape = ModelShape(
        vocab=64, layers=2, embed=576, heads=9, kv_heads=3, head_dim=64, ffn=1536
    )
    _, state = parallelize(
        shape.model_copy(update={"adapter": Adapter(kind="qlora")}),
        Mesh.single(),
        Train(),
    )
    held = sum(
        h.local.numel() * h.local.element_size()
        for h in state.held
        if ".quantized." in h.name
    )
    weights = 2 * (2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576)
    assert held / (2 * weights) < 0.27
    scales = weights / 64
    assert held <= weights / 2 + scales + 8 * (scales / 256 + 14)
