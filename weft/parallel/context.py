"""Attention over a sequence that is cut along ``cp``: ring (Liu et al. 2023) and Ulysses (Jacobs et al. 2023).

Ring: keys and values travel round the ranks; every rank attends with its own queries to the block that is passing and
merges by log-sum-exp. The backward pass travels the same way with the global log-sum-exp, gradients of keys and values
riding along until they are home. Work is a list of segments per (query rank, key rank), so documents cost what they are
long and a block that no query may see costs nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import S

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.sequence import chunk_owners
from weft.models.attention import Segment, attend_backward, attend_forward, wide
from weft.models.transformer import Attend, local_attention
from weft.recipe import ModelShape

T = torch.Tensor


def context_attention(mesh: Mesh, shape: ModelShape) -> Attend:
    """The attention that the layout asks for. Raises :class:`UsageError` for head counts Ulysses cannot split."""
    if mesh.size("cp") == 1:
        return local_attention
    if mesh.layout.context == "ulysses":
        check_ulysses(mesh.layout, shape)
        return lambda q, k, v, cu: ulysses_attention(q, k, v, cu, mesh)
    ranks = dist.get_process_group_ranks(mesh.group("cp"))
    return lambda q, k, v, cu: ring_attention(q, k, v, cu, ranks, mesh.rank("cp"))[0]


def check_ulysses(layout: Layout, shape: ModelShape) -> None:
    if layout.cp > 1 and layout.context == "ulysses" and shape.heads % (layout.cp * layout.tp):
        raise UsageError(
            f"Ulysses cannot split {shape.heads} heads over tp={layout.tp} x cp={layout.cp}; "
            "set layout.context = 'ring' or choose sizes whose product divides the heads"
        )


def ulysses_attention(q: T, k: T, v: T, cu_seqlens: T, mesh: Mesh) -> T:
    """Exchange ``[batch, seq/cp, heads, head_dim]`` for ``[batch, seq, heads/cp, head_dim]``, attend, exchange back."""
    cp, group = mesh.size("cp"), mesh.group("cp")
    if k.shape[2] % cp:  # fewer key/value heads than ranks: give every query head its own
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    q, k, v = (spmd.all_to_all(x, group, src=S(1), dst=S(2)) for x in (q, k, v))
    return spmd.all_to_all(local_attention(q, k, v, cu_seqlens), group, src=S(2), dst=S(1))


def tile_segments(
    cu: Sequence[int], length: int, owners: list[tuple[int, ...]], q_rank: int, k_rank: int
) -> list[Segment]:
    """Work of ``q_rank``'s queries against ``k_rank``'s keys, in the flattened local coordinates of each.

    ``cu``: document boundaries in flattened rows of ``length`` tokens. A chunk meets itself in one causal segment per
    document, and an earlier chunk in at most one full segment: the document that spans the gap.
    """
    chunk = length // sum(len(o) for o in owners)
    held = chunk * len(owners[0])
    segments = []
    for row in range(cu[-1] // length):
        for i, qc in enumerate(owners[q_rank]):
            for j, kc in enumerate(owners[k_rank]):
                if kc > qc:
                    continue
                q_base, k_base = row * length + qc * chunk, row * length + kc * chunk  # global
                q_home, k_home = row * held + i * chunk, row * held + j * chunk  # local
                if kc == qc:
                    at = bisect_right(cu, q_base)
                    start = q_base
                    while start < q_base + chunk:
                        end = min(cu[at], q_base + chunk)
                        a, b = start - q_base, end - q_base
                        segments.append(Segment(q_home + a, q_home + b, k_home + a, k_home + b, True))
                        start, at = end, at + 1
                    continue
                at = bisect_right(cu, q_base)
                first, last = cu[at - 1], cu[at]  # the document of the first query
                if first < k_base + chunk:
                    k0, q1 = max(first - k_base, 0), min(last - q_base, chunk)
                    segments.append(Segment(q_home, q_home + q1, k_home + k0, k_home + chunk, False))
    return segments


class _Ring:
    """Geometry of one rank's trip round the ring."""

    def __init__(self, q: T, cu_seqlens: T, ranks: Sequence[int], index: int) -> None:
        self.cu, self.ranks, self.index, self.size = cu_seqlens.tolist(), ranks, index, len(ranks)
        self.owners = chunk_owners(Layout(cp=self.size))
        self.length = q.shape[1] * self.size

    def segments(self, step: int) -> list[Segment]:
        source = (self.index - step) % self.size
        return tile_segments(self.cu, self.length, self.owners, self.index, source)

    def pass_on(self, *tensors: T, tag: int = 0) -> tuple[list[T], list[dist.Work]]:
        """Start sending to the next rank and receiving from the previous one."""
        arriving = [torch.empty_like(t) for t in tensors]
        following, previous = self.ranks[(self.index + 1) % self.size], self.ranks[(self.index - 1) % self.size]
        ops = [dist.P2POp(dist.isend, t, following, tag=tag + i) for i, t in enumerate(tensors)]
        ops += [dist.P2POp(dist.irecv, t, previous, tag=tag + i) for i, t in enumerate(arriving)]
        return arriving, dist.batch_isend_irecv(ops)


