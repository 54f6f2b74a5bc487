"""Advantages of sampled answers from their rewards, over the whole batch of all ranks.

An advantage says how much better an answer, or a token of it, was than expected. What is expected comes from the other
answers to the question, from all answers of the step, or from a critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.errors import WeftError
from weft.recipe import PolicyLoss

#: What is added to a standard deviation before a division by it.
LEAST = 1e-4
#: What is added to the variance of tokens before a division by its root.
LEAST_VARIANCE = 1e-8

#: The reward of an answer, or its rewards by several judges; NaN: not scored.
Reward = float | Sequence[float]


@dataclass(frozen=True)
class ScoredAnswer:
    """A sampled answer with its reward, and log-probabilities and values of its tokens.

    Arrays have an entry for each token of prompt and answer, ``[n]``; only entries where ``learns`` is true are read.

    Attributes:
        ``reward``: the reward of the answer, or one number per judge; NaN if it was not scored.
        ``learns``: which tokens the policy has written, bool ``[n]``.
        ``old``: log-probabilities under the policy before the update, float64; None: not computed.
        ``reference``: log-probabilities under the reference model, float64; None: not computed.
        ``values``: the critic's prediction before each token was written, float64; None: there is no critic.
        ``token_rewards``: rewards of single tokens, such as the last tokens of turns, float64; None: there are none.
    """

    reward: Reward
    learns: np.ndarray
    old: np.ndarray | None = None
    reference: np.ndarray | None = None
    values: np.ndarray | None = None
    token_rewards: np.ndarray | None = None


@dataclass(frozen=True)
class TokenAdvantages:
    """Advantages of the tokens of one answer.

    ``advantage``: float64 ``[n]`` for the tokens of prompt and answer, 0 where nothing is learned. ``returns``: target
    of the critic's prediction, float64 ``[n]``; None without a critic.
    """

    advantage: np.ndarray
    returns: np.ndarray | None = None


def advantages(
    rewards: Sequence[Sequence[Reward]],
    settings: PolicyLoss,
    weights: Sequence[float] = (),
    penalties: Sequence[Sequence[float]] = (),
) -> list[list[float]]:
    """Return the advantage of each answer from the rewards of all answers of a step, group by group.

    ``rewards``: the rewards of each group of answers to one question; NaN: not scored. Such an answer gets advantage 0,
    and does not count in means. ``weights``: weight of each judge if answers have several rewards; empty: all 1.
    ``penalties``: number to subtract from the summed rewards of each answer; empty: nothing. Raises :class:`WeftError`
    if the settings ask for advantages of tokens, which :func:`token_advantages` computes.
    """
    if settings.advantage in ("returns", "gae"):
        raise WeftError(
            f"advantage = {settings.advantage!r} differs from token to token; use token_advantages"
        )
    groups = [_by_judge(group, weights) for group in rewards]
    factors = np.array(weights or [1.0] * _judges(groups))
    lost = [np.array(x) for x in penalties] or [np.zeros(1)] * len(groups)
    if settings.rewards == "normalize_then_sum":
        alike = [(g - _mean(g, 0)) / (_spread(g, 0) + LEAST) for g in groups]
        scaled = [_sum(g, factors) - x for g, x in zip(alike, lost, strict=True)]
        return _split(_standardised(_joined(scaled)), groups)
    sums = [_sum(g, factors) - x for g, x in zip(groups, lost, strict=True)]
    every = _joined(sums)
    spread = _spread(every) + LEAST
    results = []
    for group in sums:
        if settings.advantage == "leave-one-out":
            scored = np.count_nonzero(~np.isnan(group))
            others = (np.nansum(group) - group) / (scored - 1 or np.nan)
            results.append(group - others)
            continue
        gap = group - _mean(group)
        if settings.advantage == "group":
            gap = gap / (_spread(group) + LEAST)
        if settings.advantage == "batch":
            gap = gap / spread
        results.append(gap)
    whole = _joined(results)
    return _split(_standardised(whole) if settings.whiten else whole, groups)


def token_advantages(
    groups: Sequence[Sequence[ScoredAnswer]],
    settings: PolicyLoss,
    weights: Sequence[float] = (),
) -> list[list[TokenAdvantages]]:
    """Return the advantages of all tokens of the answers of a step, in the order of ``groups``.

    If the settings subtract the divergence from the reference model from rewards, this function does so. ``groups``:
    the answers to each question. ``weights``: weight of each judge if answers have several rewards; empty: all 1.
    Raises :class:`WeftError` if an answer lacks numbers that the settings need.
    """
    answers = [answer for group in groups for answer in group]
    penalties = [_penalty(answer, settings) for answer in answers]
    if settings.advantage in ("returns", "gae"):
        results = _of_tokens(answers, penalties, settings, weights)
    else:
        rewards = [[answer.reward for answer in group] for group in groups]
        lost = iter(penalties)
        sums = [[float(next(lost).sum()) for _ in group] for group in groups]
        of_answers = advantages(rewards, settings, weights, sums)
        flat = (x for group in of_answers for x in group)
        results = [
            TokenAdvantages(np.where(answer.learns, x, 0.0))
            for answer, x in zip(answers, flat, strict=True)
        ]
    rest = iter(results)
    return [[next(rest) for _ in group] for group in groups]


def generalised_advantages(
    rewards: np.ndarray, values: np.ndarray, discount: float, trace: float
) -> np.ndarray:
    """Return generalised advantage estimates (Schulman et al. 2016), float64 ``[tokens]``.

    ``rewards``: reward after each token; ``values``: the critic's prediction before each token; both ``[tokens]``. The
    text ends after the last token, where the value is 0. ``discount``: gamma. ``trace``: lambda.
    """
    following = np.append(values[1:], 0.0)
    errors = rewards + discount * following - values
    return discounted(errors, discount * trace)


def discounted(rewards: np.ndarray, discount: float) -> np.ndarray:
    """Return the discounted sum of rewards from each token on, float64 ``[tokens]``.

    ``rewards``: reward after each token, ``[tokens]``. ``discount``: factor for each token of distance.
    """
    sums = np.zeros(len(rewards))
    later = 0.0
    for i in reversed(range(len(rewards))):
        later = rewards[i] + discount * later
        sums[i] = later
    return sums


def whitened(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays ``parts``, ``[n]`` each, shifted and scaled by common factors, so that all their numbers
    together have mean 0 and variance 1. Fewer than two numbers become zeros.
    """
    every = np.concatenate([*parts, np.zeros(0)])
    if len(every) < 2:
        return [np.zeros_like(part) for part in parts]
    scale = 1 / np.sqrt(every.var(ddof=1) + LEAST_VARIANCE)
    return [(part - every.mean()) * scale for part in parts]


