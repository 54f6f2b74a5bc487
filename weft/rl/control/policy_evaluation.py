"""Evaluation of a policy by whole episodes, each action the policy's best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from weft.errors import WeftError
from weft.layout.dims import part
from weft.layout.mesh import Mesh, from_all
from weft.recipe.control_section import Control
from weft.rl.control.environment_pool import EnvironmentPool

#: Stream of the seeds of evaluation, which no training episode has.
EVALUATION = 3
#: Environments of an evaluation, even if the run has fewer.
LEAST = 16


class Evaluated(NamedTuple):
    """Result of an evaluation over several episodes.

    ``mean``, ``std``: mean and standard deviation of the returns by the rewards that are learned from. ``own``: mean of
    the returns by the environment's own rewards. ``steps``: mean length. ``episodes``: number of episodes.
    """

    mean: float
    std: float
    own: float
    steps: float
    episodes: int


def evaluate_policy(
    best: Callable[[np.ndarray], np.ndarray],
    settings: Control,
    about: Mapping[str, Any],
    mesh: Mesh,
    processes: int,
    seed: int,
    stops: Callable[[], bool] = lambda: False,
) -> Evaluated | None:
    """Play ``settings.episodes`` episodes with the policy's best actions. All ranks must call it.

    Every environment plays an equal share of the episodes, so that short episodes do not count more often. Returns None
    if the run has to end at once.

    Arguments:
        ``best``: returns the best actions for observations ``[environments, observed]``.
        ``about``: settings of the environments, as for :class:`EnvironmentPool`.
        ``processes``: number of processes of each rank.
        ``seed``: seed of the episodes.
        ``stops``: returns whether the run has to end at once.
    """
    count = min(settings.episodes, max(settings.environments, LEAST))
    first, last = part(count, mesh.layout.dp, mesh.rank("dp"))
    results: list[tuple[float, float, int]] = []
    if first < last:
        numbers = range(first, last)
        quotas = np.array([part(settings.episodes, count, n) for n in numbers])
        left = quotas[:, 1] - quotas[:, 0]
        with EnvironmentPool(about, numbers, processes, settings.step_seconds, (seed, EVALUATION)) as pool:  # fmt: skip
            sums = np.zeros((len(left), 3))
            while (left > 0).any() and not stops():
                step = pool.step(best(pool.observations))
                sums += np.stack([step.rewards, step.own, np.ones(len(left))], -1)
                ended = step.terminated | step.truncated
                for e in np.flatnonzero(ended & (left > 0)):
                    results.append((sums[e, 0], sums[e, 1], int(sums[e, 2])))
                left = left - ended
                sums[ended | step.dropped] = 0
    everyone = from_all((bool(stops()), results), mesh.step_group)
    if any(stopped for stopped, _ in everyone):
        return None
    rows = np.array([row for _, theirs in everyone for row in theirs])
    if not len(rows):
        raise WeftError("no episode of the evaluation has ended; lower control.time_limit")  # fmt: skip
    mean, own, steps = rows.mean(0).tolist()
    return Evaluated(mean, float(rows[:, 0].std()), own, steps, len(rows))
