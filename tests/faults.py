"""Planted faults: each is a mistake that trainers have shipped. Both proofs must catch each of them."""

from __future__ import annotations

from weft.layout.boundary import R, V, own_number, share_of_sum, sum_over_tp
from weft.train.step import reduce_over_tp


def dropped_all_reduce(grads, parts, mesh):
    """The gradients of norms stay what each tensor-parallel rank saw."""
    return grads


def counted_twice(grads, parts, mesh):
    """Gradients that are already equal on all tensor-parallel ranks are summed over them once more."""
    grads = reduce_over_tp(grads, parts, mesh)
    return grads | {p.name: sum_over_tp(grads[p.name], mesh) for p in parts if p.logical.whole}


def mean_per_rank(model, batch, total, mesh):
    """Every rank divides by its own number of tokens, and the means are averaged."""
    loss = model(batch.tokens, batch.positions, batch.cu_seqlens, labels=batch.labels)
    mine = own_number(batch.real_tokens * mesh.size("dp", "shard", "cp"), mesh, dp=V, shard=V, cp=V, tp=R)
    return share_of_sum(loss, mesh, dp=V, shard=V, cp=V) / mine


#: Fault, the function of weft.train.step it replaces, and the line of code that the type checker must name.
FAULTS = {
    "dropped_all_reduce": (dropped_all_reduce, "reduce_over_tp", "declare(g, mesh, **data, tp=tp)"),
    "counted_twice": (counted_twice, "reduce_over_tp", "sum_over_tp(grads[p.name], mesh)"),
    "mean_per_rank": (mean_per_rank, "pass_loss", "return share_of_sum(loss, mesh, dp=V, shard=V, cp=V) / mine"),
}
