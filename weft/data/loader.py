"""Loader: distributes the samples of a step over the ranks, and cuts their rows as the layout cuts sequences."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from weft.cache import digest
from weft.data.batch import IGNORE, Batch, PairedRows, Pairs, Pass, PassGroup, Plan
from weft.data.bos import begins_otherwise, document_opening, with_bos
from weft.data.corpora import unread_files
from weft.data.order import Order, Row, RowList, Stream, choose_held_out, hash_keys
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.data.tokens import Tokens, open_source
from weft.errors import UsageError
from weft.layout.axes import BATCH_AXES, DATA_AXES
from weft.layout.layout import Layout
from weft.layout.sequence import chunk_owners, owned_ranges, padded_length
from weft.recipe import CONVERSATIONS, Data, Source


@dataclass(frozen=True)
class Corpus:
    """The opened data of a run: tokenizer, and order of the training and validation samples.

    Attributes:
        ``tokenizer``: the tokenizer of the data.
        ``train``: the order of the training samples.
        ``validation``: the order of the validation samples; None if nothing is held out.
        ``description``: a text that says how many documents and tokens each source has.
        ``fingerprint``: digest of everything that determines the training samples and their order. Two runs with equal
            digests read the same data from the same position.
        ``notes``: lines to print at the start of the run.
        ``validated``: digest of everything that determines the validation data.
        ``opened``: the sources with their tokens, in the order of the recipe; a separate source of validation comes
            last.
        ``names``: name of the source of each stream in ``train``.
        ``ingredients``: the values from which ``fingerprint`` is computed, without the weights of the sources.
    """

    tokenizer: Tokenizer
    train: Order
    validation: Order | None
    description: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    validated: str = ""
    opened: tuple[tuple[Source, Tokens], ...] = ()
    names: tuple[str, ...] = ()
    ingredients: tuple[Any, ...] = ()

    def fingerprint_with(self, weights: Sequence[float]) -> str:
        """Return the fingerprint that the same documents have with other ``weights`` of the sources."""
        seen, *others = self.ingredients
        if len(weights) != len(seen):
            return ""
        weighed = [
            (documents, weight, *how)
            for (documents, *how), weight in zip(seen, weights, strict=True)
        ]
        return digest(weighed, *others)


def tokenizer_of_data(data: Data, own: Tokenizer | None = None) -> Tokenizer:
    """Load the tokenizer that ``data`` names, and apply ``data.bos``.

    ``own``: the model's tokenizer, used if ``data`` names none.
    """
    tokenizer = (
        own
        if own and not data.tokenizer
        else load_tokenizer(data.tokenizer, data.sources, data.cache)
    )
    return with_bos(tokenizer, data.bos)


def open_data(data: Data, own: Tokenizer | None = None) -> Corpus:
    """Open every source of ``data``, the recipe's section ``[data]``, and tokenize the sources that are not in the
    cache.

    ``own``: tokenizer of the model that the run starts from, used if the recipe names none. The ``validation`` of the
    result is one epoch of the held-out documents. If the recipe names a validation file, its documents are used
    instead.
    """
    tokenizer = tokenizer_of_data(data, own)
    opening = document_opening(tokenizer, data.bos)
    sides: list[list[tuple[Stream, float]]] = [[], []]
    lines, notes, paired = [], list[str](), 0
    seen, weights, names = list[Any](), list[float](), list[str]()
    apart = None
    if isinstance(data.validation, str):
        from weft.data.validation_file import validation_source

        apart = validation_source(data)
    opened = list[tuple[Source, Tokens]]()
    for number, source in enumerate([*data.sources, *([apart] if apart else [])]):
        if source.kind in CONVERSATIONS:
            from weft.data.chat.source import open_chats

            tokens = open_chats(source, data.chat, tokenizer, data.cache)
        else:
            tokens = open_source(source, tokenizer, data.cache, opening)
        opened.append((source, tokens))
        notes += [
            f"data source {source.shown}: {note}"
            for note in (*unread_files(source), *tokens.notes)
        ]
        if source.kind == "tokens" and begins_otherwise(
            tokens.ids, tokens.offsets[:-1], opening
        ):
            notes.append(
                f"data source {source.shown}: not all documents begin with {tokenizer.name_of(opening[0])}, as prompts "
                "do; make the tokens with it, or set data.bos = false"
            )
        starts, lengths, note = tokens.offsets[:-1], np.diff(tokens.offsets), ""
        records = np.arange(len(starts))
        how: dict[str, Any] = {}
        pairs = None
        if tokens.weights is not None:
            from weft.data.chat.source import fit_conversations

            starts, lengths, note, pairs, records = fit_conversations(
                tokens, data.seq_len, data.chat.truncation
            )
            packing = "documents" if data.chat.pack else "one"
            how = {"rows_of": packing, "weights": tokens.weights, "alike": tokens.alike}
        seed = int(hash_keys(data.seed, number)[0])
        together = 1 if pairs is None else 2
        # What comes from one record is on one side.
        out = choose_held_out(int(records[-1]) + 1, data.held_out, seed)[records]
        out = np.ones(len(out), bool) if source is apart else out
        for side, chosen in enumerate((~out, out)):
            if chosen.any():
                which = chosen.repeat(together)
                chosen_pairs = pairs and pairs[chosen].numbered(paired)
                paired += len(chosen_pairs or ())
                at = starts[which], lengths[which]
                stream = Stream(
                    tokens.ids, *at, data.seq_len, seed, **how, pairs=chosen_pairs
                )
                sides[side].append((stream, source.weight))
        named = (
            "pairs" if pairs is not None else "conversations" if how else "documents"
        )
        size = f"{len(out):,} {named} ({out.sum():,} for validation), {lengths.sum():,} tokens"
        lines.append(f"{source.shown}: {size}{note and f', {note}'}")
        if source is not apart:  # what is trained on does not depend on it
            packed = [data.chat.truncation, how["rows_of"]] if how else []
            seen.append((tokens.fingerprint, *packed))
            weights.append(source.weight)
            if (~out).any():
                names.append(source.title)
    train, validation = (
        Order(tuple(s for s, _ in side), tuple(w for _, w in side), data.seed, epochs)
        if side
        else None
        for side, epochs in zip(sides, (data.epochs, 1), strict=True)
    )
    assert train is not None
    ingredients = (
        tuple(seen),
        tokenizer.fingerprint,
        data.seq_len,
        data.seed,
        data.held_out,
    )
    how_read = (
        tokens.fingerprint,
        tokenizer.fingerprint,
        data.seq_len,
        data.seed,
        data.chat.truncation,
        data.chat.pack,
    )
    corpus = Corpus(
        tokenizer,
        train,
        validation,
        "; ".join(lines),
        "",
        tuple(notes),
        opened=tuple(opened),
        names=tuple(names),
        ingredients=ingredients,
    )
    identity = corpus.fingerprint_with(weights)
    validated = digest(how_read) if apart else identity
    return replace(corpus, fingerprint=identity, validated=validated)


def shares_of(batch: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return how many of ``batch`` samples each rank gets, so that the rank that ends last ends as early as possible.

    ``speeds``: samples that each rank computes in a unit of time, in any unit that the ranks share.
    """
    shares = [0] * len(speeds)
    for _ in range(batch):
        first = min(
            range(len(speeds)),
            key=lambda rank: ((shares[rank] + 1) / speeds[rank], rank),
        )
        shares[first] += 1
    return tuple(shares)


