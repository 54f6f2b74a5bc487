"""Order of the data: a pure function of the seed and the global sample index, so that one number resumes it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from weft.data.batch import IGNORE, Pairs
from weft.data.mix_leg import FixedShares, MixLeg
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.data.batch_rollout import RolloutTokens

#: First keys that keep the uses of :func:`hash_keys` apart.
_SPLIT, _DOCUMENTS, _ROWS, _BLOCK = range(4)


def hash_keys(*keys: int | np.ndarray) -> np.ndarray:
    """Hash ``keys`` to 64 pseudo-random bits per element, as a uint64 array.

    A key is an integer or an array of integers. Keys are broadcast against each other, and the result has the shape of
    the broadcast, ``[1]`` if all keys are integers. The function is SplitMix64 (Steele et al. 2014), applied to each
    key in turn.
    """
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = state ^ (
            np.array([key % 2**64], np.uint64)
            if isinstance(key, int)
            else key.astype(np.uint64)
        )
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def sample_hashes(samples: Sequence[int]) -> np.ndarray:
    """Return 32 pseudo-random bits for each of the sample numbers ``samples``, as an array ``[samples]``.

    The sum of these bits over a set of samples identifies the set almost surely.
    """
    return hash_keys(0, np.asarray(samples, np.uint64)) >> np.uint64(32)


def permutation(count: int, *keys: int) -> np.ndarray:
    """Return a pseudo-random permutation of ``count`` elements that depends only on ``keys``, as int64 ``[count]``.

    ``keys``: integers, such as a seed and the number of an epoch.
    """
    return np.argsort(hash_keys(*keys, np.arange(count)))


def choose_held_out(documents: int, fraction: float, seed: int) -> np.ndarray:
    """Return which of ``documents`` documents are for validation, bool ``[documents]``: about the share ``fraction`` of
    them, chosen at random by ``seed``.

    If there are at least two documents and ``fraction`` is above 0, validation and training both get at least one.
    """
    if documents < 2 or fraction == 0:
        return np.zeros(documents, bool)
    keys = hash_keys(_SPLIT, seed, np.arange(documents))
    chosen = keys < np.uint64(fraction * 2**64)
    chosen[keys.argmin()], chosen[keys.argmax()] = True, False
    return chosen


def pack_documents(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack documents into rows of at most ``capacity`` tokens. No document may be longer than a row.

    ``lengths``: number of tokens of each document, int ``[documents]``. Returns two arrays. The first has the indices
    of the documents, row after row, int64 ``[documents]``. The second has for each row the index in the first array at
    which the row ends, int64 ``[rows]``.

    The method is best fit decreasing: documents are placed from the longest to the shortest, each in the fullest row
    with room for it. The number of rows is at most 11/9 of the minimum, plus 1 (Johnson et al. 1974).
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, sorted
    for document in np.argsort(-lengths, kind="stable").tolist():
        size = int(lengths[document])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        rows[row].append(document)
        if left := room - size:
            if left not in by_room:
                insort(rooms, left)
            by_room.setdefault(left, []).append(row)
    order = np.array([document for row in rows for document in row], np.int64)
    return order, np.cumsum([len(row) for row in rows], dtype=np.int64)


class Row(NamedTuple):
    """One packed row of tokens.

    Attributes:
        ``tokens``: token ids, int64 ``[n]`` with ``n <= seq_len``.
        ``labels``: the id that follows each token in its document, int64 ``[n]``.
        ``starts``: index of each document's first token in the row.
        ``weights``: weight of each label, float32 or float64 ``[n]``; None if all are 1.
        ``pairs``: the pairs that successive documents of the row form; None if they form none.
        ``rollout``: numbers that a policy loss reads, each ``[n]``; None if documents are no sampled answers.
    """

    tokens: np.ndarray
    labels: np.ndarray
    starts: np.ndarray
    weights: np.ndarray | None = None
    pairs: Pairs | None = None
    rollout: RolloutTokens | None = None


@dataclass(frozen=True)
class RowList:
    """Fixed list of rows, which a :class:`Loader` reads in place of an :class:`Order`. Each row is one sample."""

    rows: Sequence[Row]

    @property
    def total(self) -> int:
        """Number of rows in the list, each of which is one sample."""
        return len(self.rows)

    def row(self, sample: int) -> Row:
        """Return row number ``sample`` of the list."""
        return self.rows[sample]

    def row_length(self, sample: int) -> int:
        """Return the number of tokens of row number ``sample``."""
        return len(self.rows[sample].tokens)


class _Epoch(NamedTuple):
    """``ends`` of the documents in the joined stream, and the ``shift`` from there to a stream's ``ids``.

    ``firsts`` and ``lasts``: first tokens and ends of the rows in the order in which they come.
    """

    ends: np.ndarray
    shift: np.ndarray
    firsts: np.ndarray
    lasts: np.ndarray


@dataclass(frozen=True)
class Stream:
    """Documents of one source, packed or cut into rows whose order is shuffled in every epoch.

    Attributes:
        ``ids``: token ids of all documents, ``[tokens]``.
        ``starts``: index of each document's first token in ``ids``, int64 ``[documents]``.
        ``lengths``: number of tokens of each document, int64 ``[documents]``.
        ``seq_len``: largest number of tokens of a row.
        ``seed``: seed of the shuffling.
        ``rows_of``: how documents fill rows. "documents": as many whole documents as fit (none is longer than
            ``seq_len``). "one": one document per row. "tokens": in every epoch the documents are shuffled, joined and
            cut into rows. A document that is cut continues in another row, and the last row of an epoch may be short.
        ``weights``: weight of each token as a label, float32 ``[tokens]``; None if all are 1.
        ``alike``: whether all weights are 0 or 1.
        ``pairs``: the pairs that successive documents form, each of which stays in one row; None if documents form
            none.
    """

    ids: np.ndarray  # [tokens]
    starts: np.ndarray  # int64 [documents], in ids
    lengths: np.ndarray  # int64 [documents]
    seq_len: int
    seed: int
    rows_of: Literal["tokens", "documents", "one"] = "tokens"
    weights: np.ndarray | None = None  # float32 [tokens]
    alike: bool = True
    pairs: Pairs | None = None

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.lengths.sum())

    @property
    def rows(self) -> int:
        """Number of rows per epoch. The very last token of an epoch has no label and needs no row of its own."""
        if self.rows_of != "tokens":
            return len(self._packed[1])
        return max(1, -(-(self.tokens - 1) // self.seq_len))

    @cached_property
    def _packed(self) -> tuple[np.ndarray, np.ndarray]:
        """Documents in the order of their rows, and how many of them there are up to the end of each row."""
        together = 1 if self.pairs is None else 2
        lengths = self.lengths.reshape(-1, together).sum(1)
        order = permutation(len(lengths), _DOCUMENTS, self.seed)
        counts = np.arange(1, 1 + len(order))
        if self.rows_of != "one":
            places, counts = pack_documents(lengths[order], self.seq_len)
            order = order[places]
        return (
            order[:, None] * together + np.arange(together)
        ).ravel(), counts * together

    @cached_property
    def _epoch(self) -> Any:  # the two latest: a step that crosses an epoch needs both
        return lru_cache(maxsize=2)(self._tables)

    def _tables(self, epoch: int) -> _Epoch:
        whole = self.rows_of != "tokens"
        order = (
            self._packed[0]
            if whole
            else permutation(len(self.starts), _DOCUMENTS, self.seed, epoch)
        )
        ends = np.cumsum(self.lengths[order])
        shift = self.starts[order] + self.lengths[order] - ends
        rows = permutation(self.rows, _ROWS, self.seed, epoch)
        edges = (
            np.append(0, ends[self._packed[1] - 1])
            if whole
            else np.arange(self.rows + 1) * self.seq_len
        )
        return _Epoch(
            ends, shift, edges[rows], np.minimum(edges[rows + 1], self.tokens)
        )

    def row_length(self, index: int) -> int:
        """Return the number of tokens of row ``index`` of the stream. Indices count up over all epochs."""
        epoch, index = divmod(index, self.rows)
        _, _, firsts, lasts = self._epoch(epoch)
        return int(lasts[index] - firsts[index])

    def row(self, index: int) -> Row:
        """Return row ``index`` of the stream. Indices count up over all epochs."""
        epoch, index = divmod(index, self.rows)
        ends, shift, firsts, lasts = self._epoch(epoch)
        lo, hi = int(firsts[index]), int(lasts[index])
        first, last = np.searchsorted(ends, (lo, hi - 1), side="right")
        ends = ends[first : last + 1]
        counts = np.diff(np.minimum(ends, hi), prepend=lo)
        at = np.arange(lo, hi) + np.repeat(shift[first : last + 1], counts)
        tokens = self.ids[at].astype(np.int64)
        labels = np.roll(tokens, -1)
        labels[ends[:-1] - lo - 1] = IGNORE
        labels[-1] = IGNORE if ends[-1] == hi else self.ids[at[-1] + 1]
        weights = None
        if self.weights is not None:
            following = np.append(at[1:], at[-1] + (labels[-1] != IGNORE))
            weights = np.where(labels == IGNORE, np.float32(0), self.weights[following])
            labels[weights == 0] = IGNORE
        pairs = (
            None
            if self.pairs is None
            else self.pairs[self._packed[0][first : last + 1 : 2] // 2]
        )
        return Row(
            tokens,
            labels,
            np.append(0, ends[:-1] - lo),
            None if self.alike else weights,
            pairs,
        )


@dataclass(frozen=True)
class Order:
    """Order of the samples of one or several ``streams``, mixed in proportion to ``weights``.

    A sample is a row of a stream. Samples are mixed in blocks of :attr:`block` samples: at the end of every block, each
    stream has given its share of all samples so far, to within one sample.

    ``seed``: seed of the mixing. ``epochs``: the order ends before any stream would begin an epoch beyond this number;
    0: it never ends. ``legs``: parts of the order with mixtures of their own, whose shares may also change
    (:mod:`weft.data.mix_plan`); empty: the whole order is mixed by ``weights``.
    """

    streams: tuple[Stream, ...]
    weights: tuple[float, ...]
    seed: int
    epochs: int = 0
    legs: tuple[MixLeg, ...] = ()

    def __post_init__(self) -> None:
        for leg in self.all_legs if self.streams else ():
            if leg.plan.block > 2**20 and isinstance(leg.plan, FixedShares):
                least = min(leg.plan.weights)
                raise UsageError(
                    f"source weight {least} is below a millionth of all; raise it or drop the source"
                )

    @cached_property
    def all_legs(self) -> tuple[MixLeg, ...]:
        """The parts of the order with one mixture each: ``legs``, or a single leg with fixed ``weights`` if ``legs`` is
        empty.
        """
        plain = MixLeg(0, (0,) * len(self.weights), FixedShares(self.weights))
        return self.legs or (plain,)

    @property
    def block(self) -> int:
        """Number of successive samples of a block, in which every stream has its share.

        Unless the order has legs, it is at least 1,024, and so large that every block has samples of every stream.
        """
        return self.all_legs[-1].plan.block

    @cached_property
    def total(self) -> int | None:
        """Number of samples of the whole order, or None if the order never ends."""
        if not self.epochs:
            return None
        limits = [stream.rows * self.epochs for stream in self.streams]
        leg, number = self.all_legs[-1], len(self.all_legs) - 1

        def over(blocks: int) -> bool:
            drawn = leg.plan.drawn(blocks)
            return any(
                before + count > limit
                for before, count, limit in zip(leg.given, drawn, limits, strict=True)
            )

        if over(0):
            return leg.start
        most = sum(limits) // leg.plan.block + 2
        last = bisect_left(range(most), True, key=over) - 1
        source, index = self.block_samples(number, last)
        ends = int(np.argmax(index >= np.array(limits)[source]))
        return leg.start + last * leg.plan.block + ends

    def leg_at(self, sample: int) -> int:
        """Return the index of the leg that holds global sample number ``sample``."""
        legs = self.all_legs
        return next(i for i in reversed(range(len(legs))) if legs[i].start <= sample)

    @cached_property
    def block_samples(self) -> Any:
        """Cached function from ``(leg, block)`` to the streams and row indices of the samples in a block.

        ``leg``: index of the leg. ``block``: number of the block within the leg.
        """
        return lru_cache(maxsize=2)(self._streams_in_block)

    def _streams_in_block(
        self, number: int, block: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stream and index within the stream of each sample of a block of leg ``number``: int64 ``[block]`` each."""
        leg = self.all_legs[number]
        before, after = leg.plan.drawn(block), leg.plan.drawn(block + 1)
        source = np.repeat(np.arange(len(before)), np.subtract(after, before))
        keys = (self.seed, block, leg.start) if leg.start else (self.seed, block)
        source = source[permutation(leg.plan.block, _BLOCK, *keys)]
        index = np.empty_like(source)
        index[np.argsort(source, kind="stable")] = np.concatenate(
            [*map(np.arange, np.add(leg.given, before), np.add(leg.given, after))]
        )
        return source, index

    def locate(self, sample: int) -> tuple[int, int]:
        """Return ``(stream, index)`` for a global sample: the number of its stream, and the index of its row in the
        stream.

        Streams are numbered in the order of :attr:`streams`.
        """
        if len(self.streams) == 1:  # saves the shuffle
            return 0, sample
        number = self.leg_at(sample)
        leg = self.all_legs[number]
        block, at = divmod(sample - leg.start, leg.plan.block)
        source, index = self.block_samples(number, block)
        return int(source[at]), int(index[at])

    def row(self, sample: int) -> Row:
        """Return the row that is global sample number ``sample``."""
        source, index = self.locate(sample)
        row = self.streams[source].row(index)
        if not self.legs or len(self.streams) == 1:
            return row
        leg = self.legs[self.leg_at(sample)]
        if leg.weighed is None:
            return row
        from weft.data.label_factors import weighed_row

        return weighed_row(row, leg, sample, source)

    def row_length(self, sample: int) -> int:
        """Return the number of tokens in the row that is global sample number ``sample``."""
        source, index = self.locate(sample)
        return self.streams[source].row_length(index)
