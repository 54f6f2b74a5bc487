"""Generalised advantage estimation over steps of several environments (Schulman et al. 2016, 1506.02438)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class EpisodeAdvantages(NamedTuple):
    """Advantages of the actions and returns for the critic to learn, ``[steps, environments]`` each."""

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
    """Return the advantages of collected steps.

    All arrays are ``[steps, environments]`` and have the collected steps only. If a rank was cut off, these are fewer
    than planned, and the last of them is followed by ``next_values`` like any other.

    Args:
        ``rewards``: rewards of the steps.
        ``values``: the critic's value of the observation before each step.
        ``next_values``: its value of the observation after each step; of a truncated episode the last one of that
            episode, not the first of the next.
        ``terminated``: whether an episode terminated at the step, so that nothing of ``next_values`` counts.
        ``ended``: whether the step was the last of its episode here, terminated, truncated or dropped.
        ``gamma``, ``trace``: discount, and lambda of the estimate.
    """
    advantages = np.zeros_like(values)
    later = np.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        ahead = rewards[t] + gamma * next_values[t] * ~terminated[t]
        later = ahead - values[t] + gamma * trace * ~ended[t] * later
        advantages[t] = later
    return EpisodeAdvantages(advantages, advantages + values)
