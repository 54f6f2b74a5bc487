"""Generalised advantage estimation over steps of several environments (Schulman et al. 2016, 1506.02438)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class EpisodeAdvantages(NamedTuple):
    """Advantages of the actions, and returns for the critic to learn, each ``[steps, environments]``."""

    advantages: np.ndarray
    returns: np.ndarray


def episode_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    ended: np.ndarray,
    gamma: float,
    trace: float,
) -> EpisodeAdvantages:
    """Return the advantages of collected steps by generalised advantage estimation (Schulman et al. 2016), and the
    returns that the critic learns.

    All arrays are ``[steps, environments]`` and hold only steps that were taken. If a rank was stopped early, they are
    fewer than planned, and the last step counts with its ``next_values`` like any other.

    Args:
        ``rewards``: rewards of the steps.
        ``values``: the critic's value of the observation before each step.
        ``next_values``: the critic's value of the observation after each step. For a truncated episode, this is the
            last observation of that episode, not the first of the next.
        ``terminated``: whether an episode terminated at the step, so that ``next_values`` counts as 0.
        ``ended``: whether the step was the last of its episode: terminated, truncated or dropped.
        ``gamma``, ``trace``: discount, and lambda of the estimate.
    """
    advantages = np.zeros_like(values)
    later = np.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        ahead = rewards[t] + gamma * next_values[t] * ~terminated[t]
        later = ahead - values[t] + gamma * trace * ~ended[t] * later
        advantages[t] = later
    return EpisodeAdvantages(advantages, advantages + values)
