"""Linear attention and retention are the recurrence, in every form and however the sequence is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.sequence import owned_ranges
from weft.models.attention import repeat_heads
from weft.models.linear_attention import forward, linear_mixer, log_decay, positions_of

T = torch.Tensor
HEADS, KV, DIM = 4, 2, 6


def inputs(rows: int, row: int) -> list[T]:
    g = torch.Generator().manual_seed(rows * 1000 + row)
    return [
        torch.randn(rows, row, n, DIM, dtype=torch.float64, generator=g)
        for n in (HEADS, KV, KV, HEADS)
    ]


def recurrence(q: T, k: T, v: T, cu: list[int], mixer: str) -> T:
    """Token by token, as the papers define it."""
    shape, decay = (
        q.shape,
        torch.tensor(log_decay(mixer, HEADS), dtype=q.dtype).exp()[:, None, None],
    )
    q = (q * DIM**-0.5).flatten(0, 1)
    k, v = (repeat_heads(x, HEADS // KV).flatten(0, 1) for x in (k, v))
    out = []
    for first, last in pairwise(cu):
        state = torch.zeros(HEADS, DIM, DIM, dtype=q.dtype)
        for t in range(first, last):
            state = decay * state + k[t][:, :, None] * v[t][:, None, :]
            out.append((q[t][:, None] @ state)[:, 0])
    return torch.stack(out).view(shape)


def reference(rows: int, row: int, cu: list[int], mixer: str) -> list[T]:
    """Outputs and the gradients of q, k and v."""
    q, k, v, grad = inputs(rows, row)
    held = [x.requires_grad_() for x in (q, k, v)]
    out = recurrence(*held, cu, mixer)
    return [out.detach(), *torch.autograd.grad(out, held, grad)]


@st.composite
def documents(draw: Any, rows: int, row: int) -> list[int]:
    """Boundaries of documents, some of one token, in rows of ``row`` tokens."""
    found = [0]
    for _ in range(rows):
        left = row
        while left:
            length = min(left, draw(st.sampled_from([1, 1, 2, 3, 7, 19, row])))
            found.append(found[-1] + length)
            left -= length
    return found


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that this rank sends, by kind of call."""
    sent = {"gather": 0, "pass": 0}
    gather, isend = dist.all_gather, dist.isend

    def all_gather(parts: list[T], mine: T, *args: Any, **more: Any) -> Any:
        sent["gather"] += mine.nbytes * (len(parts) - 1)
        return gather(parts, mine, *args, **more)

    def send(x: T, *args: Any, **more: Any) -> Any:
        sent["pass"] += x.nbytes
        return isend(x, *args, **more)

    with (
        mock.patch.object(dist, "all_gather", all_gather),
        mock.patch.object(dist, "isend", send),
    ):
        yield sent


def go(
    layout: Layout, rows: int, row: int, cu: list[int], mixer: str
) -> tuple[list[float], dict[str, int]]:
    """On every rank: largest differences of output and gradients from the recurrence, and the bytes sent."""
    mesh = Mesh.create(layout, "cpu")
    ranges = owned_ranges(row, layout, mesh.rank("cp"))
    q, k, v, grad = (
        torch.cat([x[:, a:b] for a, b in ranges], dim=1) for x in inputs(rows, row)
    )
    held = [x.requires_grad_() for x in (q, k, v)]
    with counted() as sent:
        out = linear_mixer(mesh, log_decay(mixer, HEADS))(
            *held, torch.tensor(cu, dtype=torch.int32)
        )
        found = [out.detach(), *torch.autograd.grad(out, held, grad)]
    expected = [
        torch.cat([x[:, a:b] for a, b in ranges], dim=1)
        for x in reference(rows, row, cu, mixer)
    ]
    return [
        float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)
    ], sent


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    cu=documents(2, 37),
    mixer=st.sampled_from(["linear", "retention"]),
    size=st.sampled_from([1, 5, 64]),
)
def test_all_forms_are_the_recurrence(cu: list[int], mixer: str, size: int) -> None:
    """Chunks of one token are the recurrent form, one chunk is the parallel form."""
    (differences, sent), decay = (
        go(Layout(), 2, 37, cu, mixer),
        torch.tensor(log_decay(mixer, HEADS), dtype=torch.float64),
    )
    assert max(differences) < 1e-10 and not any(sent.values())
    q, k, v, _ = inputs(2, 37)
    heads_first = [
        x.transpose(1, 2)
        for x in (q * DIM**-0.5, repeat_heads(k, 2), repeat_heads(v, 2))
    ]
    out = forward(*heads_first, positions_of(cu, 37, 0, 37), decay, size)
    assert torch.allclose(
        out.transpose(1, 2), recurrence(q, k, v, cu, mixer), atol=1e-10
    )


STATE = HEADS * DIM * DIM * 8  # bytes, float64


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scan", ["gather", "pass"])
@pytest.mark.parametrize("context", ["ring", "zigzag", "ulysses"])
@pytest.mark.parametrize(
    "ranks",
    [
        2,
        3,
        pytest.param(4, marks=pytest.mark.slow),
        pytest.param(8, marks=pytest.mark.soak),
    ],
)
def test_ranks_agree_with_one_device(
    pool: Any, ranks: int, context: str, scan: str
) -> None:
    layout = Layout(cp=ranks, context=context, scan=scan)
    for row, cuts in ((48, [1, 5, 40, 2]), (96, [96]), (48, [48])):
        lengths = [*cuts, *([48] if row == 48 else [96])]
        cu = [0, *accumulate(lengths)]
        rows = cu[-1] // row
        found = pool.run(ranks, go, layout, rows, row, cu, "retention")
        assert max(max(differences) for differences, _ in found) < 1e-10
        # Forward and backward; whatever the length of a row.
        own = 2 if context == "zigzag" else 1
        crossings = ranks - 1 if own == 1 else 2 * (ranks - 1)
        expected = ranks * (ranks - 1) * own if scan == "gather" else crossings
        assert sum(sent[scan] for _, sent in found) == 2 * expected * rows * STATE
