"""The tokens of a norm region in another order over the ranks of ``tp``: that of parts of rows.

A norm region gives rank ``r`` of ``tp`` the ``r``-th share of every row. Parts of rows that compute one after the other
need the ``r``-th share of each part. Going from one to the other moves each token once, which costs a small part of a
gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from weft.layout.mesh import Mesh

T = torch.Tensor


class TokenMoves(NamedTuple):
    """An all-to-all exchange that changes which tokens of a row each rank holds, and in which order.

    Attributes:
        ``leave``: indices of the rank's tokens in the order in which they are sent, ``[tokens]``.
        ``sent``, ``received``: number of tokens that go to, and come from, each rank.
        ``arrive``: for each token that the rank then holds, its index among the tokens that arrive, ``[tokens]``.
    """

    leave: T
    sent: list[int]
    received: list[int]
    arrive: T


@lru_cache
def moves(sizes: tuple[int, ...], ranks: int, rank: int, back: bool) -> TokenMoves:
    """Return the exchange of tokens after which each rank holds an equal share of every part of a row.

    Before it, each rank holds one contiguous range of the row.

    ``sizes``: tokens of each part, multiples of ``ranks``; ``rank``: this rank among ``ranks``; ``back``: return the
    opposite exchange.
    """
    whole = np.arange(sum(sizes)).reshape(ranks, -1)
    ends = np.cumsum([0, *sizes])
    cut = [
        np.arange(a, a + size).reshape(ranks, -1)
        for a, size in zip(ends, sizes, strict=False)
    ]
    # [ranks, tokens of a rank], the numbers in the row of the tokens that each rank has
    before, after = whole, np.concatenate(cut, 1)
    if back:
        before, after = after, before
    to = np.empty(sum(sizes), int)
    to[after] = np.arange(ranks)[:, None]
    goes = [to[before[source]] for source in range(ranks)]
    leave = np.argsort(goes[rank], kind="stable")
    coming = [before[source][goes[source] == rank] for source in range(ranks)]
    place = np.empty(sum(sizes), int)
    place[np.concatenate(coming)] = np.arange(len(after[rank]))
    return TokenMoves(
        torch.from_numpy(leave),
        np.bincount(goes[rank], minlength=ranks).tolist(),
        [len(each) for each in coming],
        torch.from_numpy(place[after[rank]]),
    )


class _Reorder(torch.autograd.Function):
    """Tokens in another order over the ranks of a group; their gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: T, group: Any, sizes: tuple[int, ...], back: bool) -> T:
        ctx.group, ctx.sizes, ctx.back = group, sizes, back
        way = moves(sizes, group.size(), group.rank(), back)
        leaving = x.transpose(0, 1)[way.leave.to(x.device)].contiguous()
        arriving = torch.empty_like(leaving)
        if dist.get_backend(group) == "gloo":
            from weft.layout.flights import swap

            swap(arriving.split(way.received), leaving.split(way.sent), group)
        else:
            dist.all_to_all_single(arriving, leaving, way.received, way.sent, group)
        return arriving[way.arrive.to(x.device)].transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: T) -> Any:
        way_back = _Reorder.apply(grad, ctx.group, ctx.sizes, not ctx.back)
        return way_back, None, None, None


def to_parts(x: T, sizes: Sequence[int], mesh: Mesh) -> T:
    """Exchange tokens so that this rank holds its share of each part of the rows: ``[batch, seq/tp, ...]``.
    Collective.

    The shares of the parts follow one another. ``x``: this rank's share of whole rows, of the same shape; ``sizes``:
    tokens of each part, multiples of the size of ``tp``.
    """
    if mesh.size("tp") == 1 or len(sizes) == 1:
        return x
    moved: T = _Reorder.apply(x, mesh.group("tp"), tuple(sizes), False)
    return moved


def to_rows(x: T, sizes: Sequence[int], mesh: Mesh) -> T:
    """Exchange tokens back from the order of :func:`to_parts`: return this rank's share of whole rows, shaped like
    ``x``.

    ``sizes``: tokens of each part, as passed to :func:`to_parts`. Collective.
    """
    if mesh.size("tp") == 1 or len(sizes) == 1:
        return x
    moved: T = _Reorder.apply(x, mesh.group("tp"), tuple(sizes), True)
    return moved
