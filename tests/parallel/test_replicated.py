"""Replicas sum their gradients in one order, whatever backward does, and each byte travels once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from weft.errors import WeftError
from weft.parallel import replicated
from weft.parallel.replicated import Parcel, Parcels

T = torch.Tensor


def sums_of(unequal: bool) -> dict[str, Any]:
    """Sum the gradients of three parameters, of which rank 1 does not use the last ones, over two passes."""
    rank = dist.get_rank()
    a, b, c = (
        nn.Parameter(torch.full((n,), 2.0, dtype=torch.float64)) for n in (3, 4, 5)
    )
    cut = [Parcel([c, b]), Parcel([a])]
    parcels = Parcels(cut, dist.group.WORLD)
    sent = list[int]()
    usual = dist.all_reduce

    def counted(x: T, *args: Any, **options: Any) -> Any:
        sent.append(x.nbytes)
        return usual(x, *args, **options)

    dist.all_reduce = counted
    try:
        for last in (False, True):
            for parcel in cut:
                parcel.expect(last)
            parcels.restart()
            loss = (a * (rank + 1)).sum()
            if not unequal or rank == 0:
                loss = loss + (b * 10).sum() + (c * a[0] * 100).sum()
            loss.backward()
        sums = [
            replicated._summed(parcels, cut[n], p) for n, p in ((1, a), (0, b), (0, c))
        ]
    finally:
        dist.all_reduce = usual
    return {"sums": [each.tolist() for each in sums if each is not None], "sent": sent}


@pytest.mark.parametrize("unequal", [False, True])
def test_gradients_are_sums_over_replicas_and_passes(pool: Any, unequal: bool) -> None:
    ranks = 1 if unequal else 2
    first = 2 * (1 + 2) + 2 * ranks * 1000.0
    for seen in pool.run(2, sums_of, unequal):
        assert seen["sums"] == [
            [first, 6.0, 6.0],
            [20.0 * ranks] * 4,
            [400.0 * ranks] * 5,
        ]
        assert seen["sent"] == [9 * 8, 3 * 8]


def test_a_gradient_after_its_sum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a = nn.Parameter(torch.ones(2))
    parcel = Parcel([a])
    parcels = Parcels([parcel], None)  # type: ignore[arg-type]
    monkeypatch.setattr(
        Parcel, "launch", lambda self, group: setattr(self, "launched", True)
    )
    parcel.expect(True)
    parcels.restart()
    parcels.launch_until(parcel)
    with pytest.raises(WeftError, match=r"leave out optimizer\.in_backward"):
        a.sum().backward()


def test_the_sum_of_a_step_that_was_given_up_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    parcel = Parcel([a, b])
    parcels = Parcels([parcel], None)  # type: ignore[arg-type]
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda x, **options: done)
    for factor in (float("nan"), 1.0):
        a.grad = b.grad = None
        parcel.expect(True)
        parcels.restart()
        ((a.sum() + b.sum()) * factor).backward()
    grad = replicated._summed(parcels, parcel, b)
    assert grad is not None and grad.tolist() == [1, 1, 1]
