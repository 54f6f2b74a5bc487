"""Attention of short segments with its gradients by a kernel, against autograd in float64."""

from __future__ import annotations

import pytest
import torch

from weft.models import segment_attention
from weft.models.attention import attention
from weft.models.rope import rotate
from weft.models.segment_attention import attend_and_differentiate, segments_kernel


@pytest.mark.skipif(
    segments_kernel(16) is None, reason="no C compiler, or PyTorch without libgomp"
)
@pytest.mark.parametrize(
    ("width", "kv_heads", "group", "shared", "threads"),
    [(16, 1, 1, False, 1), (64, 2, 3, True, 3), (96, 1, 2, True, 2)],
)
def test_result_and_gradients_are_those_of_autograd(
    monkeypatch: pytest.MonkeyPatch, width: int, kv_heads: int, group: int, shared: bool, threads: int
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    edges = [0, 5, 18, 19, 90, 93, 95]
    parents = [-1, 0, 0, -1, 3, -1, -1]
    cu_seqlens = torch.tensor([edges, parents] if shared else edges, dtype=torch.int32)
    sizes = [group * kv_heads * width, kv_heads * width, kv_heads * width]
    drawn = torch.Generator().manual_seed(3)
    heads = torch.randn(95, sum(sizes), generator=drawn)
    bias = torch.randn(sum(sizes), generator=drawn) if shared else None
    grad = torch.randn(95, sizes[0], generator=drawn)
    angles = 6 * torch.rand(1, 95, 1, width // 2, generator=drawn)
    cos, sin = angles.cos(), angles.sin()
    both = attend_and_differentiate(heads, bias, cos, sin, grad, sizes, cu_seqlens)
    assert both is not None
    exact = heads.double().requires_grad_()
    added = exact if bias is None else exact + bias.double()
    q, k, v = (x.unflatten(1, (-1, width))[None] for x in added.split(sizes, 1))
    q, k = (rotate(x, cos.double(), sin.double()) for x in (q, k))
    out = attention(q, k, v, cu_seqlens)[0].flatten(2)[0]
    (out * grad).sum().backward()
    assert exact.grad is not None
    assert (both.out - out).norm() < 1e-5 * out.norm()
    assert (both.heads - exact.grad).norm() < 1e-5 * exact.grad.norm()


@pytest.mark.skipif(
    segments_kernel(16) is None, reason="no C compiler, or PyTorch without libgomp"
)
def test_threads_have_no_more_room_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    heads, cos = torch.randn(40, 48), torch.ones(1, 40, 1, 8)
    given = (heads, None, cos, torch.zeros_like(cos), heads[:, :16].contiguous(), [16, 16, 16])  # fmt: skip
    edges = torch.tensor([0, 20, 40], dtype=torch.int32)
    whole = attend_and_differentiate(*given, edges)
    of_thread = 4 * (2 * 40 * 16 + 4 * 40 * 16 + 2 * 64 * 36)
    taken, own = list[int](), torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, size: (taken.append(4 * size), own(x, size))[1]
    )  # fmt: skip
    for room, threads in ((4, 4), (3, 0)):
        monkeypatch.setattr(segment_attention, "MOST_ROOM", room * of_thread + 4)
        few = attend_and_differentiate(*given, edges)
        assert (few is not None) == bool(threads)
        if few is not None and whole is not None:
            assert taken == [threads * of_thread]
            torch.testing.assert_close(few.heads, whole.heads)


@pytest.mark.skipif(
    segments_kernel(16) is None, reason="no C compiler, or PyTorch without libgomp"
)
@pytest.mark.parametrize("edges", [[0], [0, 0]])
def test_no_tokens_have_gradients_of_no_tokens(edges: list[int]) -> None:
    cos, grad = torch.ones(1, 0, 1, 8), torch.ones(0, 16)
    cu_seqlens = torch.tensor(edges, dtype=torch.int32)
    both = attend_and_differentiate(torch.ones(0, 48), None, cos, cos, grad, [16, 16, 16], cu_seqlens)  # fmt: skip
    assert both is not None
    assert (both.out.shape, both.heads.shape) == ((0, 16), (0, 48))
