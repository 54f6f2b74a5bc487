"""Tokens of one hash travel as their mean: against the formula, token by token."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.models.test_experts import mixture
from weft.models.router import Choice
from weft.parallel.experts.hashed import Hashed, rotations

T = torch.Tensor


def hashed(m: Any, lsh: int, residual: bool = False) -> Hashed:
    layout = mock.Mock(lsh=lsh, lsh_residual=residual)
    ranks = mock.Mock(
        items=m.router.count, pieces=1, declared=lambda x: x, **{"mesh.layout": layout}
    )
    return Hashed(ranks, m.dispatcher)


def tokens(count: int) -> T:
    return torch.randn(
        1, count, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )


def hash_of(x: T, lsh: int) -> tuple[Any, ...]:
    turned = x.float() @ rotations(8, lsh, x.device)
    best = [max(range(8), key=lambda i, row=row: abs(float(row[i]))) for row in turned]
    return tuple((i, float(row[i]) > 0) for i, row in zip(best, turned, strict=True))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("lsh", [1, 2])
def test_means_and_residuals_with_all_gradients(lsh: int, residual: bool) -> None:
    m, x = (
        mixture(experts=3, capacity=0.0, balance_loss=0.0),
        tokens(40).requires_grad_(),
    )
    flat, act = x[0], torch.nn.functional.silu
    choice: Choice = m.router(flat, None)
    members: dict[Any, list[int]] = {}
    for t, ids in enumerate(choice.ids.tolist()):
        for e in ids:
            members.setdefault((e, *hash_of(flat[t].detach(), lsh)), []).append(t)
    y = torch.zeros_like(flat)
    for (e, *_), mine in members.items():
        mean = flat[mine].mean(0)
        made = m.experts.down[e] @ (
            act(m.experts.gate[e] @ mean) * (m.experts.up[e] @ mean)
        )
        for t in mine:
            weight = choice.weights[t][choice.ids[t] == e].sum()
            y = y.index_add(
                0,
                torch.tensor([t]),
                weight * (made + (flat[t] - mean) * residual)[None],
            )
    learning = [x, *(p for p in m.parameters() if p.requires_grad)]
    want = torch.autograd.grad(y.square().sum(), learning)
    m.dispatcher = way = hashed(m, lsh, residual)
    sent = len(way._buckets(flat.detach(), choice.ids)[1])
    assert sent == len(members) < 40 * 2
    found = m(x)[0]
    torch.testing.assert_close(found, y, rtol=1e-12, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), learning), want, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_many_rotations_leave_tokens_alone_and_evaluation_always_does() -> None:
    m, x = mixture(), tokens(40)
    plain, ways = m(x), {lsh: hashed(m, lsh) for lsh in (50, 1)}
    for lsh, exact in ((50, True), (1, False)):
        m.dispatcher = ways[lsh]
        assert torch.allclose(m(x), plain, rtol=1e-12, atol=1e-12) is exact
        with torch.no_grad():
            assert torch.equal(m(x), plain)


@pytest.mark.parametrize("count", [0, 1])
def test_no_token_and_one(count: int) -> None:
    m, x = mixture(), tokens(count).requires_grad_()
    m.dispatcher = hashed(m, 2)
    m(x).sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
