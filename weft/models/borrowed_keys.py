"""Attention to keys and values that lie in the cache of another engine (Infinite-LLM, Lin et al. 2024, 2401.02669).

The first blocks of a text can be lent: they lie at a *lender*, and the text's table has a negative number in place of
each. New tokens are written to blocks of this cache. Keys and values never travel while the text goes on: in every
layer the queries of its new tokens go to the lender, and their attention to the lent keys comes back with its
log-sum-exp. Both results are merged, which is exact. Per token and layer that is ``heads * head_dim`` elements there,
and as many with one more per head back, however long the text is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import torch

from weft.models.attention import attend_forward, join
from weft.models.numbers import wide
from weft.models.segments import earlier_keys
from weft.models.spans import Span, own_segments

T = torch.Tensor


class LoanPart(NamedTuple):
    """The tokens ``begin:end`` of a text, whose keys and values another engine holds. Cache blocks that were moved
    there together form a loan; ``loan`` is its number.
    """

    loan: int
    begin: int
    end: int


class LentQuery(NamedTuple):
    """The queries of one text in a message to a lender. A lender is an engine that holds keys and values of the text
    for another engine.

    ``first``, ``last``: the queries are the rows ``first:last`` of all queries in the message. ``past``: position in
    the text of the first of them. ``parts``: the stretches of the text's tokens that the lender holds.
    """

    first: int
    last: int
    past: int
    parts: Sequence[LoanPart]


#: A partial attention: output ``[queries, heads, width]``, and log-sum-exps ``[queries, heads]``.
Partial = tuple[T, T]


class BlockLender(Protocol):
    """Interface to another engine (a lender) in whose cache the keys and values of a text's first tokens lie."""

    def ask(
        self, layer: int, queries: Sequence[LentQuery], q: T, window: int
    ) -> Callable[[], Partial]:
        """Send queries of one layer to the lender. Return a function that waits for the lender's result: the attention
        of these queries to the keys that lie there, with its log-sum-exps.

        ``layer``: index of the layer; ``queries``: which text each of the queries belongs to; ``q``: the queries
        themselves, ``[queries, heads, width]``; ``window``: the number of tokens that a token sees, itself included; 0:
        all. Raises :class:`LenderLost` if the lender does not answer, and so does the returned function.
        """


class LenderLost(Exception):
    """Raised when a lender does not answer any more. ``lender``: the lender; ``why``: the message of the error."""

    def __init__(self, lender: BlockLender, why: str) -> None:
        super().__init__(why)
        self.lender = lender


@dataclass(frozen=True)
class LentBlock:
    """A cache block of a text that lies in the cache of another engine. ``lender``: the other engine; ``loan``: number
    of the loan, the group of blocks that were moved there together.
    """

    lender: BlockLender
    loan: int


#: Lent blocks by the negative numbers that stand in tables.
LentBlocks = dict[int, LentBlock]


class BorrowingGroup(NamedTuple):
    """New tokens, in a packed row, of all texts whose first cache blocks are lent, that is, held by other engines. The
    new tokens are the queries of attention, and are numbered here from 0.

    ``rows``: for each of these queries, its index in the packed row. ``own``: for each text, a span for the part of the
    text in this engine's cache. Its ``first`` and ``last`` are numbers of queries, and its ``past`` and ``table`` leave
    out the lent blocks. ``asked``: for each lender a triple: the lender; its queries by text; and the numbers of these
    queries here.
    """

    rows: T  # [queries], places in the packed row
    own: Sequence[Span]
    asked: Sequence[tuple[BlockLender, list[LentQuery], T]]


