"""Collectives that are under way: what runs between their start and their end is hidden time.

:func:`start_gather` and :func:`start_scatter` are :func:`weft.layout.boundary.gather_tokens` and
:func:`~weft.layout.boundary.scatter_tokens` cut in two: they return at once, and :meth:`Pending.wait` returns the
result. Backward is cut at the same places. Autograd runs later operations of forward first, so the backward of what was
computed between start and end runs while the gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist

from weft.layout.boundary import gather_tokens, scatter_tokens, sum_tokens
from weft.layout.mesh import Mesh

T = torch.Tensor

# PyTorch 2.13 renamed these two and warns at every call by the old name, the only one that 2.11 has.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class StartedCollective:
    """Handle of a collective that runs in the background; :meth:`land` waits for it and returns its result.

    ``result``: the tensor that the collective fills. ``work``: PyTorch's work object; None if there is nothing to wait
    for. ``unpack``: function that brings the filled tensor into the shape of the result.
    """

    def __init__(
        self, result: T, work: Any = None, unpack: Callable[[T], T] = lambda x: x
    ) -> None:
        self.result, self.work, self.unpack = result, work, unpack

    def land(self) -> T:
        """Wait until the collective has ended, and return its result in its final shape."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.unpack(self.result)


def gather_flight(x: T, group: Any) -> StartedCollective:
    """Start to gather ``x`` ``[batch, seq/tp, ...]`` over ``group``; the result is ``[batch, seq, ...]``."""
    ranks = dist.get_world_size(group)
    parts = x.new_empty(ranks, *x.shape)
    work = all_gather(parts.flatten(0, 1), x.contiguous(), group=group, async_op=True)
    # [tp, batch, seq/tp, ...] -> [batch, seq, ...]
    return StartedCollective(
        parts, work, lambda parts: parts.transpose(0, 1).flatten(1, 2)
    )


def scatter_flight(x: T, group: Any) -> StartedCollective:
    """Start to sum ``x`` ``[batch, seq, ...]`` over ``group``; the result is this rank's ``[batch, seq/tp, ...]``."""
    ranks = dist.get_world_size(group)
    # [batch, seq, ...] -> [tp, batch, seq/tp, ...]
    parts = x.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    if x.device.type == "cpu":
        # gloo's reduce-scatter is an all-reduce, which sends twice the bytes
        came = torch.empty_like(parts)
        work = dist.all_to_all_single(came, parts, group=group, async_op=True)
        return StartedCollective(came, work, lambda came: came.sum(0))
    own = torch.empty_like(parts[0])
    work = reduce_scatter(own, parts.flatten(0, 1), group=group, async_op=True)
    return StartedCollective(own, work)


def sum_flight(x: T, group: Any) -> StartedCollective:
    """Start an all-reduce that sums ``x`` over ``group``; the result is the whole sum, shaped like ``x``."""
    total = x.clone(memory_format=torch.contiguous_format)
    return StartedCollective(total, dist.all_reduce(total, group=group, async_op=True))


class _Start(torch.autograd.Function):
    """Forward starts a collective; backward waits for the one that :class:`_End` has started."""

    @staticmethod
    def forward(ctx: Any, x: T, pending: Pending) -> T:
        ctx.pending = pending
        pending.flight = pending.begin(x, pending.group)
        # what autograd passes on to the end, which alone reads it
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        flight, ctx.pending.back_flight = ctx.pending.back_flight, None
        return flight.land(), None


class _End(torch.autograd.Function):
    """Forward waits for the collective; backward starts that of the gradients, and returns before its end."""

    @staticmethod
    def forward(ctx: Any, started: T, pending: Pending) -> T:
        ctx.pending = pending
        flight, pending.flight = pending.flight, None
        return flight.land()

    @staticmethod
    def backward(ctx: Any, grad: T) -> tuple[T, None]:
        ctx.pending.back_flight = ctx.pending.begin_back(grad, ctx.pending.group)
        return grad.new_empty(0), None


class Pending:
    """A collective under way in a differentiable pass. It must be waited for once, by the rank that has started it.

    ``begin``: function that starts the collective of forward from a tensor and ``group``. ``begin_back``: the same for
    the gradients in backward. All ranks of ``group`` must start their collectives in the same order.
    """

    def __init__(
        self,
        x: T,
        group: Any,
        begin: Callable[[T, Any], StartedCollective],
        begin_back: Callable[[T, Any], StartedCollective],
    ) -> None:
        self.group, self.begin, self.begin_back = group, begin, begin_back
        self.flight: Any = None
        self.back_flight: Any = None
        self._started: T | None = _Start.apply(x, self)

    def wait(self) -> T:
        """Wait until the collective has ended, and return its result, through which gradients flow back."""
        started, self._started = self._started, None
        result: T = _End.apply(started, self)
        return result


class Arrived:
    """Handle of a collective over a single rank, whose result is there at once. It takes the place of a
    :class:`Pending`.

    ``x``: the result.
    """

    def __init__(self, x: T) -> None:
        self._x = x

    def wait(self) -> T:
        """Return the result at once, in place of :meth:`Pending.wait`."""
        return self._x


def start_sum(x: T, mesh: Mesh) -> Pending | Arrived:
    """Start summing ``x`` ``[batch, seq, embed]`` over ``tp`` in the background, and return the handle to wait for.

    Its ``wait()`` returns the result of :func:`weft.layout.boundary.sum_tokens`.
    """
    if mesh.size("tp") == 1 or mesh.sums or spmd.is_type_checking():
        return Arrived(sum_tokens(x, mesh))
    return Pending(x, mesh.group("tp"), sum_flight, sum_flight)


def start_gather(x: T, mesh: Mesh) -> Pending | Arrived:
    """Start gathering ``x`` ``[batch, seq/tp, embed]`` over ``tp`` in the background, and return the handle to wait
    for.

    Its ``wait()`` returns the result of :func:`weft.layout.boundary.gather_tokens`.
    """
    if mesh.size("tp") == 1 or mesh.sums or spmd.is_type_checking():
        return Arrived(gather_tokens(x, mesh))
    return Pending(x, mesh.group("tp"), gather_flight, scatter_flight)


def start_scatter(x: T, mesh: Mesh) -> Pending | Arrived:
    """Start a reduce-scatter of ``x`` ``[batch, seq, embed]`` over ``tp`` in the background; return the handle to wait
    for.

    Its ``wait()`` returns the result of :func:`weft.layout.boundary.scatter_tokens`.
    """
    if mesh.size("tp") == 1 or mesh.sums or spmd.is_type_checking():
        return Arrived(scatter_tokens(x, mesh))
    return Pending(x, mesh.group("tp"), scatter_flight, gather_flight)
