"""A batch: the tokens that one rank computes on in one pass, with labels, positions and document boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

#: Label of a token that has nothing to predict (last token of a document, padding).
IGNORE = -100


@dataclass(frozen=True)
class PassGroup:
    """The data ranks that share a pass of a balanced step, in the order of the attention table.

    ``index``: the position of this rank among ``peers``. ``lengths``: tokens in every block of the table. ``plan``: a
    checksum of the step's plan, which must be equal on all ranks.
    """

    plan: int
    peers: tuple[int, ...]
    index: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Pairs:
    """Facts about pairs of neighbouring documents, of which the first is the preferred answer: arrays ``[pairs]``.

    ``number``: int64, its number among all pairs of the run. ``weight``: float64, how much its loss counts.
    ``margin``: by how much the first answer should be ahead. ``reference`` ``[pairs, 2]``: the log-probabilities of
    both answers by the reference model; zeros where there is none.
    """

    number: np.ndarray
    weight: np.ndarray
    margin: np.ndarray
    reference: np.ndarray

    def __len__(self) -> int:
        return len(self.number)

    def __getitem__(self, chosen: np.ndarray) -> Self:
        return type(self)(
            self.number[chosen],
            self.weight[chosen],
            self.margin[chosen],
            self.reference[chosen],
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The pairs of all ``parts``, concatenated."""
        names = ("number", "weight", "margin", "reference")
        return cls(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in names)
        )

    @classmethod
    def listed(cls, weight: np.ndarray, margin: np.ndarray) -> Self:
        """Pairs with numbers from 0 on, without a reference."""
        return cls(np.arange(len(weight)), weight, margin, np.zeros((len(weight), 2)))

    def numbered(self, first: int) -> Self:
        """The same pairs with numbers from ``first`` on."""
        return replace(self, number=first + np.arange(len(self)))


@dataclass(frozen=True)
class PairedRows:
    """The pairs in the rows of a batch. ``segments``: int64 ``[2 * pairs]``, the segments that hold their documents.

    ``counted``: whether it is this rank, of all that have a part of these rows, that counts the pairs.
    """

    pairs: Pairs
    segments: np.ndarray
    counted: bool


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents, cut over ``cp`` (see :mod:`weft.layout.sequence`).

    ``tokens``, ``labels``, ``positions``: int64 ``[rows, seq/cp]``; positions count from 0 in every document.
    ``cu_seqlens``: int32 ``[segments + 1]``, on the CPU: document boundaries in the flattened ``rows * seq`` tokens
    of the *whole* (padded) rows; every row boundary is also a document boundary.
    ``group``: in a balanced step, the ranks that the rows are cut over in place of ``cp``
    (:mod:`weft.parallel.document_balance`).
    ``documents``: int64 ``[rows, seq/cp]``, the segment of each token, -1 for padding; None if it is not needed.
    ``weights``: float32 ``[rows, seq/cp]``, how much the loss of each label counts; None where all count alike.
    ``paired``: the pairs, where rows hold pairs of documents to compare.
    ``draws``: int64 ``[rows, seq/cp]``, a random number of each token, which dropout follows; None: nothing drops.
    ``samples``: the numbers of the samples in these rows; on one only of the ranks that have a part of a row.
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

    @property
    def real_tokens(self) -> int:
        """Tokens of this batch that carry a loss."""
        return int((self.labels != IGNORE).sum())

    @property
    def label_weight(self) -> float:
        """The sum of the labels' or pairs' weights: what this batch adds to the denominator of the mean loss."""
        if self.paired is not None:
            return float(self.paired.pairs.weight.sum()) * self.paired.counted
        if self.weights is None:
            return float(self.real_tokens)
        return float(self.weights[self.labels != IGNORE].double().sum())

    @property
    def document_tokens(self) -> int:
        """Tokens of this batch that are no padding."""
        return (
            self.tokens.numel()
            if self.documents is None
            else int((self.documents >= 0).sum())
        )

    def to(self, device: torch.device) -> Self:
        names = ("tokens", "labels", "positions", "weights", "documents", "draws")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        return replace(
            self, **{name: x.to(device, non_blocking=True) for name, x in given.items()}
        )
