"""The attention kernels against a dense masked softmax in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.models import gpu_attention
from weft.models.attention import attend_backward, attend_forward, attention
from weft.models.segments import Segment, document_segments

TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def inputs(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float64,
) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output, ``[tokens, heads, head_dim]``."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [
        torch.randn(tokens, n, head_dim, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for n in sizes
    ]


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: list[Segment]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query to every key, what lies outside the segments masked; float64."""
    q, k, v = (x.double() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = torch.zeros(len(q), len(k), dtype=torch.bool)
    for s in segments:
        block = torch.ones(s.q1 - s.q0, s.k1 - s.k0, dtype=torch.bool)
        seen[s.q0 : s.q1, s.k0 : s.k1] = (
            (block.triu() if s.flipped else block.tril()) if s.causal else block
        )
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0)  # rows that see nothing
    return torch.einsum("hqk,khd->qhd", weights, v), scores.logsumexp(-1).T


def seen_through(window: int, cu_seqlens: torch.Tensor) -> list[Segment]:
    """One segment for every pair of tokens that see each other, by the definition of a window."""
    return [
        Segment(q, q + 1, k, k + 1, False)
        for a, b in pairwise(cu_seqlens.tolist())
        for q in range(a, b)
        for k in range(max(a, q - window + 1) if window else a, q + 1)
    ]


def check(
    lengths: list[int],
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int = 0,
) -> None:
    """Forward and backward of the operator on ``rows`` rows, each of documents of these ``lengths``."""
    bounds = torch.tensor([0, *lengths * rows]).cumsum(0).to(torch.int32)
    tokens = sum(lengths) * rows
    *qkv, grad = inputs(tokens, heads, kv_heads, head_dim, dtype)
    mine = [x.unflatten(0, (rows, -1)).clone().requires_grad_() for x in qkv]
    reference = [x.double().requires_grad_() for x in qkv]
    out, lse = attention(*mine, bounds, window)
    assert out.shape == mine[0].shape and lse.shape == (tokens, heads)
    out.backward(grad.view(out.shape))
    pairs = seen_through(window, bounds) if window else document_segments(bounds)
    expected, expected_lse = dense(*reference, pairs)
    expected.backward(grad.double())
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.flatten(0, 1).double(), expected, **near)
    torch.testing.assert_close(lse.double(), expected_lse, **near)
    for a, b in zip(mine, reference, strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype == dtype
        torch.testing.assert_close(a.grad.flatten(0, 1).double(), b.grad, **near)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 2),
    st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 1), (4, 4)]),
    st.sampled_from([2, 6, 16]),
)
def test_packed_documents(
    lengths: list[int], rows: int, heads: tuple[int, int], head_dim: int
) -> None:
    check(lengths, rows, *heads, head_dim, torch.float64)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([(2, 2), (4, 2)]),
)
def test_documents_of_one_length_are_one_batch(
    length: int, count: int, rows: int, heads: tuple[int, int]
) -> None:
    check([length] * count, rows, *heads, 8, torch.float64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lengths", [[512], [127, 517, 1], [601, 601], [1030]], ids=str)
def test_long_documents_that_are_cut_into_squares_and_rectangles(
    lengths: list[int],
) -> None:
    check(lengths, 1, 4, 2, 6, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 7, 30], [19, 19], [130, 1, 66]])
def test_other_dtypes(lengths: list[int], dtype: torch.dtype) -> None:
    check(lengths, 1, 4, 2, 16, dtype)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(1, 2),
    st.integers(1, 45),
)
def test_windows(lengths: list[int], rows: int, window: int) -> None:
    check(lengths, rows, 4, 2, 6, torch.float64, window)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lengths", "window"), [([600], 520), ([19, 19], 7), ([130, 1, 66], 64)]
)
def test_windows_in_other_dtypes_and_cut_into_squares(
    lengths: list[int], window: int, dtype: torch.dtype
) -> None:
    check(lengths, 1, 4, 2, 16, dtype, window)


