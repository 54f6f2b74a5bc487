"""Batch: the tokens of one rank in one pass, with labels, positions and document boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch

if TYPE_CHECKING:
    from weft.data.batch_rollout import RolloutTokens

#: Label of a token that has nothing to predict (last token of a document, padding).
IGNORE = -100


class Pass(NamedTuple):
    """One forward and backward pass of a balanced step: which data ranks compute it together, and which documents it
    has.

    A balanced step spreads documents over data ranks by the time that they take
    (:mod:`weft.parallel.document_balance`). ``peers``: numbers of the data ranks that compute the pass; the joined
    tokens of its documents are cut into parts, one for each of these ranks. ``documents``: the documents' numbers
    within the step.
    """

    peers: tuple[int, ...]
    documents: tuple[int, ...]


#: The passes of every data rank in a balanced step, in one order that all ranks share, so that no two ranks can wait
#: for each other. Each rank ends with a pass of its own, in which gradients are reduced over all ranks.
Plan = tuple[tuple[Pass, ...], ...]


@dataclass(frozen=True)
class PassGroup:
    """Data ranks that share a pass of a balanced step (:mod:`weft.parallel.document_balance`).

    The tokens of the pass are cut into blocks. An attention table says for every pair of blocks which rank computes the
    attention between them.

    Attributes:
        ``plan``: checksum of the division of the step's documents among ranks. Ranks compare it, to be sure that all
            have computed the same division.
        ``peers``: global numbers of the ranks, in the order in which the attention table numbers them.
        ``index``: position of this rank among ``peers``.
        ``lengths``: number of tokens of each block.
    """

    plan: int
    peers: tuple[int, ...]
    index: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Pairs:
    """Pairs of documents that a loss compares, as arrays with one entry for each pair.

    The documents of a pair are neighbours, and the first of the two is the preferred answer.

    Attributes:
        ``number``: index of the pair among all pairs of the run, int64 ``[pairs]``.
        ``weight``: weight of the pair's loss, float64 ``[pairs]``.
        ``margin``: by how much the first answer's score should exceed the second's, float64 ``[pairs]``.
        ``reference``: log-probabilities of both answers under the reference model, ``[pairs, 2]``; zeros without a
            reference model.
    """

    number: np.ndarray
    weight: np.ndarray
    margin: np.ndarray
    reference: np.ndarray

    def __len__(self) -> int:
        return len(self.number)

    def __getitem__(self, chosen: np.ndarray) -> Self:
        return type(self)(*(column[chosen] for column in vars(self).values()))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the pairs of all ``parts``, joined in their order."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    @classmethod
    def listed(cls, weight: np.ndarray, margin: np.ndarray) -> Self:
        """Build pairs from ``weight`` and ``margin`` ``[pairs]``, numbered from 0, with zeros as ``reference``."""
        return cls(np.arange(len(weight)), weight, margin, np.zeros((len(weight), 2)))

    def numbered(self, first: int) -> Self:
        """Return the same pairs with ``number`` counting up from the integer ``first``."""
        return replace(self, number=first + np.arange(len(self)))


@dataclass(frozen=True)
class PairedRows:
    """Pairs of documents that are in the rows of a batch.

    ``pairs``: the numbers, weights and margins of the pairs. ``segments``: for each document of the pairs, its index
    among the documents that the batch's ``cu_seqlens`` delimits, int64 ``[2 * pairs]``. ``counted``: whether this rank
    counts the pairs in sums over ranks. Several ranks may hold parts of the same rows, and only one of them counts the
    pairs.
    """

    pairs: Pairs
    segments: np.ndarray
    counted: bool


@dataclass(frozen=True)
class Batch:
    """Batch of rows of packed documents, of which this rank holds its part along ``cp`` (:mod:`weft.layout.sequence`).

    Attributes:
        ``tokens``: token ids, int64 ``[rows, seq/cp]``.
        ``labels``: the token id that follows each token, int64 ``[rows, seq/cp]``; :data:`IGNORE` where there is none.
        ``positions``: position of each token in its document, from 0, int64 ``[rows, seq/cp]``.
        ``cu_seqlens``: boundaries of the documents in the flattened ``rows * seq`` tokens of the *whole* (padded) rows,
            int32 ``[segments + 1]``, on the CPU. Every row boundary is also a document boundary. Where documents share
            prompts, it has a second row (:func:`weft.data.shared_prompts.share_prompts`).
        ``group``: in a balanced step, the ranks that the rows are cut over in place of ``cp``
            (:mod:`weft.parallel.document_balance`); None in other steps.
        ``weights``: weight of each label's loss, float32 ``[rows, seq/cp]``; None if all are 1.
        ``documents``: index in ``cu_seqlens`` of each token's document, int64 ``[rows, seq/cp]``, -1 for padding; None
            if no layer needs it.
        ``paired``: the pairs of documents to compare; None if rows hold no pairs.
        ``samples``: numbers of the samples in these rows. If several ranks have parts of the same rows, the numbers are
            set on the first of these ranks, and empty on the others.
        ``draws``: a random number for the dropout of each token, int64 ``[rows, seq/cp]``; None without dropout.
        ``rollout``: numbers that a policy loss reads, each ``[rows, seq/cp]``; None if rows hold no sampled answers.
        ``arrays``: for a model that reads arrays instead of tokens, the arrays of each row by name, ``[rows, ...]``;
            None for tokens. With arrays, a row has one token and one label, which only serve to count the sample.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    group: PassGroup | None = None
    weights: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    paired: PairedRows | None = None
    samples: tuple[int, ...] = ()
    draws: torch.Tensor | None = None
    rollout: RolloutTokens | None = None
    arrays: Mapping[str, torch.Tensor] | None = None

    @property
    def real_tokens(self) -> int:
        """Number of tokens of this rank that have a label, so that the loss counts them."""
        return int((self.labels != IGNORE).sum())

    @property
    def label_weight(self) -> float:
        """What this batch adds to the number by which the summed loss of a step is divided.

        It is the sum of the weights of the labels. If rows hold pairs, it is the sum of the weights of the pairs; if
        they hold sampled answers, the sum of ``rollout.divisor``.
        """
        if self.paired is not None:
            return float(self.paired.pairs.weight.sum()) * self.paired.counted
        if self.rollout is not None:
            return float(self.rollout.divisor.sum())
        if self.weights is None:
            return float(self.real_tokens)
        return float(self.weights[self.labels != IGNORE].double().sum())

    @property
    def document_tokens(self) -> int:
        """Number of tokens of this rank that are not padding, with or without a label."""
        return (
            self.tokens.numel()
            if self.documents is None
            else int((self.documents >= 0).sum())
        )

    def to(self, device: torch.device) -> Self:
        """Return this batch with its tensors on ``device``, except ``cu_seqlens``."""
        names = ("tokens", "labels", "positions", "weights", "documents", "draws")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}

        def moved(x: torch.Tensor) -> torch.Tensor:
            return x.to(device, non_blocking=True)

        there: dict[str, Any] = {name: moved(x) for name, x in given.items()}
        if self.rollout is not None:
            there["rollout"] = self.rollout.each(moved)
        if self.arrays is not None:
            there["arrays"] = {name: moved(x) for name, x in self.arrays.items()}
        return replace(self, **there)