def _of_tokens(
    answers: Sequence[ScoredAnswer],
    penalties: Sequence[np.ndarray],
    settings: PolicyLoss,
    weights: Sequence[float],
) -> list[TokenAdvantages]:
    """Return advantages that differ from token to token, from the penalties ``[n]`` of each answer's tokens."""
    judged = _by_judge([answer.reward for answer in answers], weights)
    totals = _sum(judged, np.array(weights or [1.0] * judged.shape[1]))
    estimates, targets = [], []
    for answer, penalty, total in zip(answers, penalties, totals, strict=True):
        rewards = -penalty
        if answer.token_rewards is not None:
            rewards = rewards + answer.token_rewards
        rewards = rewards[answer.learns]
        if np.isnan(total) or not len(rewards):
            rewards = rewards[:0]
        else:
            rewards[-1] += total
        values = np.zeros(len(rewards))
        if settings.advantage == "gae":
            if answer.values is None:
                raise WeftError(
                    "advantage = 'gae' needs the values of a critic, which an answer lacks"
                )
            values = answer.values[answer.learns][: len(rewards)]
            estimate = generalised_advantages(
                rewards, values, settings.discount, settings.trace
            )
        else:
            estimate = discounted(rewards, settings.discount)
        estimates.append(estimate)
        targets.append(estimate + values)
    if settings.whiten:
        estimates = whitened(estimates)
    results = []
    for answer, estimate, target in zip(answers, estimates, targets, strict=True):
        advantage, returns = np.zeros(len(answer.learns)), np.zeros(len(answer.learns))
        if len(estimate):
            advantage[answer.learns], returns[answer.learns] = estimate, target
        elif answer.values is not None:  # not scored: the critic learns nothing new
            returns = np.where(answer.learns, answer.values, 0.0)
        critic = settings.advantage == "gae"
        results.append(TokenAdvantages(advantage, returns if critic else None))
    return results


def _penalty(answer: ScoredAnswer, settings: PolicyLoss) -> np.ndarray:
    """Return what is subtracted from the reward of each token for the divergence from the reference model, ``[n]``."""
    nothing = np.zeros(len(answer.learns))
    if not settings.needs_reference or settings.kl_in != "reward":
        return nothing
    if answer.old is None or answer.reference is None:
        raise WeftError(
            f"kl = {settings.kl!r} in rewards needs log-probabilities under the policy and the reference model, which "
            "an answer lacks"
        )
    gap = np.where(answer.learns, answer.old - answer.reference, 0.0)
    estimate = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap}[settings.kl]
    return np.asarray(settings.kl_weight * estimate)


def _by_judge(group: Sequence[Reward], weights: Sequence[float]) -> np.ndarray:
    """Return the rewards of a group as float64 ``[answers, judges]``."""
    judged = np.array(group, np.float64).reshape(len(group), -1)
    if len(group) and weights and judged.shape[1] != len(weights):
        raise WeftError(
            f"an answer has {judged.shape[1]} rewards, and there are {len(weights)} weights"
        )
    return judged


def _judges(groups: Sequence[np.ndarray]) -> int:
    return max((group.shape[1] for group in groups), default=1)


def _sum(judged: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the weighted sums ``[answers]`` of rewards ``[answers, judges]``, NaN where no judge has scored."""
    sums = np.nansum(judged * factors, axis=1)
    return np.where(np.isnan(judged).all(1), np.nan, sums)


def _mean(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the mean of what is not NaN; NaN if nothing is."""
    count = np.count_nonzero(~np.isnan(x), axis=axis)
    return np.asarray(np.nansum(x, axis=axis) / np.where(count > 0, count, np.nan))


def _spread(x: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Return the standard deviation of what is not NaN; NaN if fewer than two numbers are not."""
    count = np.count_nonzero(~np.isnan(x), axis=axis)
    squares = np.nansum((x - _mean(x, axis)) ** 2, axis=axis)
    return np.asarray(np.sqrt(squares / np.where(count > 1, count - 1, np.nan)))


def _standardised(x: np.ndarray) -> np.ndarray:
    return (x - _mean(x)) / (_spread(x) + LEAST)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([*parts, np.zeros(0)])


def _split(whole: np.ndarray, groups: Sequence[np.ndarray]) -> list[list[float]]:
    """Cut the advantages of all answers by group; NaN, of answers that nothing is known of, becomes 0."""
    edges = np.cumsum([len(group) for group in groups])[:-1]
    return [part.tolist() for part in np.split(np.nan_to_num(whole), edges)]