@dataclass(frozen=True)
class Loader:
    """Makes the batches of one rank, step by step.

    The samples of a step are distributed over *places*. A place is a position along the axes whose ranks get different
    samples (:data:`weft.layout.axes.BATCH_AXES`); all ranks at the same place share its samples.

    Attributes:
        ``order``: the order of all samples.
        ``layout``: the layout of the run.
        ``batch_rank``: index of this rank's place.
        ``cp_rank``: the coordinate of this rank along ``cp``.
        ``batch``: number of samples of a step over all ranks.
        ``rows``: number of rows of this rank in a pass.
        ``passes``: number of passes in a step.
        ``seq_len``: number of tokens of a row.
        ``plan``: function that distributes a step's documents among ranks in a balanced step
            (:mod:`weft.parallel.document_balance`). It gets the documents' lengths, and the largest number of tokens
            that a rank may have in a pass. None if all ranks make ``passes`` passes of ``rows`` rows.
        ``ends``: whether only the last token of each document has a label. A reward model needs this, because its score
            is read there.
        ``joined``: whether each rank joins its rows of a pass into one row. Joined rows are padded to the longest of
            any rank; otherwise every row is padded to ``seq_len``.
        ``more``: indices of further places whose batches this rank computes after its own.
        ``speeds``: relative speeds of the places; slower places get fewer samples. If empty, all places get equally
            many.
        ``draws``: seed of the tokens' random numbers for dropout, None without dropout.
    """

    order: Order | RowList
    layout: Layout
    batch_rank: int  # place of this rank
    cp_rank: int
    batch: int  # global sequences per step
    rows: int  # of this rank, per pass
    passes: int
    seq_len: int
    plan: Callable[[np.ndarray, int], Plan] | None = None
    ends: bool = False
    joined: bool = False
    more: tuple[int, ...] = ()
    speeds: tuple[float, ...] = ()
    draws: int | None = None

    @cached_property
    def shares(self) -> tuple[int, ...]:
        """Number of samples that each place gets in a step with a full batch.

        A place is a rank, or a group of ranks, with samples of its own.
        """
        ranks = self.layout.size(*BATCH_AXES)
        return (
            shares_of(self.batch, self.speeds)
            if self.speeds
            else (-(-self.batch // ranks),) * ranks
        )

    def sample_ranges(self, position: int) -> list[range]:
        """Return the range of sample numbers that each place gets in one step, as a list with one range for each place.

        ``position``: number of the first sample of the step. A place is a rank, or a group of ranks that share samples.
        The samples are divided equally among the layout's islands (groups of ranks that synchronise rarely) first, then
        among the places of each island. So the samples of an island do not depend on how many places it has.
        """
        end = min(position + self.batch, self.order.total or sys.maxsize)
        islands = self.layout.island
        share, ranks = -(-self.batch // islands), len(self.shares) // islands
        places: list[range] = []
        for i in range(islands):
            first, last = (min(position + share * n, end) for n in (i, i + 1))
            bounds = accumulate(self.shares[ranks * i : ranks * (i + 1)], initial=first)
            places += [
                range(a, b) for a, b in pairwise(min(bound, last) for bound in bounds)
            ]
        return places

    def island_samples(self, position: int) -> range:
        """Return the range of sample numbers of this rank's island, for the step that starts at sample ``position``."""
        ranks = len(self.shares) // self.layout.island
        first = self.batch_rank // ranks * ranks
        own = self.sample_ranges(position)[first : first + ranks]
        return range(own[0].start, own[-1].stop)

    @property
    def over(self) -> str:
        """Why samples have ended early: always an empty text, because the samples of all steps are known."""
        return ""

    def is_ready(self, position: int) -> bool:
        """Return True: the samples of every step, whatever its first sample ``position``, exist from the beginning."""
        return True

    def make_ready(self, position: int) -> bool:
        """Return True without doing anything, because the samples of every step exist from the beginning."""
        return True

    def questions(self) -> dict[str, Any]:
        """Return held-out questions to evaluate the model on, by task: an empty dict, because this loader has none."""
        return {}

    def step(self, position: int) -> list[Batch] | None:
        """Return the batches of this rank, one per pass, of the step that starts at sample ``position``.

        Returns None if ``position`` is past the end of the data. A rank without further samples gets rows of padding.
        """
        total = self.order.total
        if total is not None and position >= total:
            return None
        end = min(position + self.batch, total or sys.maxsize)
        if self.plan is not None and self.layout.size(*DATA_AXES) > 1:
            if self.of_rollouts:
                raise UsageError(
                    "layout.balance places documents one by one; leave it out with a policy loss"
                )
            return self._balanced(self.plan, range(position, end))
        ranges = self.sample_ranges(position)
        # Slow ranks compute no padding: a pass has as many rows as samples, but at least one.
        bounds = [
            [
                share * p // self.passes if self.speeds else self.rows * p
                for share in self.shares
            ]
            for p in range(self.passes + 1)
        ]
        return [
            self._assemble(
                [r[a:b] for r, a, b in zip(ranges, begins, ends, strict=True)],
                place,
                max(1, ends[place] - begins[place]),
            )
            for place in (self.batch_rank, *self.more)
            for begins, ends in pairwise(bounds)
        ]

    def _assemble(self, ranges: list[range], place: int, count: int) -> Batch:
        """Return the batch of one ``place`` in a pass, of ``count`` rows. ``ranges``: sample numbers of every place."""
        numbered = {sample: self._row(sample) for sample in ranges[place]}
        rows = list(numbered.values())
        longest = self.seq_len
        lines = [[row] for row in rows] + [[] for _ in range(count - len(rows))]
        if self.joined:
            longest = max(
                1, *(sum(map(self.order.row_length, samples)) for samples in ranges)
            )
            lines = [rows]
        length = padded_length(longest, self.layout)
        tokens = np.zeros((len(lines), length), np.int64)
        labels = np.full_like(tokens, IGNORE)
        kinds = [row.weights.dtype for row in rows if row.weights is not None]
        weights = np.ones(tokens.shape, np.result_type(np.float32, *kinds))
        starts, padding = [], []
        draws, samples = np.zeros_like(tokens), iter(numbered)
        rollout = None
        if self.of_rollouts:
            from weft.data.batch_rollout import blank_numbers

            rollout = blank_numbers(*tokens.shape)
        for r, line in enumerate(lines):
            filled = 0
            for row in line:
                here = slice(filled, filled + len(row.tokens))
                draws[r, here] = self._drawn(next(samples), row)
                tokens[r, here], labels[r, here] = row.tokens, row.labels
                if row.weights is not None:
                    weights[r, here] = row.weights
                if rollout is not None and row.rollout is not None:
                    rollout.write(row.rollout, r, here)
                starts.append(r * length + filled + row.starts)
                filled = here.stop
            # the padding is a segment of its own: no document attends to it
            if filled < length:
                starts.append(np.array([r * length + filled]))
                padding.append(r * length + filled)
        paired = None
        if self.of_pairs:
            pairs = [row.pairs for row in rows if row.pairs is not None]
            together = Pairs.joined(pairs or [Pairs.listed(np.zeros(0), np.zeros(0))])
            segments = np.flatnonzero(~np.isin(np.concatenate(starts), padding))
            paired = PairedRows(together, segments, counted=self.cp_rank == 0)
        columns = np.concatenate(
            [
                np.arange(*owned)
                for owned in owned_ranges(length, self.layout, self.cp_rank)
            ]
        )
        batch = self._cut(
            tokens,
            labels,
            weights if any(row.weights is not None for row in rows) else None,
            draws,
            np.concatenate(starts),
            padding,
            columns,
        )
        return replace(
            batch,
            paired=paired,
            samples=() if self.cp_rank else tuple(ranges[place]),
            rollout=rollout and rollout.each(lambda x: x[:, columns]),
        )

    def _cut(
        self,
        tokens: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray | None,
        draws: np.ndarray,
        starts: np.ndarray,
        padding: Sequence[int],
        columns: np.ndarray,
    ) -> Batch:
        """Return this rank's ``columns`` of rows ``[rows, seq]`` as a batch.

        ``starts``: first positions of all segments in the flattened rows; ``padding``: those of segments of padding.
        """
        edges = np.append(starts, tokens.size)
        positions = np.arange(tokens.size) - np.repeat(starts, np.diff(edges))
        numbers = np.where(np.isin(starts, padding), -1, np.arange(len(starts)))
        documents = np.repeat(numbers, np.diff(edges))

        def own(whole: np.ndarray) -> torch.Tensor:  # [rows, seq] -> [rows, seq/cp]
            return torch.from_numpy(whole.reshape(tokens.shape).take(columns, axis=1))

        return Batch(
            own(tokens),
            own(labels),
            own(positions),
            torch.from_numpy(edges.astype(np.int32)),
            weights=None if weights is None else own(weights),
            documents=own(documents),
            draws=None if self.draws is None else own(draws),
        )

    @property
    def of_pairs(self) -> bool:
        """Whether the samples are pairs of answers, which a loss of pairs compares."""
        return isinstance(self.order, Order) and self.order.streams[0].pairs is not None

    @property
    def of_rollouts(self) -> bool:
        """Whether the samples are rows of sampled answers with the numbers that a policy loss reads."""
        rows = self.order.rows if isinstance(self.order, RowList) else ()
        return bool(len(rows)) and rows[0].rollout is not None

    def _drawn(self, sample: int, row: Row) -> np.ndarray:
        """Return random numbers for a sample's tokens, zeros without dropout."""
        count = len(row.tokens)
        if self.draws is None:
            return np.zeros(count, np.int64)
        from weft.models.dropout import token_draws

        return token_draws(self.draws, sample, count).numpy()

    def _row(self, sample: int) -> Row:
        row = self.order.row(sample)
        if not self.ends or row.rollout is not None:
            return row
        labels, last = (
            np.full_like(row.labels, IGNORE),
            np.append(row.starts[1:], len(row.tokens)) - 1,
        )
        labels[last] = row.tokens[last]
        return row._replace(labels=labels, weights=None)

    def _balanced(
        self, planned: Callable[[np.ndarray, int], Plan], samples: range
    ) -> list[Batch]:
        """Return this rank's passes of a balanced step, in which the plan gives each document to some ranks.

        All ranks make the same plan. A pass of a rank has at most as many tokens as without balance.
        """
        rows = [self.order.row(sample) for sample in samples]
        sizes = np.cumsum([0, *(len(row.tokens) for row in rows)])
        edges = np.append(
            np.concatenate(
                [at + row.starts for at, row in zip(sizes, rows, strict=False)]
            ),
            sizes[-1],
        )
        weights = [
            np.ones(len(r.tokens), np.float32) if r.weights is None else r.weights
            for r in rows
        ]
        together = Row(
            np.concatenate([row.tokens for row in rows]),
            np.concatenate([row.labels for row in rows]),
            edges,
            np.concatenate(weights)
            if any(row.weights is not None for row in rows)
            else None,
        )
        tp = self.layout.tp
        capacity = -(-self.rows * self.seq_len // (self.layout.cp * tp)) * tp
        plan = planned(np.diff(edges), capacity)
        number = zlib.crc32(repr(plan).encode())
        own_rows = plan[self.batch_rank * self.layout.cp + self.cp_rank]
        # documents: their sample
        firsts = dict(
            zip(np.searchsorted(edges, sizes[:-1]).tolist(), samples, strict=True)
        )
        drawn = np.concatenate(
            [
                self._drawn(sample, row)
                for sample, row in zip(samples, rows, strict=True)
            ]
        )
        return [
            self._batch_of_pass(p, number, together, firsts, drawn) for p in own_rows
        ]

    def _batch_of_pass(
        self, p: Pass, plan: int, step: Row, firsts: dict[int, int], drawn: np.ndarray
    ) -> Batch:
        """Return this rank's blocks of a pass: its documents, joined, and padded to equal blocks on all ranks.

        ``step``: all tokens of the step; its ``starts`` have the end of the last document as well. ``firsts``: the
        documents that stand for their samples, whose first ones they are. ``drawn``: random numbers of all tokens.
        """
        edges = step.starts
        at = np.concatenate(
            [
                np.empty(0, int),
                *(np.arange(edges[d], edges[d + 1]) for d in p.documents),
            ]
        )
        ranks, tp = len(p.peers), self.layout.tp
        each = -(-max(1, len(at)) // (ranks * tp)) * tp
        size = len(at)
        tokens = np.zeros((1, ranks * each), np.int64)
        labels, draws = np.full_like(tokens, IGNORE), np.zeros_like(tokens)
        tokens[0, :size], labels[0, :size] = step.tokens[at], step.labels[at]
        draws[0, :size] = drawn[at]
        weights = None
        if step.weights is not None:
            weights = np.zeros(tokens.shape, step.weights.dtype)
            weights[0, :size] = step.weights[at]
        starts = np.cumsum([0, *(edges[d + 1] - edges[d] for d in p.documents)])
        owners = chunk_owners(Layout(cp=ranks, context=self.layout.context))
        blocks = {
            b: each * (i + 1) // len(own) - each * i // len(own)
            for own in owners
            for i, b in enumerate(own)
        }
        lengths = tuple(blocks[b] for b in range(len(blocks)))
        index = p.peers.index(self.batch_rank * self.layout.cp + self.cp_rank)
        ends = np.cumsum(lengths)
        columns = np.concatenate(
            [np.arange(ends[b] - lengths[b], ends[b]) for b in owners[index]]
        )
        batch = self._cut(
            tokens,
            labels,
            weights,
            draws,
            starts[starts < tokens.size],
            [size],
            columns,
        )
        samples = tuple(firsts[d] for d in p.documents if d in firsts and not index)
        group = PassGroup(plan, p.peers, index, lengths)
        return replace(batch, group=group, samples=samples)
