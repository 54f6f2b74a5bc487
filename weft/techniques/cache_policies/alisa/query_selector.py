"""Choice of tokens by the present query, of which some elements are compared with those of all keys in two bits."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch

from weft.models.block_selector import SelectedPages
from weft.models.numbers import wide
from weft.models.queued_copy import queued_copy
from weft.models.spans import Span
from weft.techniques.cache_policies.alisa.alisa_selector import WeightSumSelector
from weft.techniques.cache_policies.alisa.drawn_tokens import DrawnTokens, SeenTokens
from weft.techniques.cache_policies.alisa.key_codes import KeyCodes, code_bits

T = torch.Tensor

#: The share of the elements of all keys that a token reads to choose, in two bits.
ELEMENTS = 3 / 8

#: Bits of an element of a key that is read whole, and of its value. A cache of 32 bits counts as if it had 16.
WHOLE = 16

#: The share of the seen tokens that are the last ones: a query finds near tokens as well.
NEAR = 1 / 8

#: The share of the other seen tokens that are drawn; and this share where a head looks at everything a little.
DRAWN, DRAWN_EVENLY = 0.375, 0.5

#: The quantile of the scores of the chosen tokens above which a drawn one weighs no more than one at it, or than
#: itself once. Codes have not shown its weight, so that it is not like those it stands for, and would be all of a head
#: that looks at few.
LEVEL = 0.25

#: The power of their expected weight by which tokens are drawn: as that weight is not exact, a token with little of it
#: should not be rare, since it would count for very many if it is drawn.
POWER = 0.75

#: The most keys that are read whole to choose elements, at equal distances, and the tokens for each of them at least.
SAMPLES, APART = 16, 16

#: Blocks whose keys are rounded in one call, of many.
TOGETHER = 256

#: Draws begin at multiples of the golden ratio, so that tokens after one another draw others.
GOLDEN = 0.6180339887498949


def looked_share(size: int, elements: float = ELEMENTS) -> float:
    """Return the share of keys and values in blocks of ``size`` tokens that a token reads to choose, but for whole keys
    of a sample. ``elements``: share of the elements of all keys that it reads.
    """
    return elements * code_bits(size) / WHOLE / 2


class QuerySelector(WeightSumSelector):
    """Chooses the tokens beside the last ones by the query of each new token in place of sums over earlier queries.

    Some elements of all keys are read, rounded to two bits, and say nearly which keys get most weight (SparQ,
    2312.04985; :class:`KeyCodes`). They are those for which the queries times the standard deviation over keys is
    largest: an element that hardly differs between keys adds nearly the same to all scores, however large it is. A
    sample of keys shows the standard deviations.

    A part of the tokens are those with most weight. The others are drawn from all that are left, by about their weight,
    and each counts for as many as it stands for (MagicPIG, 2410.16179). Where a head looks at everything a little, the
    tokens with most weight alone would be another text than the whole. ``evenly``: more are drawn, and each counts for
    as many, whatever its weight is.

    Elements and the sample count in the share, by their bits. The attribute ``near_codes`` has the keys of blocks on
    the device, and ``away_codes`` those of blocks on the host.
    """

    sums_weights = False
    elements, near, samples, power = ELEMENTS, NEAR, SAMPLES, POWER

    def __init__(
        self,
        share: float,
        size: int,
        in_bytes: bool,
        prompts: bool = False,
        evenly: bool = False,
    ) -> None:
        super().__init__(share, size, in_bytes, prompts)
        self.together = 1
        self.near_codes, self.away_codes = KeyCodes(size), KeyCodes(size)
        self.drawn = DRAWN_EVENLY if evenly else DRAWN
        self.level = None if evenly else LEVEL

    def written(self, pages: SelectedPages) -> None:
        super().written(pages)
        prepared, key = pages.reading.prepared, "full blocks"
        if key not in prepared:
            full = [
                block
                for span in pages.reading.spans
                for block in span.table[span.past // self.size : (span.past + span.last - span.first) // self.size]
            ]  # fmt: skip
            assert pages.store is not None
            device = pages.store.device
            prepared[key] = queued_copy(full, device) if full else None
        if prepared[key] is not None:
            self._encode(pages, prepared[key])

    def loaded(self, pages: SelectedPages, blocks: Sequence[int]) -> None:
        if pages.store is not None and blocks:
            self._encode(pages, queued_copy([*blocks], pages.store.device))

    def _encode(self, pages: SelectedPages, blocks: T) -> None:
        assert pages.store is not None
        for some in blocks.split(TOGETHER):
            self.near_codes.write(some, pages.store[0, some], pages.store.shape[1])

    def _move(self, pages: SelectedPages, moves: Sequence[tuple[int, int]]) -> None:
        super()._move(pages, moves)
        last = {-1 - new: old for old, new in moves}
        self.away_codes.take([*last], self.near_codes, [*last.values()])

    def _counted_from(self, span: Span) -> int:
        return self.dense_until(span)

    def _looked(self, span: Span, store: T) -> int:
        before = span.past // self.size * self.size
        if span.past < self.dense_until(span) or self._budget(before) >= before:
            return 0
        # of the sample keys alone: as much as half of so many keys and values
        sampled = len(self._sampled(before)) / 2
        return ceil(before * looked_share(self.size, self.elements) + sampled)

    def _sampled(self, before: int) -> range:
        """Return which of the first ``before`` tokens are the sample."""
        return range(0, before, max(APART, ceil(before / self.samples)))

    def _choose_far(
        self, span: Span, store: T, q: T, blocks: T, far: int, count: int
    ) -> SeenTokens:
        # [kv_heads, far]
        standing = self._standing(span, store, q, blocks)[:, :far]
        drawn = int(count * self.drawn)
        best = _in_order(standing).topk(count - drawn, -1).indices
        weights = standing.pow(self.power).scatter(1, best, 0)
        sums = weights.cumsum(-1)
        begin = span.past * GOLDEN % 1
        ticks = (torch.arange(drawn, device=q.device) + begin) / drawn * sums[:, -1:]
        places = torch.searchsorted(sums, ticks, right=True).clamp(max=far - 1)
        each = weights.gather(1, places)
        counts = (sums[:, -1:] / (each * drawn)).log()
        # where the best ones have all weight there is nothing to draw
        counts = counts.masked_fill(each == 0, -torch.inf)
        drawn_ones = DrawnTokens(best.shape[1], counts, self.level)
        return SeenTokens(torch.cat([best, places], 1), drawn_ones)

    def _standing(self, span: Span, store: T, q: T, blocks: T) -> T:
        """Return nearly the weight of each token of ``blocks``, summed over the queries of each group: ``[kv_heads,
        tokens]``.
        """
        heads, width = store.shape[3:]
        # [kv_heads, group, width]
        queries = q[span.first].unflatten(0, (heads, -1)).to(wide(store.dtype))
        sampled = self._sampled(len(blocks) * self.size)
        at = torch.arange(sampled.start, sampled.stop, sampled.step, device=q.device)
        at = at.expand(1, heads, -1)
        # [kv_heads, samples, width]
        sample = self._fetch(store, blocks[at // self.size], at % self.size, 1)[0, 0]
        differing = queries.square().sum(1).sqrt() * sample.std(1, unbiased=False)
        # [kv_heads, elements]
        best = differing.topk(ceil(self.elements * width), -1).indices
        scores = self._scores(store, blocks, queries, best)
        return (scores * width**-0.5).softmax(-1).sum(1)

    def _scores(self, store: T, blocks: T, queries: T, best: T) -> T:
        """Return nearly the products of queries and keys of ``blocks``: ``[kv_heads, group, tokens]``. ``best``:
        numbers of the elements that are read, ``[kv_heads, elements]``.
        """
        away = blocks < 0
        if not away.any():
            return self.near_codes.scores(blocks, queries, best)
        scores = queries.new_empty(*queries.shape[:2], len(blocks), self.size)
        here = self.near_codes.scores(blocks[~away], queries, best)
        moved = (-1 - blocks[away]).cpu(), queries.cpu(), best.cpu()
        there = self.away_codes.scores(*moved).to(scores.device)
        scores[:, :, ~away] = here.unflatten(2, (-1, self.size))
        scores[:, :, away] = there.unflatten(2, (-1, self.size))
        return scores.flatten(2)


def _in_order(standing: T) -> T:
    """Return whole numbers in the order of ``standing``, ``[kv_heads, tokens]``, of which no two are equal: what
    differs in rounding alone stands in the order of the text.

    Keys that are alike have the same codes. Which of them comes first must not depend on what else a step computes.
    """
    least = torch.float32 if standing.dtype == torch.float64 else torch.bfloat16
    bits = torch.int32 if least == torch.float32 else torch.int16
    # numbers from 0 on are ordered as their bits are
    places = torch.arange(standing.shape[1], device=standing.device)
    return (standing.to(least).view(bits).long() << 32) - places