@torch.library.custom_op("weft::ring_attention", mutates_args=())
def ring_attention(q: T, k: T, v: T, cu_seqlens: T, ranks: Sequence[int], index: int) -> tuple[T, T]:
    """``q, k, v``: ``[batch, seq/cp, heads, head_dim]`` of the chunks rank ``index`` owns; ``ranks`` are global.

    Returns ``out`` like ``q`` and ``lse`` ``[batch * seq/cp, heads]``. Sends ``cp - 1`` times ``k`` and ``v``.
    """
    ring = _Ring(q, cu_seqlens, ranks, index)
    queries = q.flatten(0, 1)
    block = [k.flatten(0, 1).contiguous(), v.flatten(0, 1).contiguous()]
    out = torch.zeros(queries.shape, dtype=wide(q.dtype), device=q.device)
    lse = torch.full(queries.shape[:2], -torch.inf, dtype=wide(q.dtype), device=q.device)
    for step in range(ring.size):
        arriving, works = ring.pass_on(*block) if step < ring.size - 1 else (block, [])
        for s in ring.segments(step):
            # Own keys come first, so every later merge meets a finite lse.
            piece = Segment(0, s.q1 - s.q0, 0, s.k1 - s.k0, s.causal)
            o, l = attend_forward(queries[s.q0 : s.q1], block[0][s.k0 : s.k1], block[1][s.k0 : s.k1], [piece])
            old = lse[s.q0 : s.q1]
            new = torch.logaddexp(old, l)
            out[s.q0 : s.q1] = out[s.q0 : s.q1] * (old - new).exp()[..., None] + o * (l - new).exp()[..., None]
            lse[s.q0 : s.q1] = new
        for work in works:
            work.wait()
        block = arriving
    return out.to(q.dtype).view(q.shape), lse


@ring_attention.register_fake
def _(q: T, k: T, v: T, cu_seqlens: T, ranks: Sequence[int], index: int) -> tuple[T, T]:
    return torch.empty_like(q), q.new_empty(q.shape[0] * q.shape[1], q.shape[2], dtype=wide(q.dtype))


@torch.library.custom_op("weft::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: T, q: T, k: T, v: T, out: T, lse: T, cu_seqlens: T, ranks: Sequence[int], index: int
) -> tuple[T, T, T]:
    ring = _Ring(q, cu_seqlens, ranks, index)
    grad, queries, out = (x.flatten(0, 1) for x in (grad, q, out))
    block = [k.flatten(0, 1).contiguous(), v.flatten(0, 1).contiguous()]
    dq = torch.zeros(queries.shape, dtype=lse.dtype, device=q.device)
    d_block = [torch.zeros(x.shape, dtype=lse.dtype, device=q.device) for x in block]
    for step in range(ring.size):
        arriving, works = ring.pass_on(*block) if step < ring.size - 1 else (block, [])
        for s in ring.segments(step):
            rows, cols = slice(s.q0, s.q1), slice(s.k0, s.k1)
            piece = Segment(0, s.q1 - s.q0, 0, s.k1 - s.k0, s.causal)
            own, passing = (grad[rows], queries[rows]), (block[0][cols], block[1][cols])
            shares = attend_backward(*own, *passing, out[rows], lse[rows], [piece])
            for total, share, where in zip((dq, *d_block), shares, (rows, cols, cols), strict=True):
                total[where] += share
        # Gradients follow their block; after the last step one more hop brings them home.
        d_arriving, d_works = ring.pass_on(*d_block, tag=len(block))
        for work in works + d_works:
            work.wait()
        block, d_block = arriving, d_arriving
    dk, dv = (d.to(k.dtype).view(k.shape) for d in d_block)
    return dq.to(q.dtype).view(q.shape), dk, dv


@ring_attention_backward.register_fake
def _(grad: T, q: T, k: T, v: T, out: T, lse: T, cu_seqlens: T, ranks: Sequence[int], index: int) -> tuple[T, T, T]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    *tensors, ctx.ranks, ctx.index = inputs
    ctx.save_for_backward(*tensors[:3], *output, tensors[3])


def _ring_grad(ctx, grad, _):  # type: ignore[no-untyped-def]
    return *ring_attention_backward(grad, *ctx.saved_tensors, ctx.ranks, ctx.index), None, None, None


ring_attention.register_autograd(_ring_grad, setup_context=_save)
