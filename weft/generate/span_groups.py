"""Which tokens of a forward pass run through a module together (BlockLLM, Hu et al. 2024, 2404.18322).

A model is a chain of modules: the embedding, the layers, and the final norm with the output layer. Models that share
weights share modules (:mod:`weft.models.shared_weights`). At each place of the chains, the new tokens of all texts are
grouped by the module that their models have there, and the module computes the tokens of a group in one call. Texts of
a single model are one group everywhere. Consecutive layers with the same groups are a stretch, which runs without a
break. Cache blocks of all models are in the same pages, because models of one shape remember tensors of one shape.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from weft.generate.packed_row import PackedRow
from weft.models.adapter_shelf import LentAdapter
from weft.models.paged import Reading, slots
from weft.models.queued_copy import queued_copy
from weft.models.rope import angles
from weft.models.shared_weights import chain_of
from weft.models.spans import Span
from weft.models.transformer import Transformer

T = torch.Tensor

#: Indices of the spans of each group, for all groups that together have every span once.
SpanParts = tuple[tuple[int, ...], ...]


class SpanGroup(NamedTuple):
    """Spans of a packed row that one call of a module computes together, because their models share the module. The
    tokens of these spans are joined to a row of their own, the group's row.

    A packed row joins the tokens of several texts; a span is the part of one text.

    Attributes:
        ``model``: the model of the group's first span; the models of all its spans have the module in common.
        ``rows``: indices in the packed row of the group's tokens; a slice if the group has all tokens.
        ``ids``: token ids of the group's row, ``[1, tokens]``.
        ``rope``: cosines and sines of the tokens' positions.
        ``reading``: the spans, with indices in the group's row, and the places of their tokens in the cache.
        ``adapters``: for each span its adapter; None: the span is computed without one.
        ``documents``: indices in the group's row at which the spans end, after a leading 0.
        ``wanted``: indices of the rows of logits that belong to this group's tokens, among all rows of logits that the
            pass returns; a slice if all rows do.
        ``only``: for each of the rows ``wanted``, the index in the group's row of the token from which it is computed.
    """

    model: Transformer
    rows: T | slice
    ids: T
    rope: tuple[T, ...]
    reading: Reading
    adapters: Sequence[LentAdapter | None]
    documents: T
    wanted: T | slice
    only: T


class LayerStretch(NamedTuple):
    """Consecutive layers in which the same tokens run together. ``layers``: indices of the layers. ``groups``: the
    groups of tokens, which together have each token once.
    """

    layers: range
    groups: list[SpanGroup]


class RowGroups:
    """Groups the tokens of ``row`` by the modules that compute them.

    Args:
        ``row``: the new tokens of all texts.
        ``models``: the model of each span of the row, all of one shape.
        ``numbers``: ids (first row) and positions (second row) of all tokens, ``[2, tokens]``. There may be more
            tokens than in ``row``, which then belong to no text.
        ``size``: number of tokens of a cache block.
    """

    def __init__(
        self, row: PackedRow, models: Sequence[Transformer], numbers: T, size: int
    ) -> None:
        self.row, self.models, self.numbers, self.size = row, models, numbers, size
        self.groups: dict[tuple[int, ...], SpanGroup] = {}
        whole: SpanParts = (tuple(range(len(models))),)
        # for each place of the chains
        self.parts = [whole] * (models[0].shape.layers + 2)
        if len(kinds := dict.fromkeys(models)) > 1:
            chains = {model: chain_of(model) for model in kinds}
            of_spans = [chains[model] for model in models]
            self.parts = [equal_parts(keys) for keys in zip(*of_spans, strict=True)]

    def at(self, place: int) -> list[SpanGroup]:
        """Return one group for each distinct module that the models have at index ``place`` of their chains. Index 0 is
        the embedding; the layers follow; index -1 is the norm with the output layer.
        """
        for spans in self.parts[place]:
            if spans not in self.groups:
                self.groups[spans] = self._group(spans)
        return [self.groups[spans] for spans in self.parts[place]]

    def stretches(self, stop: int = 0) -> Iterator[LayerStretch]:
        """Yield the stretches of all layers, first layer first. ``stop``: index of a layer at which a stretch begins in
        any case; 0: there is none.
        """
        parts, count = self.parts[1:], len(self.parts) - 2
        begins = [i for i in range(1, count) if i == stop or parts[i] != parts[i - 1]]
        for first, end in pairwise([0, *begins, count]):
            yield LayerStretch(range(first, end), self.at(first + 1))

    def logits(self, x: T) -> T:
        """Return the wanted logits ``[wanted, vocab]`` of hidden states ``x`` ``[1, tokens, embed]``."""
        results = (
            (group.wanted, group.model.scores(group.model.norm(hidden), group.only))
            for group in self.at(-1)
            for hidden in [group.model.settled(x[:, group.rows])]
        )
        return joined_rows(results, len(self.row.wanted))[0]

    def _group(self, chosen: tuple[int, ...]) -> SpanGroup:
        row, device, model = self.row, self.numbers.device, self.models[chosen[0]]
        spans, only = row.spans, row.wanted
        rows: T | slice = slice(None)
        wanted: T | slice = slice(None)
        if len(chosen) < len(spans):
            tokens, spans = list[int](), list[Span]()
            for span in (row.spans[index] for index in chosen):
                first = len(tokens)
                tokens += range(span.first, span.last)
                spans.append(span._replace(first=first, last=len(tokens)))
            place = {token: at for at, token in enumerate(tokens)}
            held = [i for i, token in enumerate(row.wanted) if token in place]
            only = [place[row.wanted[i]] for i in held]
            rows, wanted = queued_copy(tokens, device), queued_copy(held, device)
        ids, positions = self.numbers[:, None, rows]  # [1, tokens] each
        return SpanGroup(
            model,
            rows,
            ids,
            angles(positions, model.freq, model.norm.scale.dtype),
            Reading(spans, queued_copy(slots(spans, self.size), device)),
            [row.adapters[index] for index in chosen],
            torch.tensor([0, *(span.last for span in spans)], dtype=torch.int32),
            wanted,
            queued_copy(only, device),
        )


def equal_parts(keys: Iterable[Hashable]) -> SpanParts:
    """Return the indices of ``keys``, those of equal keys together: a part for each distinct key, the one that comes
    first in ``keys`` first.
    """
    by_key = defaultdict[Hashable, list[int]](list)
    for index, key in enumerate(keys):
        by_key[key].append(index)
    return tuple(map(tuple, by_key.values()))


def joined_rows(results: Iterable[tuple[T | slice, T]], count: int) -> T:
    """Return the results of all groups of tokens in the order of the whole row, ``[1, count, width]``. ``results``: for
    each group, its places in the whole row, and its result ``[1, places, width]``.
    """
    whole: T | None = None
    for rows, y in results:
        if isinstance(rows, slice):
            return y
        if whole is None:
            whole = y.new_empty(1, count, y.shape[-1])
        whole[:, rows] = y
    assert whole is not None
    return whole
