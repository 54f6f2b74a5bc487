"""Plugins that tests on several ranks name: a model and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from weft.plugins import register

T = torch.Tensor


@register("model", "mixed")
class Mixed(nn.Module):
    """Mixes each token with the mean of those before it in its document, by a buffer and odd sizes."""

    def __init__(self, vocab: int, width: int = 11) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.inner = nn.Linear(2 * width, 13)
        self.out = nn.Linear(13, vocab)
        self.register_buffer("shift", torch.linspace(0, 1, width), persistent=False)

    def forward(self, tokens: T, positions: T, cu_seqlens: T) -> T:
        x = self.table(tokens) + self.shift
        flat = x.flatten(0, 1)
        sums = flat.cumsum(0)
        begins = (
            torch.arange(len(flat), device=flat.device) - positions.flatten()
        ).clamp(min=0)
        before = sums - sums[begins] + flat[begins]
        mean = before / (positions.flatten()[:, None] + 1)
        return self.out(torch.tanh(self.inner(torch.cat((x, mean.view_as(x)), -1))))


@register("loss", "focal")
def focal(logits: T, labels: T, gamma: float = 2.0) -> T:
    """The focal loss (Lin et al. 2017)."""
    found = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-found)) ** gamma * found


@register("loss", "plain")
def plain(logits: T, labels: T) -> T:
    return F.cross_entropy(logits, labels, reduction="none")


@register("loss", "averaged")
def averaged(logits: T, labels: T) -> T:
    """What no loss may do."""
    return F.cross_entropy(logits, labels)


@register("model", "wrong")
def wrong(vocab: int, how: str) -> object:
    made = nn.Sequential(nn.Embedding(vocab, 3))
    made.forward = lambda tokens, positions, cu_seqlens: made[0](tokens)  # type: ignore[method-assign]
    if how == "scalar":
        made.register_parameter("scale", nn.Parameter(torch.ones(())))
    return {"kind": 3, "frozen": nn.Module()}.get(how, made)
