"""Kernels of chains of elementwise operations, against PyTorch's chains; without a GPU in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from weft.models.rope import angles, rotate
from weft.models.triton_use import fuses, runs_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(9, 64), (3, 80), (1, 6)])
def test_heads_are_rotated_like_pairs(
    heads: int, width: int, interleaved: bool
) -> None:
    """The tensor is a view of joined projections, as products give it."""
    from weft.models.pointwise_kernels import rotate_heads

    drawn = torch.Generator().manual_seed(heads)
    joined = torch.randn(1, 5, heads * width + 7, generator=drawn).to(DEVICE)
    x = joined[..., 7:].unflatten(-1, (heads, width))
    freq = torch.rand(1, width // 2, generator=drawn, dtype=torch.float64).to(DEVICE)
    positions = torch.tensor([[0, 1, 5, 100, 7]], device=DEVICE)
    cos, sin = (each[0] for each in angles(positions, freq, x.dtype))
    expected = rotate(x, cos, sin, interleaved)  # without inference mode: PyTorch's
    out = rotate_heads(x, cos, sin, interleaved)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gates_are_multiplied(dtype: torch.dtype) -> None:
    from weft.models.pointwise_kernels import silu_times

    drawn = torch.Generator().manual_seed(1)
    both = torch.randn(1, 3, 2 * 1500, generator=drawn).to(dtype).to(DEVICE)
    gate, up = both.split(1500, -1)
    near = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(
        silu_times(gate, up), F.silu(gate) * up, rtol=near, atol=near
    )


def test_they_are_for_gpus_without_gradients() -> None:
    assert runs_triton(DEVICE)
    x = torch.zeros(1, device=DEVICE)
    assert not fuses(x)
    with torch.inference_mode():
        assert fuses(x) == (DEVICE.type == "cuda")
        assert not fuses(x.double())


def test_a_query_that_sees_another_text_is_rotated_without_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``[queries, heads, width]``: where there is one query, that is no batch of one row."""
    from weft.models import rope
    from weft.models.shared_prefixes import turned

    monkeypatch.setattr(rope, "fuses", lambda x: True)
    monkeypatch.setattr(rope, "own_gradients_pay", lambda x: False)
    q, angle = torch.randn(1, 4, 8, device=DEVICE), torch.rand(1, 1, 3, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    plain, a, b = q.split([2, 3, 3], -1)
    expected = torch.cat([plain, a * cos - b * sin, b * cos + a * sin], -1)
    torch.testing.assert_close(turned(q, cos, sin), expected)
