"""Experts that were trained apart are one model at evaluation."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from examples.domains import losses, mixture, train_expert


def test_the_mixture_is_bayes() -> None:
    """All tokens of a document together are as likely as the mixture of whole documents; the likeliest alone is one."""
    torch.manual_seed(0)
    scores = torch.randn(3, 50, dtype=torch.float64).sub(2).clamp(max=-1e-3)
    prior = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    whole = (prior.log() + scores.sum(1)).logsumexp(0)
    assert mixture(scores, prior).sum() == pytest.approx(float(whole), rel=1e-12)
    assert mixture(scores, prior, top=3).equal(mixture(scores, prior))
    one = mixture(scores, prior, top=1)
    assert all(
        float(value) in column.tolist()
        for value, column in zip(one, scores.mT, strict=True)
    )
    assert float(one[0]) == float(scores[0, 0])  # nothing has been seen: the prior says
    certain = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert torch.allclose(mixture(scores, certain), scores[1])


@pytest.mark.slow
def test_experts_of_different_size_are_better_together(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = {"letters": "abcdefgh", "digits": "0123456789"}

    def documents(name: str, count: int) -> list[str]:
        """Steps up and down an alphabet."""
        found = []
        for _ in range(count):
            at, text = 0, []
            for _ in range(150):
                at = (at + draw.choice((1, 1, 1, 2))) % len(words[name])
                text.append(words[name][at])
            found.append("".join(text))
        return found

    sizes = {"letters": (2, 24), "digits": (1, 16)}
    experts = [
        train_expert(
            documents(name, 60),
            {"layers": layers, "embed": embed, "heads": 2, "ffn": 2 * embed},
            60,
            tmp_path / name,
        )
        for name, (layers, embed) in sizes.items()
    ]
    assert experts[0].cost > 2 * experts[1].cost
    prior = torch.full((2,), 0.5, dtype=torch.float64)
    both = [*documents("letters", 5), *documents("digits", 5)]
    alone, together = losses(experts, both, prior)
    assert together < 0.8 * min(alone)
    # of its own domain nearly as good as the expert, who needs no prior
    for expert, name in enumerate(sizes):
        alone, together = losses(experts, own := documents(name, 4), prior)
        assert alone.index(min(alone)) == expert
        assert alone[expert] <= together <= alone[expert] + math.log(2) / 149 + 1e-9
        assert losses(experts, own, prior, top=1)[1] < alone[expert] + 0.1
