"""Texts that are read behind a prompt under one cache policy after the other, for the benches of policies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.generate.cache_policy import CachePolicy
from weft.generate.reader import PagedReader, TextSlice
from weft.models.block_selector import BlockSelector, KeyReads
from weft.models.spans import Span
from weft.models.transformer import Transformer
from weft.techniques.cache_policies.alisa import SparseWindow
from weft.techniques.cache_policies.alisa.alisa_selector import RECENT
from weft.techniques.cache_policies.alisa.query_selector import QuerySelector


class AttendedSelector(QuerySelector):
    """ALISA's choice with whole queries and keys in place of sums over earlier queries, or of a few elements.

    All keys are read for it, so it saves nothing: it shows how much of the loss is the fault of the choice.
    """

    def _looked(self, span: Span, store: torch.Tensor) -> int:
        return 0

    def _scores(
        self,
        store: torch.Tensor,
        blocks: torch.Tensor,
        queries: torch.Tensor,
        best: torch.Tensor,
    ) -> torch.Tensor:
        keys = store[0, blocks].flatten(0, 1).to(queries.dtype)
        return queries @ keys.permute(1, 2, 0)


class AttendedWindow(SparseWindow):
    """Cache policy of :class:`AttendedSelector`."""

    def selector(self, size: int) -> BlockSelector:
        return AttendedSelector(self.share, size, self.rounded)


class Scores(NamedTuple):
    """Log-probabilities of the tokens of each text behind its prompt, which tokens are the likeliest there, and the
    share of the keys that were attended to.
    """

    logs: list[torch.Tensor]
    likeliest: list[torch.Tensor]
    share: float


class Readings:
    """Texts with their prompts, read under one policy after the other. The keys of prompts that are read whole are
    computed once.
    """

    def __init__(self, model: Transformer, texts: Sequence[Sequence[int]], prompts: Sequence[int]) -> None:  # fmt: skip
        self.model, self.texts, self.prompts = model, texts, prompts
        self.stores: list[torch.Tensor] = []
        self.blocks = -(-max(map(len, texts)) // PagedReader(model).size)

    def _slices(self, first: Sequence[int], last: Sequence[int], rows: Sequence[int]) -> list[TextSlice]:  # fmt: skip
        return [
            TextSlice(ids[a:b], a, [*range(i * self.blocks, (i + 1) * self.blocks)], row, prompt=prompt)
            for i, (ids, prompt, a, b, row) in enumerate(zip(self.texts, self.prompts, first, last, rows, strict=True))
        ]  # fmt: skip

    @torch.inference_mode()
    def scores(self, policy: CachePolicy | None) -> Scores:
        reader, ones = PagedReader(self.model, policy=policy), [1] * len(self.texts)
        reader.reserve(self.blocks * len(self.texts))
        begin = [0] * len(self.texts)
        selectors = [getattr(pages, "selector", None) for pages in reader.pages]
        if isinstance(policy, SparseWindow) and not policy.prompts and not policy.rounded:  # fmt: skip
            if not self.stores:
                dense = PagedReader(self.model)
                dense.reserve(self.blocks * len(self.texts))
                dense.read(self._slices(begin, self.prompts, ones))
                self.stores = [pages.store for pages in dense.pages]
            for pages, store in zip(reader.pages, self.stores, strict=True):
                pages.store = store.clone()
                pages.loaded([*range(store.shape[1])])
            ends = [-(-prompt // reader.size) for prompt in self.prompts]
            begin = [max(0, end - RECENT) * reader.size for end in ends]
        first = reader.read(self._slices(begin, self.prompts, ones))
        for each in selectors:
            if each is not None:
                each.reads = KeyReads()
        counts = [len(ids) - prompt for ids, prompt in zip(self.texts, self.prompts, strict=True)]  # fmt: skip
        ends = [*map(len, self.texts)]
        rows = reader.read(self._slices(self.prompts, ends, counts)).split(counts)
        scored = Scores([], [], 1.0)
        for i, (ids, prompt) in enumerate(zip(self.texts, self.prompts, strict=True)):
            logs = torch.cat((first[i : i + 1], rows[i][:-1])).float().log_softmax(-1)
            scored.logs.append(
                logs.gather(1, torch.tensor(ids[prompt:])[:, None])[:, 0]
            )
            scored.likeliest.append(logs.argmax(-1))
        reads = [each.reads for each in selectors if each is not None]
        share = (
            sum(r.chosen for r in reads) / sum(r.all for r in reads) if reads else 1.0
        )
        return scored._replace(share=share)


def perplexity(scored: Scores) -> float:
    """Of tokens behind prompts, but for each text's first, which the prompt foretells with all keys."""
    return math.exp(-torch.cat([logs[1:] for logs in scored.logs]).mean().item())
