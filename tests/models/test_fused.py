"""Hand-written gradients against PyTorch's own, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from weft.models.fused import project, rms_norm, times
from weft.models.rope import rotate


def tensors(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for s in shapes
    ]


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, scale, 1e-5)


def rotate_plainly(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


ANGLES = [t.detach() for t in tensors((2, 3, 1, 4), (2, 3, 1, 4))]
CASES: dict[str, tuple[Callable[..., object], Callable[..., object], list[tuple[int, ...]]]] = {
    "one projection": (project, lambda x, w: (F.linear(x, w),), [(2, 3, 5), (4, 5)]),
    "three projections": (
        project,
        lambda x, *ws: tuple(F.linear(x, w) for w in ws),
        [(2, 3, 5), (4, 5), (2, 5), (1, 5)],
    ),
    "norm": (norm, lambda x, s: F.rms_norm(x, (6,), s, 1e-5), [(2, 3, 6), (6,)]),
    "norm of heads": (norm, lambda x, s: F.rms_norm(x, (6,), s, 1e-5), [(2, 3, 4, 6), (6,)]),
    "rotation": (
        lambda x: rotate(x, *(a.to(x.dtype) for a in ANGLES)),
        lambda x: rotate_plainly(x, *(a.to(x.dtype) for a in ANGLES)),
        [(2, 3, 2, 8)],
    ),
    "rotation of neighbours": (
        lambda x: rotate(x, *(a.to(x.dtype) for a in ANGLES), interleaved=True),
        lambda x: rotate_plainly(torch.cat((x[..., ::2], x[..., 1::2]), -1), *(a.to(x.dtype) for a in ANGLES)),
        [(2, 3, 2, 8)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_finite_differences(name: str) -> None:
    ours, _, shapes = CASES[name]
    assert torch.autograd.gradcheck(ours, tensors(*shapes))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_pytorch(name: str, dtype: torch.dtype) -> None:
    *sides, shapes = CASES[name]
    found = []
    for side in sides:
        inputs = tensors(*shapes, dtype=dtype)
        out = side(*inputs)
        total = sum(
            o.float().sin().sum() for o in (out if isinstance(out, tuple) else (out,))
        )
        found.append([total.detach(), *torch.autograd.grad(total, inputs)])
    limit = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=limit, atol=limit)


def test_product_and_sum_of_strided_operands() -> None:
    x, w, plus = (
        t.detach() for t in tensors((7, 5), (5, 3), (7, 3), dtype=torch.float32)
    )
    torch.testing.assert_close(times(x, w.t()), x @ w)
    torch.testing.assert_close(times(x, w.t(), plus), x @ w + plus)
    assert times(x[:0], w.t()).shape == (0, 3)