def test_a_window_computes_no_more_than_its_band() -> None:
    """Squares and rectangles of a window hold the pairs of the band once each."""
    for length, window in ((1000, 64), (64, 64), (100, 7), (9, 1)):
        segments = document_segments(torch.tensor([0, length]), window)
        held = sum(
            (n * (n + 1) // 2 if s.causal else n * (s.k1 - s.k0))
            for s in segments
            for n in [s.q1 - s.q0]
        )
        assert held == sum(min(i + 1, window) for i in range(length))


def test_empty_documents_are_nothing() -> None:
    assert document_segments(torch.tensor([0, 0, 3, 3, 4])) == [
        Segment(0, 3, 0, 3, True),
        Segment(3, 4, 3, 4, True),
    ]


def test_a_changed_document_changes_no_other() -> None:
    q, k, v, _ = (x[None] for x in inputs(20, 2, 2, 8))
    bounds = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
    before = attention(q, k, v, bounds)[0]
    k[:, 7], v[:, 7] = 100, -100
    after = attention(q, k, v, bounds)[0]
    same = (before == after).all(-1).all(-1)[0]
    assert same.tolist() == [i != 7 for i in range(20)]


def test_segments_that_merge_give_the_whole() -> None:
    """What ring attention does: parts of a document merged by log-sum-exp, with global statistics in backward."""
    q, k, v, grad = inputs(24, 4, 2, 8)
    whole = [Segment(0, 24, 0, 24, True)]
    out, lse = attend_forward(q, k, v, whole)
    steps = [
        [Segment(0, 10, 0, 10, True), Segment(10, 24, 10, 24, True)],
        [Segment(10, 24, 0, 10, False)],
    ]
    parts = [attend_forward(q, k, v, step) for step in steps]
    assert (parts[1][0][:10] == 0).all() and (parts[1][1][:10] == -torch.inf).all()
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    total = sum((l - merged)[..., None].exp() * o for o, l in parts)
    torch.testing.assert_close(merged, lse)
    torch.testing.assert_close(total, out)
    grads = [attend_backward(grad, q, k, v, out, lse, step) for step in steps]
    for i, expected in enumerate(attend_backward(grad, q, k, v, out, lse, whole)):
        torch.testing.assert_close(grads[0][i] + grads[1][i], expected)


def test_the_operator_is_described_for_compilation() -> None:
    q, k, v, _ = (
        x[None].float().requires_grad_() for x in inputs(9, 4, 2, 8, torch.float32)
    )
    torch.library.opcheck(
        attention,
        (q, k, v, torch.tensor([0, 4, 9], dtype=torch.int32)),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "dtype, width, near",
    [(torch.float64, 8, 1e-12), (torch.bfloat16, 320, 2e-2), (torch.bfloat16, 12, 2e-2)],
)  # fmt: skip
def test_products_for_gpus_equal_attention(
    causal: bool, dtype: torch.dtype, width: int, near: float
) -> None:
    # what a GPU computes where no kernel takes the type or the heads, as of latent attention to a cache; its kernels
    # of 16 bits are compared with float64 in bench/gpu_attention.py
    drawn = torch.Generator().manual_seed(3)
    q, k, v, grad = (
        torch.randn(2, heads, 10, width, dtype=torch.float64, generator=drawn).to(dtype)
        for heads in (6, 2, 2, 6)
    )
    assert gpu_attention.by_products(q)
    right_q, right_k, right_v = (x.double().requires_grad_() for x in (q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(
        right_q, right_k, right_v, is_causal=causal, enable_gqa=True
    )
    right.backward(grad.double())
    out, lse = gpu_attention.attend_rectangle(q, k, v, causal)
    grads = gpu_attention.rectangle_gradients(grad, q, k, v, out, lse, causal)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), right.detach(), rtol=near, atol=near)
    for ours, x in zip(grads, (right_q, right_k, right_v), strict=True):
        torch.testing.assert_close(ours.double(), x.grad, rtol=near, atol=near)
    plain = torch.empty(1, 1, 1, 256, dtype=torch.bfloat16)
    assert not gpu_attention.by_products(plain)
