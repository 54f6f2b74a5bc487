"""Choice of tokens by the present query, of which a few elements are compared with those of all keys."""

from __future__ import annotations

from math import ceil

import torch

from weft.models.numbers import wide
from weft.models.spans import Span
from weft.techniques.cache_policies.alisa.alisa_selector import WeightSumSelector

T = torch.Tensor

#: The share of the elements of all keys that a token reads to choose.
ELEMENTS = 1 / 8

#: The share of the seen tokens that are the last ones: a query finds near tokens as well.
NEAR = 0.25


class QuerySelector(WeightSumSelector):
    """Chooses the tokens beside the last ones by the query of each new token in place of sums over earlier queries. The
    elements that are largest in the queries of a key head's group are read of all keys, and say nearly which keys get
    most weight (SparQ, 2312.04985). They count in the share.
    """

    sums_weights = False
    elements, near = ELEMENTS, NEAR

    def __init__(
        self, share: float, size: int, in_bytes: bool, prompts: bool = False
    ) -> None:
        super().__init__(share, size, in_bytes, prompts)
        self.together = 1

    def _counted_from(self, span: Span) -> int:
        return self.dense_until(span)

    def _looked(self, span: Span, store: T) -> int:
        before = span.past // self.size * self.size
        if span.past < self.dense_until(span) or self._budget(before) >= before:
            return 0
        return ceil(before * self.elements / 2)

    def _standing(self, span: Span, store: T, q: T, blocks: T) -> T:
        heads, width = store.shape[3:]
        # [kv_heads, group, width]
        queries = q[span.first].unflatten(0, (heads, -1)).to(wide(store.dtype))
        sizes = queries.abs()
        # [kv_heads, elements]
        best = sizes.sum(1).topk(ceil(self.elements * width), -1).indices
        keys = self._elements(store, blocks, best).to(queries.dtype)
        part = queries.gather(2, best[:, None].expand(-1, queries.shape[1], -1))
        # as if the other elements were like these
        share = part.abs().sum(-1, keepdim=True) / sizes.sum(-1, keepdim=True)
        part = part / (width * share.clamp(min=1e-30)).sqrt()
        # [kv_heads, group, tokens]
        scores = part @ keys.flatten(0, 1).permute(1, 2, 0)
        return scores.softmax(-1).sum(1)

    def _elements(self, store: T, blocks: T, best: T) -> T:
        """Return elements of the keys of ``blocks``: ``[blocks, size, kv_heads, elements]``. ``best``: their numbers,
        ``[kv_heads, elements]``.
        """
        heads, width = store.shape[3:]
        within = torch.arange(self.size * heads, device=store.device)
        rows = blocks.clamp(min=0)[:, None] * len(within) + within
        # those elements alone, not whole keys
        at_elements = rows.view(-1, self.size, heads, 1) * width + best
        keys = store[0].take(at_elements)
        away = blocks < 0
        if self.host is not None and away.any():
            at = (-1 - blocks[away]).cpu()
            index = best.cpu().expand(len(at), self.size, -1, -1)
            moved = self.host.kept[0, at].gather(3, index)
            if self.host.scales is not None:
                moved = moved * self.host.scales[0, at]
            keys[away] = moved.to(keys)
        return keys
