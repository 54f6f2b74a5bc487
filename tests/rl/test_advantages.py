"""Advantages of answers and of tokens, by plain formulas; tests/rl/test_trl_losses.py compares them with TRL's."""

from __future__ import annotations

import math
from statistics import mean, stdev

import numpy as np
import pytest

from weft.errors import WeftError
from weft.recipe import PolicyLoss
from weft.rl.advantages import ScoredAnswer, advantages, token_advantages

NAN = math.nan
REWARDS = [[1.0, 0.0, 0.5], [2.0, 2.0], [0.25, NAN, 1.0, 0.0]]


def test_of_groups() -> None:
    found = advantages(REWARDS, PolicyLoss(advantage="group"))
    first = REWARDS[0]
    assert found[0] == pytest.approx(
        [(r - mean(first)) / (stdev(first) + 1e-4) for r in first]
    )
    assert found[1] == [0, 0]
    rest = [0.25, 1.0, 0.0]
    assert found[2][1] == 0  # not scored, and no part of the mean
    assert found[2][2] == pytest.approx((1 - mean(rest)) / (stdev(rest) + 1e-4))


def test_over_the_step() -> None:
    every = [r for group in REWARDS for r in group if not math.isnan(r)]
    found = advantages(REWARDS, PolicyLoss(advantage="batch"))
    assert found[0][0] == pytest.approx(0.5 / (stdev(every) + 1e-4))
    assert advantages(REWARDS, PolicyLoss(advantage="none"))[0] == [0.5, -0.5, 0.0]


def test_of_the_others() -> None:
    found = advantages(REWARDS, PolicyLoss(advantage="leave-one-out"))
    assert found[0] == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5])
    assert found[2] == pytest.approx([0.25 - 0.5, 0, 1 - 0.125, 0 - 0.625])
    alone = advantages([[3.0], [NAN, 1.0]], PolicyLoss(advantage="leave-one-out"))
    assert alone == [[0.0], [0.0, 0.0]]
    white = np.concatenate(
        advantages(REWARDS, PolicyLoss(advantage="leave-one-out", whiten=True))
    )
    scored = np.delete(white, 6)
    assert scored.mean() == pytest.approx(0) and scored.std(ddof=1) == pytest.approx(
        1, rel=1e-3
    )


def test_several_judges() -> None:
    rewards = [[(1.0, 0.0), (0.0, NAN), (NAN, NAN)], [(0.5, 1.0), (1.0, 0.25)]]
    weights = (2.0, 0.5)
    settings = PolicyLoss(advantage="none")
    summed = [[2.0, 0.0, NAN], [1.5, 2.125]]
    assert advantages(rewards, settings, weights) == advantages(summed, settings)
    apart = advantages(rewards, PolicyLoss(rewards="normalize_then_sum"), weights)
    assert apart[0][2] == 0 and apart[0][0] > 0 > apart[0][1]
    with pytest.raises(WeftError, match="2 rewards, and there are 1 weights"):
        advantages(rewards, settings, (1.0,))


def answers(seed: int = 0) -> list[list[ScoredAnswer]]:
    rng = np.random.default_rng(seed)
    groups = []
    for sizes in ((5, 9), (4, 12, 7)):
        group = []
        for n in sizes:
            learns = np.arange(n) >= 2
            numbers = rng.standard_normal((4, n))
            group.append(ScoredAnswer(float(rng.random()), learns, *numbers[:3]))
        groups.append(group)
    return groups


def test_generalised_estimates_are_the_sums_of_their_definition() -> None:
    settings = PolicyLoss(
        advantage="gae", discount=0.9, trace=0.8, kl="k1", kl_weight=0.1, kl_in="reward"
    )
    groups = answers()
    for group, found in zip(groups, token_advantages(groups, settings), strict=True):
        for answer, tokens in zip(group, found, strict=True):
            assert answer.old is not None and answer.reference is not None
            assert answer.values is not None and tokens.returns is not None
            values = [*answer.values[2:], 0.0]
            rewards = -0.1 * (answer.old - answer.reference)[2:]
            rewards[-1] += answer.reward
            for t in range(len(rewards)):
                wanted = sum(
                    (0.9 * 0.8) ** (s - t) * (rewards[s] + 0.9 * values[s + 1] - values[s])
                    for s in range(t, len(rewards))
                )  # fmt: skip
                assert tokens.advantage[2 + t] == pytest.approx(wanted)
                assert tokens.returns[2 + t] == pytest.approx(wanted + values[t])
            assert not tokens.advantage[:2].any()


def test_returns_are_whitened_over_all_tokens() -> None:
    groups = answers()
    settings = PolicyLoss(advantage="returns", whiten=True)
    found = token_advantages(groups, settings)
    learned = np.concatenate([t.advantage[2:] for group in found for t in group])
    assert learned.mean() == pytest.approx(0, abs=1e-12)
    assert learned.var(ddof=1) == pytest.approx(1, rel=1e-6)
    flat = [answer.reward for group in groups for answer in group]
    best = int(np.argmax(flat))
    tokens = [t for group in found for t in group][best]
    assert tokens.advantage[2] == learned.max() and tokens.returns is None


def test_divergence_is_subtracted_from_the_sum_of_rewards() -> None:
    groups = answers()
    settings = PolicyLoss(advantage="none", kl="k1", kl_weight=0.5, kl_in="reward")
    found = token_advantages(groups, settings, (2.0,))
    lowered = []
    for answer in groups[0]:
        assert answer.old is not None and answer.reference is not None
        lowered.append(
            2 * answer.reward - 0.5 * (answer.old - answer.reference)[2:].sum()
        )
    assert found[0][0].advantage[-1] == pytest.approx(lowered[0] - mean(lowered))


def test_what_an_answer_lacks_is_named() -> None:
    bare = [[ScoredAnswer(1.0, np.array([False, True]))]]
    with pytest.raises(WeftError, match="values of a critic"):
        token_advantages(bare, PolicyLoss(advantage="gae"))
    with pytest.raises(WeftError, match="under the policy and the reference"):
        token_advantages(bare, PolicyLoss(kl="k1", kl_weight=1, kl_in="reward"))
    with pytest.raises(WeftError, match="use token_advantages"):
        advantages([[1.0]], PolicyLoss(advantage="gae"))
