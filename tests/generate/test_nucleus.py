"""The nucleus of a row that is not sorted, against sorting all of it."""

from __future__ import annotations

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
