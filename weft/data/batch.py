"""What one rank computes on in one pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

#: Label of a token that has nothing to predict (last token of a document, padding).
IGNORE = -100


@dataclass(frozen=True)
class PassGroup:
    """The data ranks that share a pass, in the order of the attention table; ``index`` is this one among them.

    ``lengths``: tokens in every block of the table. ``plan`` is the same on all ranks that follow the same plan.
    """

    plan: int
    peers: tuple[int, ...]
    index: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Pairs:
    """What is known of pairs of documents that follow each other, of which the first is preferred: ``[pairs]`` each.

    ``number``: int64, of each among all that the run knows. ``weight`` float64: how much its loss counts; ``margin``:
    by how much the first should be ahead. ``reference`` ``[pairs, 2]``: the log-probabilities of both by the model that
    the trained one is to stay near to; zeros where there is none.
    """

    number: np.ndarray
    weight: np.ndarray
    margin: np.ndarray
    reference: np.ndarray

    def __len__(self) -> int:
        return len(self.number)

    def __getitem__(self, chosen: np.ndarray) -> Self:
        return type(self)(self.number[chosen], self.weight[chosen], self.margin[chosen], self.reference[chosen])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The pairs of several, one after the other."""
        names = ("number", "weight", "margin", "reference")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    @classmethod
    def listed(cls, weight: np.ndarray, margin: np.ndarray) -> Self:
        """All pairs of a source, without a reference."""
        return cls(np.arange(len(weight)), weight, margin, np.zeros((len(weight), 2)))

    def numbered(self, first: int) -> Self:
        """The same with numbers from ``first`` on."""
        return replace(self, number=first + np.arange(len(self)))


@dataclass(frozen=True)
class PairedRows:
    """The pairs in the rows of a batch. ``segments``: int64 ``[2 * pairs]``, which of the batch's their documents are.

    ``counted``: whether this rank, of those that have a part of the rows, counts the pairs.
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
    ``group``: whose tokens these are in a balanced step, where it is not all of ``cp`` (:mod:`weft.data.balance`).
    ``documents``: int64 ``[rows, seq/cp]``, the segment that each token is of, -1 for padding; None if nobody asked.
    ``weights``: float32 ``[rows, seq/cp]``, how much the loss of each label counts; None where all count alike.
    ``paired``: of rows that hold pairs of documents to compare.
    ``samples``: the numbers of those samples that this rank, of all that have a part of them, answers for.
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
        return self.tokens.numel() if self.documents is None else int((self.documents >= 0).sum())

    def to(self, device: torch.device) -> Self:
        names = ("tokens", "labels", "positions", "weights", "documents")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in given.items()})
