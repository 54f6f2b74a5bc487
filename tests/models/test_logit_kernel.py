"""Statistics and derivatives of logits by a kernel, against float64."""

from __future__ import annotations

import pytest
import torch

from weft.data.batch import IGNORE
from weft.models import logit_kernel as kernels
from weft.models.logit_kernel import KeptLogits, measured_logits
from weft.models.loss import differentiated

needs_kernel = pytest.mark.skipif(
    kernels.logit_kernel() is None, reason="no C compiler, or PyTorch without libgomp"
)


@needs_kernel
@pytest.mark.parametrize(("columns", "size", "threads"), [(7, 3.0, 1), (1000, 40.0, 3)])
def test_statistics_and_derivatives_are_exact_to_float32(
    monkeypatch: pytest.MonkeyPatch, columns: int, size: float, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    drawn = torch.Generator().manual_seed(1)
    logits = size * torch.randn(5, columns, generator=drawn)
    labels = torch.tensor([0, columns - 1, 2, IGNORE, 3])
    scales = torch.tensor([[1.0], [-0.5], [2.0], [0.0], [0.25]])
    exact = logits.double().requires_grad_()
    known = labels != IGNORE
    chances = exact.log_softmax(-1)
    target = exact.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    mean = (chances.exp() * exact).sum(-1)
    statistics = [exact.logsumexp(-1), mean, exact.amax(-1), torch.where(known, target, 0)]  # fmt: skip
    expected = torch.stack(statistics, 1).detach()
    found = measured_logits(logits, labels)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    losses = -chances.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    loss = (torch.where(known, losses, 0) * scales[:, 0]).sum()
    loss.backward()
    assert exact.grad is not None
    total = KeptLogits().differentiate(logits, labels, scales, None, 0, None)
    torch.testing.assert_close(total, loss.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-5, atol=1e-7)


@needs_kernel
def test_logits_that_are_not_numbers_stay_so() -> None:
    logits = torch.zeros(2, 300)
    logits[0, 17] = torch.nan
    labels = torch.tensor([1, 2])
    assert measured_logits(logits, labels)[0, 0].isnan()
    total = KeptLogits().differentiate(logits, labels, torch.ones(2, 1), None, 0, None)
    assert total.isnan() and logits[0].isnan().all() and logits[1].isfinite().all()


@needs_kernel
def test_labels_that_are_no_columns_touch_no_other_memory() -> None:
    large = torch.zeros(4, 8)
    large[2] = 123.0
    labels = torch.tensor([16, 1], dtype=torch.int32)
    assert measured_logits(large[:2], labels)[:, 3].tolist() == [0, 0]
    scales = torch.ones(2, 1)
    KeptLogits().differentiate(large[:2], labels, scales, None, 0, None)
    assert (large[2] == 123).all() and not large[0].any() and not large[3].any()
    # columns from 8 on: labels count from the first of the vocabulary
    rows, labels = torch.randn(2, 8), torch.tensor([9, 12])
    same, expected = rows.clone(), differentiated(rows.clone(), labels, scales, None, 8, None)  # fmt: skip
    assert KeptLogits().differentiate(same, labels, scales, None, 8, None) == expected
