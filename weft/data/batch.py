"""What one rank computes on in one pass."""

from dataclasses import dataclass, replace
from typing import Self

import torch

#: Label of a token that has nothing to predict (last token of a document, padding).
IGNORE = -100


@dataclass(frozen=True)
class Group:
    """The data ranks that share a pass, in the order of the attention table; ``index`` is this one among them.

    ``lengths``: tokens in every block of the table. ``plan`` is the same on all ranks that follow the same plan.
    """

    plan: int
    peers: tuple[int, ...]
    index: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Rows of packed documents, cut over ``cp`` (see :mod:`weft.layout.sequence`).

    ``tokens``, ``labels``, ``positions``: int64 ``[rows, seq/cp]``; positions count from 0 in every document.
    ``cu_seqlens``: int32 ``[segments + 1]``, on the CPU: document boundaries in the flattened ``rows * seq`` tokens
    of the *whole* (padded) rows; every row boundary is also a document boundary.
    ``group``: whose tokens these are in a balanced step, where it is not all of ``cp`` (:mod:`weft.data.balance`).
    ``documents``: int64 ``[rows, seq/cp]``, the segment that each token is of, -1 for padding; None if nobody asked.
    ``weights``: float32 ``[rows, seq/cp]``, how much the loss of each label counts; None where all count alike.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    group: Group | None = None
    weights: torch.Tensor | None = None
    documents: torch.Tensor | None = None

    @property
    def real_tokens(self) -> int:
        """Tokens of this batch that carry a loss."""
        return int((self.labels != IGNORE).sum())

    @property
    def label_weight(self) -> float:
        """The sum of the labels' weights: what this batch adds to the denominator of the mean loss."""
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
