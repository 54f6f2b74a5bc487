"""Prompts that several answers share, computed once in a training step instead of once for each answer.

The answers of a group follow the same prompt. A row that has them as documents of their own computes the prompt with
each of them. Here the prompt, up to its last token, becomes a segment of its own, and every answer a segment that
begins with the prompt's last token, whose tokens see the prompt too. The last token is computed with each answer, as
its label is the answer's first token. Loss and gradients are the same, and attention is exact
(:mod:`weft.models.prompt_attention`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.data.batch import IGNORE, Batch

#: Share of a row's tokens that sharing must save, because attention then takes more calls, or reads gathered keys.
LEAST = 0.05


class _Segment(NamedTuple):
    """Tokens of a row that become a segment: the indices ``first`` to ``end``. ``parent``: number of the segment that
    they see, too; -1: none. ``of``: where the document begins to which the tokens belong; -1 for a shared prompt.
    """

    first: int
    end: int
    parent: int = -1
    of: int = -1


def share_prompts(batch: Batch, multiple: int = 1) -> Batch:
    """Return ``batch``, of sampled answers in a single row, with prompts that several answers share in it once.

    If that would save few tokens, the batch itself is returned. The new ``cu_seqlens`` has two rows, int32 ``[2,
    segments + 1]``: where segments begin, and the number of the segment that a segment sees beside itself, or -1.
    ``multiple``: the row is padded to a multiple of so many tokens.
    """
    rollout, documents = batch.rollout, batch.documents
    if rollout is None or documents is None or len(batch.tokens) != 1:
        return batch
    if batch.cu_seqlens.dim() > 1:
        return batch
    segments = _segments(batch)
    kept = sum(each.end - each.first for each in segments)
    real = int((documents >= 0).sum())
    if not segments or real - kept < LEAST * real:
        return batch
    # [kept tokens], where each token was
    index = torch.cat([torch.arange(each.first, each.end) for each in segments])
    padding = -kept % multiple

    def padded(x: torch.Tensor, filled: float = 0) -> torch.Tensor:
        return F.pad(x, (0, padding), value=filled)

    def chosen(x: torch.Tensor, filled: float = 0) -> torch.Tensor:
        return padded(x[:, index], filled)

    lengths = [each.end - each.first for each in segments]
    numbers = torch.arange(len(segments)).repeat_interleave(torch.tensor(lengths))
    divisor = _divisors(segments, rollout.divisor[0], batch.cu_seqlens.tolist())
    parents = [each.parent for each in segments]
    if padding:
        lengths.append(padding)
        parents.append(-1)
    edges = [0, *accumulate(lengths)]
    return replace(
        batch,
        tokens=chosen(batch.tokens),
        labels=chosen(batch.labels, IGNORE),
        positions=chosen(batch.positions),
        cu_seqlens=torch.tensor([edges, [*parents, -1]], dtype=torch.int32),
        weights=None if batch.weights is None else chosen(batch.weights),
        documents=padded(numbers[None], -1),
        draws=None if batch.draws is None else chosen(batch.draws),
        rollout=replace(rollout.each(chosen), divisor=padded(divisor[None])),
    )


def _divisors(
    segments: Sequence[_Segment], divisor: torch.Tensor, edges: Sequence[int]
) -> torch.Tensor:
    """Return the divisors of the tokens of ``segments``. What stood at a document's tokens stands at the first one that
    it has left.

    ``divisor``: the divisors before, ``[tokens]``; ``edges``: where the documents began, and where the last one ended.
    """
    ends = dict(pairwise(edges))
    parts = list[torch.Tensor]()
    for each in segments:
        part = divisor.new_zeros(each.end - each.first)
        if each.of >= 0:
            part[0] = divisor[each.of : ends[each.of]].sum()
        parts.append(part)
    return torch.cat(parts)


def _segments(batch: Batch) -> list[_Segment]:
    """Return the segments of a batch's single row, with every shared prompt before the answers that follow it; padding
    is left out.
    """
    assert batch.documents is not None
    tokens, documents_of = batch.tokens[0].tolist(), batch.documents[0].tolist()
    learned = (batch.labels[0] != IGNORE).tolist()
    prompts: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for first, end in pairwise(batch.cu_seqlens.tolist()):
        if first == end or documents_of[first] < 0:
            continue
        # a document from which nothing is learned shares nothing
        labelled = learned.index(True, first, end) if any(learned[first:end]) else first
        prompts[tuple(tokens[first:labelled])].append((first, end))
    segments = list[_Segment]()
    for prompt, documents in prompts.items():
        if not prompt or len(documents) == 1:
            segments += [_Segment(first, end, of=first) for first, end in documents]
            continue
        start, _ = documents[0]
        segments.append(_Segment(start, start + len(prompt)))
        parent = len(segments) - 1
        segments += [
            _Segment(first + len(prompt), end, parent, first)
            for first, end in documents
        ]
    return segments
