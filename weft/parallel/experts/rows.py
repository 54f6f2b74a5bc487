"""Rows on their way to other ranks, and their gradients on the way back.

Rows are sent at once and waited for only when they are needed, so that other work runs meanwhile. Backward does the
same: gradients of rows are waited for when the part before dispatch needs them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weft.models.experts import MovedRows
from weft.models.graph_parts import current_part, read
from weft.parallel.experts.members import Members
from weft.parallel.units import all_gather, exchanged_rows, reduce_scatter

T = torch.Tensor

#: Waits for rows that are under way, and returns them.
Awaited = Callable[[], T]
#: Rows that are being received, and the work to wait for before they are read.
Moving = tuple[T, Any]


def exchanged(
    rows: T,
    sent: list[int],
    received: list[int],
    members: Members,
    what: str = "tokens",
) -> Awaited:
    """Start an all-to-all of rows between members; return a function that waits for the received rows.

    The first ``sent[0]`` of ``rows`` go to member 0, the next ``sent[1]`` to member 1, and so on; ``received[i]`` rows
    come from member ``i``. ``members``: the ranks that exchange. In backward the gradients travel back. ``what``: the
    kind of data for counting bytes: ``tokens``, ``copies`` (lent weights) or ``moves`` (experts that change their
    owner).
    """
    there, back = (
        partial(start_exchange, sent=out, received=into, members=members, what=what)
        for out, into in ((sent, received), (received, sent))
    )
    return _move(rows, there, back)


def gathered(x: T, members: Members, what: str = "tokens") -> Awaited:
    """Start to gather the rows ``x`` of all members; return a function that waits for ``[members * rows, ...]``.

    All members have equally many rows. ``what``: the kind of data for counting bytes: ``tokens``, ``copies`` (lent
    weights) or ``moves`` (experts that change their owner).
    """
    there, back = (
        partial(way, members=members, what=what) for way in (_gather, _scatter)
    )
    return _move(x, there, back)


def scattered(x: T, members: Members) -> Awaited:
    """Start to sum ``x`` over all members; return a function that waits for this member's rows of the sum.

    The rows of ``x`` are divided into equal ranges, one per member; member ``i`` gets range ``i`` of the sum.
    """
    there, back = (
        partial(way, members=members, what="tokens") for way in (_scatter, _gather)
    )
    return _move(x, there, back)


def start_exchange(
    rows: T, sent: list[int], received: list[int], members: Members, what: str
) -> Moving:
    """Start an all-to-all of ``rows`` between ``members``, through which no gradient flows.

    The first ``sent[0]`` of ``rows`` go to member 0, the next ``sent[1]`` to member 1, and so on; ``received[i]`` rows
    come from member ``i``. ``what``: the kind of data under which the sent bytes are counted: ``tokens``, ``copies``
    (lent weights) or ``moves`` (experts that change their owner). Returns the buffer that received rows arrive in, and
    the work to wait for before it is read.
    """
    members.note(what, rows, sum(sent) - sent[members.rank])
    return exchanged_rows(rows, sent, received, members.group)


def _gather(x: T, members: Members, what: str) -> Moving:
    members.note(what, x, (members.count - 1) * len(x))
    moved = x.new_empty(members.count * len(x), *x.shape[1:])
    return moved, all_gather(moved, x.contiguous(), group=members.group, async_op=True)


def _scatter(x: T, members: Members, what: str) -> Moving:
    members.note(what, x, len(x) - len(x) // members.count)
    moved = x.new_empty(len(x) // members.count, *x.shape[1:])
    work = reduce_scatter(moved, x.contiguous(), group=members.group, async_op=True)
    return moved, work


@dataclass
class _Flight:
    """Moves rows ``there`` and their gradients ``back``, and keeps rows under way until they are needed."""

    there: Callable[[T], Moving]
    back: Callable[[T], Moving]
    moving: Moving | None = None

    def land(self) -> T:
        """Wait for the rows under way, and return them."""
        assert self.moving is not None
        (moved, work), self.moving = self.moving, None
        work.wait()
        return moved

    def leave(self, rows: T) -> T:
        self.moving = self.there(rows)
        return self.moving[0]

    def arrive(self, rows: T) -> T:
        self.land()
        return rows.view_as(rows)

    def turn_back(self, grad: T) -> T:
        """Start to send gradients back; the result has their shape only, and :meth:`come_back` ignores it."""
        self.moving = self.back(grad)
        return grad

    def come_back(self, grad: T) -> T:
        return self.land()


def _move(
    rows: T, there: Callable[[T], Moving], back: Callable[[T], Moving]
) -> Awaited:
    """Let rows go ``there``, and in backward their gradients ``back``; what is returned waits for the rows."""
    flight, part = _Flight(there, back), current_part()
    under_way = MovedRows.apply(rows, flight.leave, flight.come_back)
    return lambda: MovedRows.apply(
        read(under_way, part), flight.arrive, flight.turn_back
    )
