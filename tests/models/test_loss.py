"""The fused output layer and cross entropy against PyTorch's, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from weft.data.batch import IGNORE
from weft.layout.mesh import Mesh
from weft.models import loss as loss_module
from weft.models.loss import linear_cross_entropy
from weft.models.token_scores import token_scores

SINGLE = Mesh.single()


def inputs(
    tokens: int, embed: int, vocab: int, ignored: float, scale: float = 1.0
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = scale * torch.randn(
        tokens, embed, generator=generator, dtype=torch.float64
    )
    weight = torch.randn(vocab, embed, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < ignored] = IGNORE
    return hidden, weight, labels


def both(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int
) -> list[list[torch.Tensor]]:
    """Loss and the two gradients, ours and PyTorch's. The loss is scaled, as the training step scales it."""
    results = []
    for ours in (True, False):
        h, w = (x.clone().requires_grad_() for x in (hidden, weight))
        if ours:
            loss = linear_cross_entropy(h, w, labels, 0, chunk, SINGLE)
        else:
            loss = F.cross_entropy(
                h.double() @ w.double().T, labels, reduction="sum", ignore_index=IGNORE
            )
        (loss / 7).backward()
        assert h.grad is not None and w.grad is not None
        results.append([loss.detach(), h.grad, w.grad])
    return results


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 9), st.integers(1, 50), st.integers(1, 50), st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.1, 1.0, 300.0]),
)  # fmt: skip
def test_loss_and_gradients(
    tokens: int, embed: int, vocab: int, chunk: int, ignored: float, scale: float
) -> None:
    ours, expected = both(*inputs(tokens, embed, vocab, ignored, scale), chunk)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * scale)


def test_without_any_label_everything_is_zero() -> None:
    hidden, weight, labels = inputs(10, 4, 6, ignored=1.0)
    loss, d_hidden, d_weight = both(hidden, weight, labels, 3)[0]
    assert loss == 0 and not d_hidden.any() and not d_weight.any()


def test_gradients_of_tokens_without_label_are_zero() -> None:
    hidden, weight, labels = inputs(30, 4, 6, ignored=0.5)
    d_hidden = both(hidden, weight, labels, 8)[0][1]
    assert torch.equal(d_hidden.any(-1), labels != IGNORE)


def test_a_tied_table_gets_both_gradients() -> None:
    _, table, labels = inputs(12, 5, 9, ignored=0.2)
    tokens = torch.arange(12) % 9
    grads = []
    for ours in (True, False):
        t = table.clone().requires_grad_()
        hidden = F.embedding(tokens, t).tanh()
        if ours:
            loss = linear_cross_entropy(hidden, t, labels, 0, 5, SINGLE)
        else:
            loss = F.cross_entropy(
                hidden @ t.T, labels, reduction="sum", ignore_index=IGNORE
            )
        grads.append(torch.autograd.grad(loss, t)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)]
)
def test_narrow_dtypes(dtype: torch.dtype, near: float) -> None:
    hidden, weight, labels = inputs(50, 16, 33, ignored=0.1)
    ours, expected = both(hidden.to(dtype), weight.to(dtype), labels, 16)
    assert ours[0].dtype == torch.float64 and ours[1].dtype == ours[2].dtype == dtype
    for a, b in zip(ours, expected, strict=True):
        assert (a.double() - b.double()).norm() <= near * b.double().norm()


def test_the_scale_is_not_rounded_to_bfloat16() -> None:
    """1 / 769 in bfloat16 is 0.26 % too small; one factor on every gradient does not average out."""
    hidden, weight, labels = inputs(512, 64, 33, ignored=0.0)
    norms = []
    for scale in (1.0, 1 / 769):
        h = hidden.bfloat16().requires_grad_()
        (
            linear_cross_entropy(h, weight.bfloat16(), labels, 0, 16, SINGLE) * scale
        ).backward()
        assert h.grad is not None
        norms.append(float(h.grad.double().norm()) / scale)
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)


def test_evaluation_needs_no_gradient() -> None:
    hidden, weight, labels = inputs(20, 4, 6, ignored=0.3)
    with torch.no_grad():
        loss = linear_cross_entropy(
            hidden, weight.requires_grad_(), labels, 0, 7, SINGLE
        )
    assert not loss.requires_grad
    torch.testing.assert_close(loss, both(hidden, weight.detach(), labels, 20)[1][0])


def test_tokens_without_label_cost_no_product() -> None:
    """Three products per chunk of tokens that have a label, as counted; a few others are not worth a copy."""
    for ignored, chunks in ((0.0, 10), (0.01, 10), (0.75, 3), (1.0, 0)):
        hidden, weight, labels = inputs(200, 8, 16, 0.0)
        labels[: int(200 * ignored)] = IGNORE
        hidden.requires_grad_()
        weight.requires_grad_()
        with FlopCounterMode(display=False) as count:
            linear_cross_entropy(hidden, weight, labels, 0, 20, SINGLE).backward()
        rows = len(labels) if ignored < 0.05 else int((labels != IGNORE).sum())
        assert count.get_total_flops() == 3 * 2 * rows * 8 * 16
        assert -(-rows // 20) == chunks


@pytest.mark.parametrize(("chunk", "at_a_time"), [(30, 2**19), (12, 50)])
def test_logits_of_one_chunk_are_computed_once(
    monkeypatch: pytest.MonkeyPatch, chunk: int, at_a_time: int
) -> None:
    """For scores and then for gradients, some rows at a time; the same as PyTorch's of whole logits."""
    monkeypatch.setattr(loss_module, "AT_A_TIME", at_a_time)
    hidden, weight, labels = inputs(30, 4, 17, ignored=0.0)
    scale, bonus = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))  # fmt: skip
    x, w = (each.clone().requires_grad_() for each in (hidden, weight))
    logp = (x @ w.T).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    own = logp.gather(1, labels[:, None])[:, 0]
    expected = torch.autograd.grad((bonus * entropy - scale * own).sum(), (x, w))
    kept: dict[int, torch.Tensor] = {}
    with FlopCounterMode(display=False) as count:
        scores = token_scores(hidden, weight, labels, 0, chunk, SINGLE, True, kept)
        loss = linear_cross_entropy(x, w, labels, 0, chunk, SINGLE, scale, bonus, kept)
        loss.backward()
    assert not kept
    likeliest = own == logp.amax(-1)
    for ours, theirs in zip(scores.T, (own, likeliest.double(), entropy), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-12)
    assert float(loss) == pytest.approx(
        float((bonus * entropy - scale * own).sum()), rel=1e-10
    )
    for leaf, grad in zip((x, w), expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-10, atol=1e-12)
    assert count.get_total_flops() == (3 * 30 + (30 - chunk)) * 2 * 4 * 17
