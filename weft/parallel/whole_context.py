"""Cache pages that hold all tokens on every rank, where ranks share the new tokens of a step.

Each rank computes a run of the step's tokens, and sends their keys and values to all others in each layer, before it
attends. Every rank then has the context of every text, so that the text's next token can be computed on any of them.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from weft.layout.dims import part
from weft.models.paged import Pages, slots
from weft.models.spans import Span
from weft.parallel.units import exchanged_rows

T = torch.Tensor


class TokenRuns:
    """Division of a step's new tokens among ranks: each rank computes a contiguous range of nearly equal length.

    Attributes:
        ``spans``: for each text, the range of its new tokens that this rank computes; the ranges count from 0 at this
            rank's first token.
        ``own``: indices of this rank's tokens among all new tokens of the step, ``[count]``.
        ``first``, ``count``: the smallest of these indices, and their number.
        ``owner``: rank that computes each new token of the step, ``[tokens]``.
        ``place``: index of each new token of the step: 0, 1, ..., ``[tokens]``.
        ``slots``: position in the cache of each of this rank's tokens, ``[count]``.
        ``every``: position in the cache of each new token of the step, ``[tokens]``.
        ``blocks``: number of blocks that the cache must have.
    """

    def __init__(
        self, spans: Sequence[Span], size: int, group: dist.ProcessGroup
    ) -> None:
        """Divide the new tokens of ``spans`` among the ranks of ``group``. ``size``: tokens of a cache block."""
        self.group, rank = group, group.rank()
        total = spans[-1].last if spans else 0
        runs = [part(total, group.size(), each) for each in range(group.size())]
        self.counts = [last - first for first, last in runs]
        self.first, last = runs[rank]
        self.count = last - self.first
        self.place = torch.arange(total)
        self.own = self.place[self.first : last]
        self.owner = torch.arange(len(runs)).repeat_interleave(
            torch.tensor(self.counts)
        )
        self.spans = [
            span._replace(
                first=begin - self.first,
                last=end - self.first,
                past=span.past + begin - span.first,
            )
            for span in spans
            if (begin := max(span.first, self.first))
            < (end := min(span.last, last))
        ]  # fmt: skip
        self.slots = slots(self.spans, size)
        self.every = torch.tensor(slots(spans, size), dtype=torch.int64)
        self.blocks = 1 + max((max(span.table) for span in spans), default=-1)


def share_new_tokens(pages: Sequence[Pages], runs: TokenRuns | None) -> None:
    """Make each layer's cache collect the new tokens of all ranks before attention reads it.

    ``pages``: the caches of the layers. ``runs``: which rank computes which token; None: each cache gets this rank's
    tokens only.
    """
    for each in pages:
        each.written = None if runs is None else partial(_share, each, runs)


def _share(pages: Pages, runs: TokenRuns) -> None:
    """Write the new tokens of all ranks, in the order of the step, to the cache ``pages`` of a layer. Collective."""
    store = pages.room(runs.blocks).flatten(1, 2)  # [parts, tokens, heads, width]
    every = runs.every.to(store.device)
    own = store[:, every[runs.first : runs.first + runs.count]].transpose(0, 1)
    copies = own.repeat(runs.group.size(), *[1] * (own.dim() - 1))
    sent = [runs.count] * runs.group.size()
    arrived, work = exchanged_rows(copies, sent, runs.counts, runs.group)
    work.wait()
    store[:, every] = arrived.transpose(0, 1)
