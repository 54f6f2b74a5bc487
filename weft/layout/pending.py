"""Collectives that are under way: what runs between their start and their end is hidden time.

:func:`start_gather` and :func:`start_scatter` are :func:`weft.layout.boundary.gather_tokens` and
:func:`~weft.layout.boundary.scatter_tokens` cut in two: they return at once, and :meth:`Pending.wait` returns the
result. Backward is cut at the same places. Autograd runs later operations of forward first, so the backward of what was
computed between start and end runs while the gradients travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import spmd_types as spmd
import torch

from weft.layout.boundary import gather_tokens, scatter_tokens, sum_tokens
from weft.layout.flights import (
    StartedCollective,
    gather_flight,
    scatter_flight,
    sum_flight,
)
from weft.layout.mesh import Mesh

T = torch.Tensor


class Backlog:
    """Work of a backward pass that nothing waits for, such as gradients of weights. It is done while this rank waits
    for other ranks. ``most``: number of calls that may be left for later, which keep tensors as large as activations.
    The attribute ``travels`` says whether any :class:`Pending` has begun beside it, whose backward does the work.
    """

    def __init__(self, most: int) -> None:
        self.most, self.travels = most, False
        self.calls: deque[Callable[[], None]] = deque()

    def add(self, call: Callable[[], None]) -> None:
        """Leave ``call`` for later, or do it at once where no gradients travel: nothing would shorten the backlog."""
        if self.travels:
            self.calls.append(call)
        else:
            call()

    def shorten(self) -> None:
        """Do the oldest work until no more than ``most`` calls are left. Another flight has just started."""
        while len(self.calls) > self.most:
            self.calls.popleft()()

    def work_beside(self, flight: StartedCollective) -> None:
        """Do the oldest work until ``flight`` has ended, or nothing is left to do."""
        while self.calls and not flight.has_ended():
            self.calls.popleft()()


_backlog: ContextVar[Backlog | None] = ContextVar("backlog", default=None)


@contextmanager
def working_beside(backlog: Backlog) -> Iterator[None]:
    """Return a context in which collectives start whose gradients travel beside the work of ``backlog``."""
    token = _backlog.set(backlog)
    try:
        yield
    finally:
        _backlog.reset(token)


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
        if ctx.pending.backlog:
            ctx.pending.backlog.work_beside(flight)
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
        if ctx.pending.backlog:
            ctx.pending.backlog.shorten()
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
        self.backlog = _backlog.get()
        if self.backlog:
            self.backlog.travels = True
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