def group_borrowing(
    spans: Sequence[Span], lent: LentBlocks, size: int, device: torch.device
) -> BorrowingGroup:
    """Return the queries of ``spans``, whose tables begin with lent blocks, grouped by the engines that hold these
    blocks.

    ``lent``: lent blocks by their numbers in the tables; ``size``: tokens of a block; ``device``: where the group's
    tensors are made.
    """
    rows: list[int] = []
    own: list[Span] = []
    asked: dict[int, tuple[BlockLender, list[LentQuery], list[int]]] = {}
    for span in spans:
        first = len(rows)
        rows += range(span.first, span.last)
        away = sum(block < 0 for block in span.table)
        own.append(Span(first, len(rows), span.past - away * size, span.table[away:]))
        parts: dict[int, list[LoanPart]] = {}
        at = 0
        for block, run in groupby(lent[number] for number in span.table[:away]):
            begin, at = at, at + len([*run])
            part = LoanPart(block.loan, begin * size, at * size)
            parts.setdefault(id(block.lender), []).append(part)
            asked.setdefault(id(block.lender), (block.lender, [], []))
        for identity, of_lender in parts.items():
            _, queries, places = asked[identity]
            end = len(places) + span.last - span.first
            queries.append(LentQuery(len(places), end, span.past, of_lender))
            places += range(first, len(rows))
    return BorrowingGroup(
        torch.tensor(rows, device=device),
        own,
        [
            (lender, queries, torch.tensor(places, device=device))
            for lender, queries, places in asked.values()
        ],
    )


def attend_borrowing(
    q: T, group: BorrowingGroup, layer: int, window: int,
    read: Callable[[Span, int], tuple[T, T, int]],
) -> T:  # fmt: skip
    """Compute the attention of all queries of ``group`` to their own texts: ``[queries, heads, width]``. Keys in other
    engines are included; these engines (lenders) compute while this engine does.

    ``q``: the queries, of the result's shape; ``layer``: index of the layer; ``window``: the number of tokens that a
    token sees, itself included; 0: all. ``read``: called with a span and ``window``. It returns the keys and the values
    of the span's text in this cache, and how many of its first tokens the window hides; these are left out.
    """
    pending = [
        (lender.ask(layer, queries, q[places], window), places)
        for lender, queries, places in group.asked
    ]
    total = q.new_zeros(q.shape, dtype=wide(q.dtype))
    lse = torch.full(q.shape[:2], -torch.inf, dtype=total.dtype, device=q.device)
    for span in group.own:
        keys, values, before = read(span, window)
        rows = slice(span.first, span.last)
        out, logs = attend_forward(
            q[rows],
            keys,
            values,
            own_segments(span.last - span.first, span.past - before, window),
        )
        total[rows, :, : out.shape[-1]], lse[rows] = out.to(total.dtype), logs
    for wait, places in pending:
        some = total[places], lse[places]
        join(*some, *(each.to(total.device) for each in wait()))
        total[places], lse[places] = some
    return total.to(q.dtype)


def attend_lent(
    q: T, query: LentQuery, window: int, read: Callable[[int], tuple[T, T]]
) -> Partial:
    """Compute, on the lender, the attention of a text's queries to those tokens whose keys and values the lender holds.

    ``q``: the queries, ``[queries, heads, width]``. ``query``: the position of the first query in the text (``past``),
    and the stretches of the text that the lender holds (``parts``). ``window``: the number of tokens that a token sees,
    itself included; 0: all. ``read``: called with the number of a loan; returns the keys and values of the loan's
    tokens, each ``[tokens, kv_heads, width]``. Returns the output, of the shape of ``q``, and log-sum-exps ``[queries,
    heads]``.
    """
    count = query.last - query.first
    total = q.new_zeros(q.shape, dtype=wide(q.dtype))
    lse = torch.full(q.shape[:2], -torch.inf, dtype=total.dtype, device=q.device)
    for loan, begin, end in query.parts:
        segments = earlier_keys(query.past, query.past + count, begin, end, window)
        own = [
            s._replace(
                q0=s.q0 - query.past,
                q1=s.q1 - query.past,
                k0=s.k0 - begin,
                k1=s.k1 - begin,
            )
            for s in segments
        ]
        if own:
            join(total, lse, *attend_forward(q, *read(loan), own))
    return total, lse
