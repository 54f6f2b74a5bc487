"""Length bias of normalisers, in the exact gradient: wrong answers grow with ``sequence`` alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from weft.data.loader import Loader
from weft.data.policy_rows import PolicySample, policy_rows
from weft.layout.mesh import Mesh
from weft.models.policy_loss import PolicyObjective
from weft.recipe import PolicyLoss

NORMALISERS = ("sequence", "tokens", "constant")


def pushes(
    normaliser: str, lengths: list[int], advantages: torch.Tensor
) -> torch.Tensor:
    """How much one step of descent pushes the log-probability of each token of each answer up, ``[answers]``.

    The first token of each answer is its prompt. Asserts that all tokens of an answer are pushed alike.
    """
    settings, room = PolicyLoss(normaliser=normaliser, constant=8), sum(lengths)
    samples = [
        PolicySample(
            np.zeros(n + 1, np.int64), np.arange(n + 1) > 0, np.full(n + 1, float(a))
        )
        for n, a in zip(lengths, advantages, strict=True)
    ]
    mesh, rows = Mesh.single(), policy_rows(samples, room, settings)
    (batch,) = Loader(rows, mesh.layout, 0, 0, 1, 1, 1, room).step(0) or []
    nll = torch.full((room,), 2.0, dtype=torch.float64)
    weights = PolicyObjective(settings).weigh(nll, nll, batch, mesh).slopes
    assert batch.rollout is not None
    weights = weights.flatten() / batch.rollout.divisor.sum()
    # the order of answers in a row is the packer's: find each by the end of the one before
    row = rows.rows[0]
    bounds = [*row.starts.tolist(), room]
    by_length: dict[int, torch.Tensor] = {}
    for begin, end in pairwise(bounds):
        assert weights[begin:end].unique().numel() == 1
        by_length[end - begin] = weights[begin]
    return torch.stack([by_length[n] for n in lengths])


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_two_answers_of_equal_reward(normaliser: str) -> None:
    """Each token of an answer of 12 counts a quarter of one of an answer of 3 with ``sequence``, else the same."""
    short, long = pushes(normaliser, [3, 12], torch.tensor([-1.0, -1.0]))
    assert short < 0
    expected = {"sequence": 1 / (2 * 3), "tokens": 1 / 15, "constant": 1 / (2 * 8)}
    assert short.item() == pytest.approx(-expected[normaliser], rel=1e-14)
    ratio = 3 / 12 if normaliser == "sequence" else 1.0
    assert (long / short).item() == pytest.approx(ratio, rel=1e-14)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_expected_drift_of_the_length_of_wrong_answers(normaliser: str) -> None:
    """A policy that knows nothing writes each length from 1 to 16 as often, and only 6 is right.

    The expected gradient is a sum over all answers. With free logits ``z`` it changes ``z_y`` by the push of answer y,
    less the mean push, so that wrong answers keep their mean length unless they are pushed unequally.
    """
    lengths = [*range(1, 17)]
    sizes = torch.tensor(lengths, dtype=torch.float64)
    rewards = (sizes == 6).double()
    push = pushes(normaliser, lengths, rewards - rewards.mean())
    z = torch.zeros(16, dtype=torch.float64, requires_grad=True)
    (change,) = torch.autograd.grad((push * z.log_softmax(0)).sum(), z)
    wrong = rewards == 0
    z = torch.zeros(16, dtype=torch.float64, requires_grad=True)
    mean_length = (z[wrong].softmax(0) * sizes[wrong]).sum()
    (slope,) = torch.autograd.grad(mean_length, z)
    drift = (slope * change).sum().item()
    assert change[5] > 0 and change[5] == change.max()
    if normaliser == "sequence":
        # the formula: covariance of length and -(1/16) / length over the 15 wrong answers, divided by 16 answers
        inverse = 1 / sizes[wrong]
        covariance = (sizes[wrong] * inverse).mean() - sizes[wrong].mean() * inverse.mean()  # fmt: skip
        assert drift == pytest.approx(-covariance.item() / 16 / 16, rel=1e-12)
        assert drift > 0
    else:
        assert abs(drift) < 1e-15
