"""A step's new tokens of many texts, joined to one row that a forward pass computes without padding."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from weft.generate.request import Request
from weft.generate.scheduler import ScheduledStep
from weft.models.adapter_shelf import LentAdapter
from weft.models.spans import PrefixTile, Span


class TextSlice(NamedTuple):
    """Tokens of one text that a forward pass computes.

    Attributes:
        ``ids``: the token ids.
        ``past``: number of the text's tokens before ``ids``.
        ``table``: numbers of the cache blocks of the text.
        ``rows``: number of last tokens whose logits are returned.
        ``offset``: position of the text's first token.
        ``context``: cached tokens of other texts, to which the text attends as if they stood before it.
        ``adapter``: the adapter with which the tokens are computed, or None.
        ``prompt``: number of tokens of the text's prompt.
    """

    ids: Sequence[int]
    past: int
    table: Sequence[int]
    rows: int = 1
    offset: int = 0
    context: Sequence[PrefixTile] = ()
    adapter: LentAdapter | None = None
    prompt: int = 0


def parts_of(step: ScheduledStep, again: bool = False) -> list[TextSlice]:
    """Return a list of the text slices that a step computes. For each request these are its next tokens together with
    its first draft, then one slice for each further draft. ``again``: compute texts from their first tokens on, as a
    model without a cache does.
    """
    parts = []
    for request, tokens in step.work.items():
        past = 0 if again else request.computed
        own = [b.path for b in request.branches if b.table is request.table]
        beside = (
            LentAdapter(request.adapter, tuple(request.shelf))
            if request.adapter
            else None
        )
        ids = [
            *request.ids[past : request.computed + tokens],
            *(i for path in own for i in path),
        ]
        drawn = tokens == request.wanted
        rows = drawn * (1 + sum(map(len, own))) + request.prompt_rows(tokens)
        parts.append(
            TextSlice(
                ids,
                past,
                request.table,
                rows,
                request.offset,
                tiles_of(request, step),
                beside,
                request.prompt,
            )
        )
        for path, table in request.branches[len(own) :]:
            parts.append(
                TextSlice(
                    [*request.ids[past:], *path],
                    past,
                    table,
                    len(path),
                    adapter=beside,
                    prompt=request.prompt,
                )
            )
    return parts


def tiles_of(request: Request, step: ScheduledStep) -> list[PrefixTile]:
    """Return the cached tokens of other requests to which ``request`` attends in a step. They include tokens that the
    same step computes.
    """
    counts = [
        other.computed + step.work.get(other, 0) if n is None else n
        for other, n in request.context
    ]
    ends = (
        [sum(counts) - n for n in accumulate(counts, initial=0)]
        if request.turned
        else [0] * len(counts)
    )
    views = zip(request.context, counts, ends, strict=False)
    return [
        PrefixTile(tuple(view.request.table), n, turn) for view, n, turn in views if n
    ]


class PackedRow(NamedTuple):
    """Parts of several texts, concatenated to one row that a forward pass computes without padding.

    Attributes:
        ``ids``: token ids of the row.
        ``positions``: position of each token in its text.
        ``spans``: where each text's part lies in the row, and where its cache blocks are.
        ``wanted``: indices of the tokens whose logits are returned.
        ``adapters``: for each span its adapter; None: the span is computed without one.
    """

    ids: list[int]
    positions: list[int]
    spans: list[Span]
    wanted: list[int]  # the indices of tokens whose logits are wanted
    adapters: list[LentAdapter | None]  # of the spans

    @classmethod
    def of(cls, said: Sequence[Any]) -> "PackedRow":
        """Build a row from ``said``, a list of a packed row's fields that was sent as JSON."""
        ids, positions, spans, wanted, adapters = said
        return cls(
            ids,
            positions,
            [
                Span(
                    first,
                    last,
                    past,
                    table,
                    [PrefixTile(*tile) for tile in context],
                    prompt,
                )
                for first, last, past, table, context, prompt in spans
            ],
            wanted,
            [
                LentAdapter(lent[0], tuple(lent[1])) if lent else None
                for lent in adapters
            ],
        )


def pack(parts: Iterable[TextSlice]) -> PackedRow:
    """Return one row with the new tokens of all ``parts``, one part after the other."""
    row = PackedRow([], [], [], [], [])
    for ids, past, table, rows, offset, context, adapter, prompt in parts:
        first = len(row.ids)
        row.ids.extend(ids)
        row.positions.extend(range(offset + past, offset + past + len(ids)))
        row.spans.append(Span(first, len(row.ids), past, table, context, prompt))
        row.wanted.extend(range(len(row.ids) - rows, len(row.ids)))
        row.adapters.append(adapter)
    return row
