"""The nucleus of a row that is not sorted, against sorting all of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.generate.nucleus import cut_to_nucleus


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 6.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.9, 0.999])
def test_a_nucleus_is_what_sorting_everything_keeps(
    spread: float, top_p: float
) -> None:
    """Also where all values are equal, of which the first are kept, or where many are."""
    torch.manual_seed(0)
    logits = spread * torch.randn(7001, dtype=torch.float64)
    logits[::5] = logits[0]
    weights = (logits - logits.max()).exp()
    total = float(weights.sum())
    best, order = weights.sort(descending=True, stable=True)
    before = best.cumsum(0) - best
    # sums in another order have other last bits
    margin = (before - top_p * total).abs().min()
    expected = torch.zeros_like(weights)
    wanted = order[before < top_p * total]
    expected[wanted] = weights[wanted]
    kept = cut_to_nucleus(weights, top_p * total, total)
    assert kept is not None
    if margin > 1e-9 * total:
        assert torch.equal(kept, expected)
    assert int((kept != expected).sum()) <= 1


def test_a_wrong_guess_is_none() -> None:
    """The values that are looked at first are much larger than all others."""
    weights = 0.1 * torch.rand(48_000)
    weights[::48] = 1.0
    total = float(weights.sum())
    assert cut_to_nucleus(weights, 0.5 * total, total) is None


def test_zeros_are_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a grammar allows few tokens."""
    weights = torch.zeros(7001)
    weights[[5, 48, 900]] = torch.tensor([0.5, 1.0, 0.25])
    sizes, sort = list[int](), np.sort
    monkeypatch.setattr(np, "sort", lambda row: (sizes.append(len(row)), sort(row))[1])
    kept = cut_to_nucleus(weights, 0.8 * 1.75, 1.75)
    assert kept is not None and kept.nonzero()[:, 0].tolist() == [5, 48]
    assert max(sizes) < 200
