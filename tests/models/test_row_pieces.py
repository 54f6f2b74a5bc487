"""Elementwise parts of a block by a kernel, and by PyTorch, against autograd in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft.models import row_pieces
from weft.models.row_pieces import gate_gradients, gated, norm_gradients, normed_rows


@pytest.mark.parametrize("kernel", [True, False])
def test_parts_and_their_gradients_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    if not kernel:
        monkeypatch.setattr(row_pieces, "pieces_kernel", lambda: None)
    elif row_pieces.pieces_kernel() is None:
        pytest.skip("no C compiler, or PyTorch without libgomp")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    drawn = torch.Generator().manual_seed(4)
    wide = 4 * torch.randn(5, 74, generator=drawn)
    wide[0, 0], wide[0, 1] = 100, -100
    grad, plus = torch.randn(2, 5, 37, generator=drawn)
    x, scale = torch.randn(5, 37, generator=drawn), torch.rand(37, generator=drawn)
    exact = [each.double().requires_grad_() for each in (wide, x, scale)]
    gate, up = exact[0].chunk(2, -1)
    active, rows = F.silu(gate) * up, F.rms_norm(exact[1], (37,), exact[2], 1e-5)
    torch.testing.assert_close(gated(wide).double(), active.detach(), rtol=1e-5, atol=1e-5)  # fmt: skip
    normed = normed_rows(x, scale, 1e-5)
    torch.testing.assert_close(normed.rows.double(), rows.detach(), rtol=1e-5, atol=1e-5)  # fmt: skip
    (active * grad + rows * grad + exact[1] * plus).sum().backward()
    both = torch.cat(gate_gradients(wide, grad), -1)
    of_norm = norm_gradients(grad, x, scale, normed.inverse, plus)
    for own, expected in zip((both, *of_norm), exact, strict=True):
        assert expected.grad is not None
        torch.testing.assert_close(own.double(), expected.grad, rtol=1e-5, atol=1e-5)
