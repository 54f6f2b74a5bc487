"""A small recurrent network learns to add: one plugin of every kind, and the recipe beside it names them all.

Run it in this folder: ``weft train recipe.toml``. It takes half a minute on two cores.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.plugins import register

T = torch.Tensor


@register("dataset", "sums")
def sums(path: str | None, largest: int = 30) -> Iterator[str]:
    """Every sum of two numbers up to ``largest``, a document each."""
    for a in range(largest + 1):
        for b in range(largest + 1):
            yield f"{a}+{b}={a + b}\n"


@register("model", "gru")
class GRU(nn.Module):
    """A recurrent network that reads each document by itself."""

    def __init__(self, vocab: int, width: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, tokens: T, positions: T, cu_seqlens: T) -> T:
        """Logits ``[batch, seq, vocab]``; rows hold several documents, whose edges are in ``cu_seqlens``."""
        x = self.table(tokens).flatten(0, 1)  # [batch * seq, width]
        documents = x.split(cu_seqlens.diff().tolist())
        # [documents, longest, width]
        padded = nn.utils.rnn.pad_sequence(documents, batch_first=True)
        hidden, _ = self.cell(padded)
        read = torch.cat(
            [
                row[: len(document)]
                for row, document in zip(hidden, documents, strict=True)
            ]
        )
        return self.out(read).unflatten(0, tokens.shape)


@register("loss", "smoothed")
def smoothed(logits: T, labels: T, smoothing: float = 0.05) -> T:
    """Cross entropy with smoothed labels (Szegedy et al. 2016), token by token."""
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


@register("callback", "early-stop")
class EarlyStop:
    """Ends the run when the loss of what is held out has not fallen for ``patience`` validations."""

    def __init__(self, patience: int = 3) -> None:
        self.patience, self.best, self.since = patience, float("inf"), 0

    def after_evaluation(self, run: Any, values: Mapping[str, float]) -> None:
        loss = values.get("validation", self.best)
        self.since = 0 if loss < self.best else self.since + 1
        self.best = min(self.best, loss)
        if self.since >= self.patience:
            run.stop(f"no better than {self.best:.3f} for {self.patience} validations")

    def end(self, run: Any) -> None:
        run.say(f"the best loss was {self.best:.3f}")


@register("tracker", "csv")
class CSV:
    """Writes the losses of a run into a table in its folder."""

    def __init__(self, run: Path) -> None:
        self.file = (run / "losses.csv").open("a", newline="")
        self.table = csv.writer(self.file)

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if "loss" in values:
            self.table.writerow([kind, step, values["loss"]])

    def close(self) -> None:
        self.file.close()
