"""Rewards of one idea: progress multiplied by soft penalties (CaRL, Jaeger et al. 2025, 2504.17838), or their sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class ShapedStep(NamedTuple):
    """The reward of a step that the policy learns from, and whether a penalty has ended the episode."""

    reward: float
    ended: bool


def severity(value: float, free: float, limit: float) -> float:
    """Return the share of a penalty that an observed ``value`` deserves: 0 if ``|value|`` is at most ``free``, 1 from
    ``limit`` on, and linear in between.
    """
    return float(np.clip((abs(value) - free) / (limit - free), 0.0, 1.0))


class SimpleReward:
    """Reward for one environment that a recipe describes by progress and penalties.

    With ``kind = "product"`` the progress is multiplied by ``1 - penalty x severity`` of every term, so that a penalty
    never outweighs progress. With ``"sum"`` the penalties are subtracted from the progress.

    Args:
        ``kind``: "own", "product" or "sum".
        ``progress``: index of the component of the observation that measures progress. The progress of a step is its
            growth beyond its largest value in the episode. None: the environment's own reward.
        ``terms``: penalties, as the fields of :class:`weft.recipe.control_section.RewardTerm`.
    """

    def __init__(
        self, kind: str, progress: int | None, terms: Sequence[Mapping[str, Any]]
    ) -> None:
        self._kind, self._progress, self._terms = kind, progress, terms
        self._best = 0.0

    def begin(self, observation: np.ndarray) -> None:
        """Begin an episode: forget the progress so far, and start from its first ``observation``, ``[observed]``."""
        if self._progress is not None:
            self._best = float(observation[self._progress])

    def after_step(self, observation: np.ndarray, own: float) -> ShapedStep:
        """Return the reward of a step.

        ``observation``: the observation after the step. ``own``: the environment's own reward.
        """
        if self._kind == "own":
            return ShapedStep(own, False)
        reward = own
        if self._progress is not None:
            here = float(observation[self._progress])
            reward, self._best = max(0.0, here - self._best), max(here, self._best)
        for term in self._terms:
            value = float(observation[term["index"]])
            if term["ends"] and abs(value) > term["limit"]:
                return ShapedStep(0.0, True)
            lost = term["penalty"] * severity(value, term["free"], term["limit"])
            reward = reward * (1 - lost) if self._kind == "product" else reward - lost
        return ShapedStep(reward, False)
