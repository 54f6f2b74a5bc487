"""Advantages, losses and slopes of every token equal verl's on recorded numbers (tests/rl/record_verl.py)."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.rl import record_verl as recorded
from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.data.policy_rows import PolicySample, policy_rows
from weft.layout.mesh import Mesh
from weft.models.policy_loss import PolicyObjective
from weft.recipe import PolicyLoss
from weft.rl.advantages import ScoredAnswer, TokenAdvantages, token_advantages

RECORDED = json.loads(recorded.RECORDED.read_text())
MESH = Mesh.single(torch.device("cpu"))
COUNT = len(recorded.LENGTHS)


def column(name: str, answer: int, first: float = 0.0) -> np.ndarray:
    """The numbers of an answer behind a prompt of one token."""
    length = recorded.LENGTHS[answer]
    return np.append(first, recorded.numbers()[name][answer, :length])


def learns(answer: int) -> np.ndarray:
    length = recorded.LENGTHS[answer]
    return np.append(False, recorded.mask()[answer, :length])


def advantages(kind: str) -> list[TokenAdvantages]:
    settings = PolicyLoss(
        advantage=kind, whiten=True, discount=recorded.DISCOUNT, trace=recorded.TRACE,
        kl="k1", kl_weight=recorded.KL, kl_in="reward",
    )  # fmt: skip
    answers = [
        ScoredAnswer(
            recorded.SCORES[i],
            learns(i),
            column("old", i),
            column("reference", i),
            column("values", i),
        )
        for i in range(COUNT)
    ]
    (found,) = token_advantages([answers], settings)
    return found


def written(rows: list[list[float]], answer: int) -> np.ndarray:
    """What verl says of the tokens of an answer that the policy has written."""
    return np.array(rows[answer])[recorded.mask()[answer]]


@pytest.mark.parametrize(
    ("kind", "name"), [("gae", "gae"), ("returns", "reinforce-plus-plus")]
)
def test_advantages_are_verls(kind: str, name: str) -> None:
    for i, tokens in enumerate(advantages(kind)):
        np.testing.assert_allclose(
            tokens.advantage[learns(i)],
            written(RECORDED[name], i),
            rtol=1e-7,
            atol=1e-9,
        )
        assert not tokens.advantage[~learns(i)].any()
        if tokens.returns is not None:
            np.testing.assert_allclose(
                tokens.returns[learns(i)],
                written(RECORDED["returns"], i),
                rtol=1e-7,
                atol=1e-9,
            )
    assert (advantages(kind)[0].returns is None) == (kind == "returns")


def batch_of(settings: PolicyLoss) -> Batch:
    """One row with all answers; the id of a label is the number of its answer."""
    samples = [
        PolicySample(
            np.full(recorded.LENGTHS[i] + 1, i), learns(i), tokens.advantage, column("sampler", i), column("old", i),
            None, tokens.returns, column("values", i),
        )
        for i, tokens in enumerate(advantages("gae"))
    ]  # fmt: skip
    rows = policy_rows(samples, 64, settings)
    (batch,) = Loader(rows, MESH.layout, 0, 0, 1, 1, 1, 64).step(0) or []
    return batch


def laid(batch: Batch, name: str) -> torch.Tensor:
    """Numbers of all answers where the batch has their tokens as labels, ``[tokens]``."""
    numbers = np.zeros(batch.labels.numel())
    assert batch.documents is not None
    for document in range(COUNT):
        here = (batch.documents.flatten() == document).nonzero()[:, 0]
        answer = int(batch.tokens.flatten()[here[0]])
        numbers[here.numpy()] = column(name, answer)[1:]
    return torch.from_numpy(numbers)


@pytest.mark.parametrize("mode", recorded.MODES)
def test_losses_and_slopes_are_verls(mode: str) -> None:
    given = RECORDED[mode]
    settings = PolicyLoss(
        normaliser=recorded.MODES[mode], constant=recorded.LONGEST, advantage="gae", clip_low=0.1, clip_high=0.15,
        dual_clip=1.2, value_clip=0.1, value_weight=1.0, correction={"weight": "token", "high": 1.05},
    )  # fmt: skip
    batch, objective = batch_of(settings), PolicyObjective(settings)
    total = batch.label_weight
    nll = -laid(batch, "new")
    of_policy = objective.weigh(nll, torch.zeros_like(nll), batch, MESH)
    of_critic = objective.weigh_values(laid(batch, "new_values"), batch, MESH)
    assert of_policy.loss.item() / total == pytest.approx(given["loss"], rel=1e-7)
    assert of_critic.loss.item() / total == pytest.approx(given["value_loss"], rel=1e-7)
    tokens = batch.tokens.flatten()
    assert batch.documents is not None
    learned = batch.labels.flatten() >= 0
    for i in range(COUNT):
        here = (tokens == i) & learned & (batch.documents.flatten() >= 0)
        for slopes, name in ((-of_policy.slopes, "slopes"), (of_critic.slopes, "value_slopes")):  # fmt: skip
            np.testing.assert_allclose(
                slopes[here] / total, written(given[name], i), rtol=1e-6, atol=1e-12
            )
    figures = objective.figures.take(MESH)
    for name in ("clipped_low", "clipped_high", "corrected", "value_clipped"):
        assert 0 < figures[f"policy.{name}"] < 1, name
    assert figures["policy.ratio_max"] > settings.dual_clip
