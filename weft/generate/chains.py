"""Forward passes for requests of several models that share modules (BlockLLM, Hu et al. 2024, 2404.18322).

Layer by layer, the new tokens of all requests are grouped by the module that their models run there. Each group is
computed once, by a pass over the rows of its tokens: where all models share a block there is one group. Cache blocks
of all models are in the same pages, because models of one shape remember tensors of one shape.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from weft.models.adapter_shelf import AdapterShelf, LentAdapter
from weft.models.paged import Pages, Reading, slots
from weft.models.rope import angles
from weft.models.shared_weights import chain_of
from weft.models.spans import Span
from weft.models.transformer import Transformer

T = torch.Tensor


class SpanGroup(NamedTuple):
    """Spans of a packed row that one forward call of a module computes together, because their models share the module.
    The tokens of these spans are joined to a row of their own, the group's row.

    A packed row joins the tokens of several texts; a span is the part of one text.

    Attributes:
        ``model``: the model of the group's first span; the models of all its spans have the module in common.
        ``rows``: indices in the packed row of the group's tokens; a slice if the group has all tokens.
        ``reading``: the spans, with indices in the group's row, and the places of their tokens in the cache.
        ``adapters``: for each span its adapter; None: the span is computed without one.
        ``documents``: indices in the group's row at which the spans end, after a leading 0.
        ``wanted``: indices of the rows of logits that belong to this group's tokens, among all rows of logits that the
            pass returns.
        ``only``: for each of the rows ``wanted``, the index in the group's row of the token from which it is computed.
        ``rope``: cosines and sines of the tokens' positions.
    """

    model: Transformer
    rows: T | slice
    reading: Reading
    adapters: Sequence[LentAdapter | None]
    documents: T
    wanted: T
    only: T
    rope: tuple[T, ...]


class ChainPass:
    """A forward pass over texts of several models, in which modules that models share are computed once.

    The tokens of all texts are joined into one packed row. A span is the part of one text in this row.

    Args:
        ``spans``: the spans of all texts.
        ``models``: the model of each span.
        ``adapters``: for each span its adapter; None: the span is computed without one.
        ``numbers``: ids (first row) and positions (second row) of all tokens, ``[2, tokens]``.
        ``wanted``: indices in the packed row of the tokens whose logits are returned.
        ``pages``: the cache of each layer.
        ``size``: number of tokens of a cache block.
        ``shelf``: cache blocks in which the adapters lie.
    """

    def __init__(
        self, spans: Sequence[Span], models: Sequence[Transformer], adapters: Sequence[LentAdapter | None], numbers: T,
        wanted: Sequence[int], pages: Sequence[Pages], size: int, shelf: AdapterShelf,
    ) -> None:  # fmt: skip
        self.spans, self.models, self.adapters = spans, models, adapters
        self.numbers, self.wanted, self.pages = numbers, wanted, pages
        self.size, self.shelf = size, shelf
        self.chains: Mapping[Transformer, list[object]] = {
            model: chain_of(model) for model in models
        }
        self.groups: dict[tuple[int, ...], SpanGroup] = {}

    def groups_at(self, place: int) -> Iterator[SpanGroup]:
        """Yield one group for each distinct module that the models have at index ``place`` of their lists of modules.
        Index 0 is the embedding; the layers follow.
        """
        by_module: dict[Hashable, list[int]] = {}
        for index, model in enumerate(self.models):
            by_module.setdefault(self.chains[model][place], []).append(index)
        for chosen in by_module.values():
            key = tuple(chosen)
            if key not in self.groups:
                self.groups[key] = self._group(key)
            yield self.groups[key]

    def _group(self, chosen: Sequence[int]) -> SpanGroup:
        device, model = self.numbers.device, self.models[chosen[0]]
        spans, rows = list[Span](), list[int]()
        place: dict[int, int] = {}  # of a token of the whole row in the group
        for index in chosen:
            span = self.spans[index]
            first, count = len(rows), span.last - span.first
            place |= {span.first + i: first + i for i in range(count)}
            rows += range(span.first, span.last)
            spans.append(span._replace(first=first, last=first + count))
        wanted = [i for i, token in enumerate(self.wanted) if token in place]
        whole = len(chosen) == len(self.spans)
        tokens = slice(None) if whole else torch.tensor(rows, device=device)
        return SpanGroup(
            model,
            tokens,
            Reading(spans, torch.tensor(slots(spans, self.size), device=device)),
            [self.adapters[index] for index in chosen],
            torch.tensor([0, *(span.last for span in spans)], dtype=torch.int32),
            torch.tensor(wanted, dtype=torch.int64, device=device),
            torch.tensor([place[self.wanted[i]] for i in wanted], device=device).long(),
            angles(self.numbers[1:2, tokens], model.freq, model.norm.scale.dtype),
        )

    def run(self) -> T:
        """Compute the pass; return the wanted logits ``[wanted, vocab]``."""
        x = self._each(0, lambda group: group.model.embedding(self._ids(group)))
        for layer, pages in enumerate(self.pages):
            x = self._each(layer + 1, self._block(layer, pages, x))
        out: T | None = None
        for group in self.groups_at(len(self.pages) + 1):
            hidden = group.model.norm(group.model.settled(x[:, group.rows]))
            logits = group.model.scores(hidden, group.only)[0]
            if out is None:
                out = logits.new_empty(len(self.wanted), logits.shape[-1])
            out[group.wanted] = logits
        assert out is not None
        return out

    def _ids(self, group: SpanGroup) -> T:
        return self.numbers[:1, group.rows]

    def _block(self, layer: int, pages: Pages, x: T) -> Callable[[SpanGroup], T]:
        """Return a function that runs block ``layer`` on the hidden states ``x`` of a group's tokens."""

        def run(group: SpanGroup) -> T:
            pages.reading = group.reading
            spans, adapters = group.reading.spans, group.adapters
            with self.shelf.adapting(spans, adapters, layer):
                own, documents = x[:, group.rows], group.documents
                model = group.model
                return model.packed(model.run_block(layer, own, group.rope, documents))

        return run

    def _each(self, place: int, compute: Callable[[SpanGroup], T]) -> T:
        """Compute every group at ``place`` of the chains; return the results in the order of the whole row."""
        whole: T | None = None
        for group in self.groups_at(place):
            y = compute(group)
            if isinstance(group.rows, slice):
                return y
            if whole is None:
                whole = y.new_empty(1, self.numbers.shape[1], y.shape[-1])
            whole[:, group.rows] = y
        assert whole is not None
        return whole
