"""Decode steps whose tokens stay on the rank of their experts (ExFlow, Yao et al. 2024, 2401.08383).

With tokens that return home, a layer has two exchanges: tokens go to their experts, and results come back. Here every
rank caches the keys and values of all tokens, so that a token's next layer can run wherever its experts are: the second
exchange is left out. If a token's experts are on several ranks, one of these is its next place, and only the others
send their results there. After the last layer the ranks exchange the keys and values that they have computed, of all
layers at once, and the first rank gets the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.models.experts import Mixture
from weft.models.paged import KeyValuePages, Pages, Reading, attending, slots
from weft.models.rope import angles
from weft.models.router import Choice
from weft.models.spans import Span
from weft.models.transformer import Block, Transformer
from weft.parallel.experts.dispatch import Placing, local_experts
from weft.parallel.experts.expert_ranks import ExpertRanks
from weft.parallel.experts.packets import join_rows, split_rows
from weft.parallel.experts.rows import start_exchange
from weft.techniques.dispatch.stay.context import HeldTokens, share_context

T = torch.Tensor


class ExpertRows(NamedTuple):
    """Tokens with experts on this rank, in one layer. ``x``: the residual stream, ``[rows, embed]``. ``weights``,
    ``slots``: factors and numbers of all of a token's experts, ``[rows, k]``. ``target``: the rank on which the token's
    next layer is computed, ``[rows, 1]``. ``own``: number of the token in the step, ``[rows, 1]``.
    """

    x: T
    weights: T
    slots: T
    target: T
    own: T


class StayingTokens:
    """Computes decode steps of ``model``, a part on every rank, with one exchange of whole tokens per layer.

    ``pages``: the cache of each layer, which has all tokens on every rank.

    The attribute ``travelled`` counts rows that all ranks together have sent each other in decode steps: ``moved``
    (tokens, to ranks with some of their experts), ``results`` (sums of a token's results, to the rank of its next
    layer) and ``contexts`` (a token's keys and values of all layers). ``tokens`` and ``layers`` are the numbers of
    tokens, and of their layers with experts.
    """

    def __init__(self, model: Transformer, pages: Sequence[Pages]) -> None:
        self.model, self.size = model, pages[0].size
        self.pages = [each for each in pages if isinstance(each, KeyValuePages)]
        # other layers are refused before ranks start
        assert len(self.pages) == len(pages)
        mixture = next(m for m in model.modules() if isinstance(m, Mixture))
        self.members = ranks_of(mixture)
        self.rank, self.ranks = self.members.rank, self.members.count
        self.travelled: Counter[str] = Counter()
        self.first = min(model.shape.mixtures)
        # of each token id, the rank of its experts in the first such layer when it was last seen
        self.begins: dict[int, int] = {}

    def takes(self, spans: Sequence[Span]) -> bool:
        """Return whether this class can compute the step: every text of ``spans`` computes exactly one token, and no
        text attends to another one.
        """
        writers: dict[int, int] = {}
        for number, span in enumerate(spans):
            if span.last - span.first != 1 or span.context or span.table[0] < 0:
                return False
            writers[span.table[span.past // self.size]] = number
        return len(writers) == len(spans) and not any(
            writers.get(block, number) != number
            for number, span in enumerate(spans)
            for block in span.table
        )

    def run(self, row: T, spans: Sequence[Span]) -> T:
        """Compute the layers of a step, and cache its keys and values on all ranks. All ranks must call it.

        ``row``: ids and positions, int64 ``[2, tokens]``; ``spans``: the text of each token. Returns on the first rank
        the last block's output for all tokens, ``[1, tokens, embed]``, and on others no rows.
        """
        places = torch.tensor(slots(spans, self.size), device=row.device)
        held = self._begin(row)
        rope = angles(row[1:], self.model.freq, held.x.dtype)
        path = [held]
        with attending(self.model, self.pages):
            layers = self.model.blocks.values()
            for block, pages in zip(layers, self.pages, strict=True):
                assert isinstance(block, Block)
                pages.reading = reading_of(spans, places, held.own)
                held = self._layer(block, held, tuple(x[:, :, held.own] for x in rope))
                path.append(held)
        blocks = 1 + max(max(span.table) for span in spans)
        step = share_context(self.members, self.pages, path, places, blocks)
        first = step.owners[1 + self.first].tolist()
        self.begins.update(zip(row[0].tolist(), first, strict=True))
        count = len(spans)
        self.travelled["tokens"] += count
        self.travelled["layers"] += count * len(self.model.shape.mixtures)
        self.travelled["contexts"] += count * (self.ranks - 1)
        return step.x

    def summary(self) -> str:
        """Return a line for the user that says how many rows have travelled between the ranks per token and layer; ""
        before the first decode step.
        """
        sent, layers = self.travelled, self.travelled["layers"]
        if not layers:
            return ""
        rows = sent["moved"] + sent["results"]
        return (
            f"of {sent['tokens']:,} tokens that were written, {rows / layers:.2f} rows per layer went to another rank; "
            f"with their keys and values, once per token, {(rows + sent['contexts']) / layers:.2f}"
        )

    def _begin(self, row: T) -> HeldTokens:
        """Divide the tokens of a step among the ranks: where they went in the first layer before, else in turn."""
        ids = enumerate(row[0].tolist())
        start = torch.tensor([self.begins.get(i, at % self.ranks) for at, i in ids])
        own = (start == self.rank).nonzero()[:, 0].to(row.device)
        counts = start.bincount(minlength=self.ranks).tolist()
        return HeldTokens(self.model.embedding(row[:1, own]), own, counts)

    def _layer(self, block: Block, held: HeldTokens, rope: tuple[T, ...]) -> HeldTokens:
        """Compute a block for the tokens that are here, and return those that are here after it."""
        ends = torch.tensor([0, len(held.own)], dtype=torch.int32)
        x, early = block.after_attention(held.x, rope, ends, None)
        normed = block.ffn_norm(x)
        if not isinstance(block.ffn, Mixture):
            return held._replace(x=block.added(x, block.ffn(normed, None, early)))
        members, choice = ranks_of(block.ffn), early.choice if early else None
        choice = members.placed(choice or block.ffn.router(normed[0], None))
        wanted = members.wanted(choice.ids)  # [tokens, ranks]
        target = self._targets(members, choice, wanted)
        staying = target.bincount(minlength=self.ranks)
        # of the tokens on each rank (row), how many have experts on each, and how many stay there
        counts = members.counts_from_all(torch.cat((wanted.sum(0), staying)))
        asked, stays = counts.split(self.ranks, 1)
        moves = asked - asked.diag().diag()
        self.travelled["moved"] += int(moves.sum())
        self.travelled["results"] += int(asked.sum() - stays.sum())
        # by rank, and of each rank in ascending order
        ranks, going = wanted.T.nonzero().unbind(1)
        kept, going = going[ranks == self.rank], going[ranks != self.rank]
        rows = ExpertRows(x[0], *choice, target[:, None], held.own[:, None])
        arrived = self._exchanged(
            join_rows(*(each[going] for each in rows)),
            moves[self.rank].tolist(),
            moves[:, self.rank].tolist(),
        )
        pairs = zip(rows, split_rows(arrived, rows), strict=True)
        here = ExpertRows(*(torch.cat((each[kept], new)) for each, new in pairs))
        return self._settle(block, members, here, stays.sum(0).tolist())

    def _targets(self, members: ExpertRanks, choice: Choice, wanted: T) -> T:
        """Return the rank on which each token's next layer is computed: this one if it has an expert of the token.

        Otherwise it is the rank of whose experts the weights are largest.
        """
        mass = choice.weights.new_zeros(len(wanted), self.ranks + 1)
        mass = mass.scatter_add(1, members.owner[choice.ids], choice.weights.abs())
        # a weight may be zero
        best = torch.where(wanted > 0, mass[:, : self.ranks], -1.0).argmax(1)
        return torch.where(wanted[:, self.rank] > 0, self.rank, best)

    def _settle(
        self, block: Block, members: ExpertRanks, rows: ExpertRows, counts: list[int]
    ) -> HeldTokens:
        """Run this rank's experts on ``rows``, send results to where tokens stay, and finish the tokens that stay here.

        ``counts``: number of tokens that stay on each rank.
        """
        ffn, normed = block.ffn, block.ffn_norm(rows.x)
        way = local_experts(members)
        dispatched = way.dispatch(normed, Choice(rows.weights, rows.slots))()
        results = ffn.experts(dispatched.rows, dispatched.counts)
        sums = way.combine(results, dispatched.meta)()  # [rows, embed]
        here = (rows.target[:, 0] == self.rank).nonzero()[:, 0]
        here = here[rows.own[here, 0].argsort()]
        own, routed = rows.own[here, 0], sums[here]
        if rows.slots.shape[1] > 1:
            due = members.wanted(rows.slots[here]).sum(0)
            due[self.rank] = 0
            numbers, more = self._results(rows, sums, due.tolist())
            routed = routed.index_add(0, torch.searchsorted(own, numbers), more)
        normed = normed[here][None]
        shared = None if ffn.shared is None else ffn.shared.share(normed)
        y = ffn.mixed(normed, routed[None], shared)
        return HeldTokens(block.added(rows.x[here][None], y), own, counts)

    def _results(self, rows: ExpertRows, sums: T, due: list[int]) -> tuple[T, T]:
        """Send the ``sums`` of results to where their tokens stay. Return the numbers of tokens and their sums that
        arrive.

        ``due``: number of sums that each rank sends here.
        """
        target = rows.target[:, 0]
        away = (target != self.rank).nonzero()[:, 0]
        away = away[target[away].argsort(stable=True)]
        sent = target[away].bincount(minlength=self.ranks).tolist()
        given = rows.own, sums
        arrived = self._exchanged(join_rows(*(each[away] for each in given)), sent, due)
        numbers, more = split_rows(arrived, given)
        return numbers[:, 0], more

    def _exchanged(self, rows: T, sent: list[int], received: list[int]) -> T:
        arrived, work = start_exchange(rows, sent, received, self.members, "tokens")
        work.wait()
        return arrived


def reading_of(spans: Sequence[Span], places: T, own: T) -> Reading:
    """Return the reading of the tokens ``own`` of a step by a layer's cache. ``spans``: the text of each token of the
    step. ``places``: their places in the cache.
    """
    numbers = enumerate(own.tolist())
    rows = [spans[i]._replace(first=at, last=at + 1) for at, i in numbers]
    return Reading(rows, places[own])


def ranks_of(mixture: Mixture) -> ExpertRanks:
    """Return the ranks among which the experts of ``mixture`` are divided."""
    assert isinstance(mixture.dispatcher, Placing)
    return mixture.dispatcher.ranks
