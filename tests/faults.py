"""Planted faults: each is a mistake that trainers have shipped. Both proofs must catch each of them."""

from __future__ import annotations

from weft.layout.boundary import (
    P,
    R,
    V,
    gradient_types,
    own_number,
    share_of_sum,
    sum_over,
)
from weft.train.step import sum_over_axis


def dropped_all_reduce(axis, grads, state, mesh):
    """The gradients of norms stay what each tensor-parallel rank saw."""
    return grads


def counted_twice(axis, grads, state, mesh):
    """Gradients that are already equal on all tensor-parallel ranks are summed over them once more."""
    grads = sum_over_axis(axis, grads, state, mesh)
    twice = (h.name for h in state.held if gradient_types(h.logical)[axis] is P)
    return grads | {name: sum_over(axis, grads[name], mesh) for name in twice}


def mean_per_rank(model, batch, total, mesh, route, hooks):
    """Every rank divides by its own number of tokens, and the means are averaged."""
    loss = model(batch.tokens, batch.positions, batch.cu_seqlens, batch)
    mine = own_number(
        batch.real_tokens * mesh.size("dp", "shard", "cp"),
        mesh,
        dp=V,
        shard=V,
        cp=V,
        tp=R,
    )
    return share_of_sum(loss, mesh, dp=V, shard=V, cp=V) / mine


DECLARED = "declare(grads[h.name], mesh, **state_types(h.logical))"

#: Fault, the function of weft.train.step it replaces, and the line of code that the type checker must name.
FAULTS = {
    "dropped_all_reduce": (dropped_all_reduce, "sum_over_axis", DECLARED),
    "counted_twice": (
        counted_twice,
        "sum_over_axis",
        "sum_over(axis, grads[name], mesh)",
    ),
    "mean_per_rank": (
        mean_per_rank,
        "pass_loss",
        "return share_of_sum(loss, mesh, dp=V, shard=V, cp=V) / mine",
    ),
}
