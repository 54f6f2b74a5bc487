"""Proximal policy optimisation whose result does not depend on the number of ranks (Schulman et al. 2017, 1707.06347).

Environments, noise, and the cut into minibatches are numbered over all ranks. A minibatch is the same transitions
however many ranks hold them: each rank computes with those that it has collected, and sums over the minibatch (of
gradients, and of the advantages' mean and deviation) go over all ranks, as in CaRL (Jaeger et al. 2025, 2504.17838).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from weft.recipe.control_section import Control
from weft.rl.control.action_policy import ActionPolicy
from weft.rl.control.environment_pool import EnvironmentPool
from weft.rl.control.episode_advantages import episode_advantages

T = torch.Tensor

#: Adds a tensor up over all ranks, in place.
SumOverRanks = Callable[[T], None]

#: Streams of random numbers that must not be the same.
ACTIONS, ORDER = 1, 2


@dataclass(frozen=True)
class CollectedSteps:
    """Steps that the environments of a rank have taken with one policy; arrays are ``[steps, environments, ...]``.

    Attributes:
        ``observations``, ``actions``, ``log_probabilities``: the observations, the actions taken, and their
            log-probabilities under the policy.
        ``advantages``, ``returns``: advantage of each action, and target of the critic's prediction.
        ``learns``: whether a step is learned from; steps of a dropped episode are not.
        ``first``: number of the rank's first environment among all environments of the run.
    """

    observations: np.ndarray
    actions: np.ndarray
    log_probabilities: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray
    learns: np.ndarray
    first: int


@dataclass
class EpisodeCount:
    """Sums over episodes that have ended.

    ``episodes``: number of episodes. ``returns``: sum of the returns that are learned from. ``own``: sum of the returns
    by the environments' own rewards. ``steps``: sum of the lengths.
    """

    episodes: int = 0
    returns: float = 0.0
    own: float = 0.0
    steps: int = 0

    def numbers(self) -> list[float]:
        """Return the four sums as a list, so that they can be added up over ranks."""
        return [self.episodes, self.returns, self.own, self.steps]


class RunningEpisodes:
    """Returns and lengths of the episodes that run in ``count`` environments.

    ``ended`` sums the episodes that have ended.
    """

    def __init__(self, count: int) -> None:
        self._return, self._own = np.zeros(count), np.zeros(count)
        self._steps = np.zeros(count, int)
        self.ended = EpisodeCount()

    def add(
        self, rewards: np.ndarray, own: np.ndarray, ended: np.ndarray, lost: np.ndarray
    ) -> None:
        """Add one step of all environments. All arrays are ``[environments]``.

        ``rewards``: rewards to learn from. ``own``: the environments' own rewards. ``ended``: whether the episode ended
        with the step. ``lost``: whether it was dropped with its process; it is then not counted.
        """
        self._return += rewards
        self._own += own
        self._steps += 1
        self._count(ended)
        for sums in (self._return, self._own, self._steps):
            sums[ended | lost] = 0

    def add_for(self, number: int, reward: float, own: float, ended: bool) -> None:
        """Add a step of environment ``number`` alone.

        The arguments are single values in place of the arrays of :meth:`add`.
        """
        here = np.arange(len(self._steps)) == number
        self._return[number] += reward
        self._own[number] += own
        self._steps[number] += 1
        self._count(here & ended)
        if ended:
            self.forget(number)

    def forget(self, number: int) -> None:
        """Discard the running episode of environment ``number``, so that it is never counted."""
        for sums in (self._return, self._own, self._steps):
            sums[number] = 0

    def _count(self, ended: np.ndarray) -> None:
        self.ended.episodes += int(ended.sum())
        self.ended.returns += float(self._return[ended].sum())
        self.ended.own += float(self._own[ended].sum())
        self.ended.steps += int(self._steps[ended].sum())

    def take(self) -> EpisodeCount:
        """Return the sums over the episodes that have ended since the last call, and begin new sums."""
        taken, self.ended = self.ended, EpisodeCount()
        return taken


def action_generators(
    seed: int, step: int, numbers: Sequence[int]
) -> list[np.random.Generator]:
    """Return a random generator of actions for each environment, which depends on ``seed``, ``step`` and its number
    only.

    ``step``: number of the run's step. ``numbers``: numbers of the environments.
    """
    return [
        np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, ACTIONS, step, n])))
        for n in numbers
    ]  # fmt: skip


def collect_steps(
    pool: EnvironmentPool,
    policy: ActionPolicy,
    settings: Control,
    generators: Sequence[np.random.Generator],
    first: int,
    episodes: RunningEpisodes,
    stops: Callable[[int], bool] = lambda step: False,
) -> CollectedSteps:
    """Act in all environments of ``pool`` by ``policy`` for ``settings.horizon`` steps; return these steps with their
    advantages.

    ``generators``: a random generator of actions for each environment. ``first``: number of the pool's first
    environment. ``episodes``: counts the returns of episodes. ``stops``: called after each step with the number of
    steps taken; if it returns True, this rank stops early. That happens when enough other ranks have taken all their
    steps.
    """
    like = next(policy.parameters())
    rows: list[dict[str, np.ndarray]] = []
    begun = np.zeros(len(pool.observations), int)  # where each episode began
    learns = np.ones((settings.horizon, len(begun)), bool)
    for t in range(settings.horizon):
        seen = pool.observations
        with torch.no_grad():
            inputs = torch.as_tensor(seen, dtype=like.dtype, device=like.device)
            actions = policy.draw(policy.outputs(inputs), generators)
            acted = torch.as_tensor(actions, device=like.device)
            if policy.kind != "categorical":
                acted = acted.to(like.dtype)
            judged = policy.judge(inputs, acted)
            values = policy.values(inputs)
        step = pool.step(actions)
        ended = step.terminated | step.truncated
        episodes.add(step.rewards, step.own, ended, step.dropped)
        for e in np.flatnonzero(step.dropped):
            learns[begun[e] : t + 1, e] = False
        begun[ended | step.dropped] = t + 1
        rows.append({
            "observations": seen, "actions": actions, "finals": step.finals,
            "log_probabilities": judged.log_probabilities.double().cpu().numpy(),
            "values": values.double().cpu().numpy(), "rewards": step.rewards,
            "terminated": step.terminated, "ended": ended | step.dropped,
        })  # fmt: skip
        if stops(t + 1):
            break
    steps = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    count = len(rows)
    # what follows the collected steps, not what an earlier rollout had left in later rows
    next_values = np.empty_like(steps["values"])
    next_values[:-1] = steps["values"][1:]
    again = steps["ended"].copy()
    again[-1] = True
    if again.any():
        with torch.no_grad():
            finals = torch.as_tensor(
                steps["finals"][again], dtype=like.dtype, device=like.device
            )
            next_values[again] = policy.values(finals).double().cpu().numpy()
    estimate = episode_advantages(
        steps["rewards"], steps["values"], next_values, steps["terminated"], steps["ended"],
        settings.gamma, settings.trace,
    )  # fmt: skip
    return CollectedSteps(
        steps["observations"],
        steps["actions"],
        steps["log_probabilities"],
        estimate.advantages,
        estimate.returns,
        learns[:count],
        first,
    )


class OwnShare(NamedTuple):
    """One rank's share of a minibatch.

    ``rows``: numbers of the rank's own transitions in it; the transition of an environment at a step has the number
    ``step * environments + environment``. ``size``: number of transitions in the minibatch over all ranks.
    """

    rows: np.ndarray
    size: int


def minibatches(
    collected: CollectedSteps,
    settings: Control,
    number: int,
    seed: int,
    add_up: SumOverRanks,
) -> Iterator[OwnShare]:
    """Yield the minibatches of all epochs of the run's step ``number``, each as this rank's share. All ranks must call
    it.

    The order is drawn over the transitions of all ranks, so that minibatches do not depend on how many ranks there are.
    ``collected``: this rank's steps. ``seed``: seed of the order. ``add_up``: adds a tensor up over all ranks.
    """
    every, own = settings.environments, collected.learns.shape[1]
    mask = torch.zeros(settings.horizon, every, dtype=torch.int32)
    here = slice(collected.first, collected.first + own)
    mask[: len(collected.learns), here] = torch.from_numpy(collected.learns).int()
    add_up(mask)
    learns = mask.numpy().reshape(-1) > 0
    count = max(1, round(int(learns.sum()) / settings.minibatch))
    for epoch in range(settings.epochs):
        order = np.random.default_rng([seed, ORDER, number, epoch]).permutation(
            len(learns)
        )
        for ids in np.array_split(order[learns[order]], count):
            step, environment = ids // every, ids % every
            held = (environment >= here.start) & (environment < here.stop)
            yield OwnShare(
                step[held] * own + environment[held] - here.start, len(ids)
            )  # fmt: skip


class Learned(NamedTuple):
    """Metrics of learning in one step of the run, as means over its minibatches.

    ``loss``: loss of policy, critic and entropy together. ``critic``: the critic's loss. ``entropy``: entropy of the
    policy. ``kl``: estimate (k3) of the divergence from the policy that collected the transitions. ``clipped``: share
    of transitions whose ratio was clipped. ``grad_norm``: norm of the gradients before clipping. ``updates``: number of
    minibatches.
    """

    loss: float
    critic: float
    entropy: float
    kl: float
    clipped: float
    grad_norm: float
    updates: int


def learn_from_steps(
    policy: ActionPolicy,
    optimizer: torch.optim.Optimizer,
    collected: CollectedSteps,
    settings: Control,
    number: int,
    seed: int,
    add_up: SumOverRanks,
) -> Learned:
    """Update ``policy`` by PPO with the steps that all ranks have collected, and return metrics. All ranks must call
    it.

    ``number``: number of the run's step, which together with ``seed`` determines the order of transitions. ``add_up``:
    adds a tensor up over all ranks.
    """
    like = next(policy.parameters())
    flat = {
        name: torch.as_tensor(getattr(collected, name), device=like.device).flatten(0, 1)
        for name in ("observations", "actions", "log_probabilities", "advantages", "returns")
    }  # fmt: skip
    flat = {
        name: value.to(like.dtype)
        if value.is_floating_point()
        else value
        for name, value in flat.items()
    }  # fmt: skip
    parameters = [p for p in policy.parameters() if p.requires_grad]
    sizes = [p.numel() for p in parameters]
    sums = np.zeros(6)
    updates = 0
    for share in minibatches(collected, settings, number, seed, add_up):
        rows = torch.from_numpy(share.rows).to(like.device)
        batch = {name: value[rows] for name, value in flat.items()}
        advantages = standardised(batch["advantages"], share.size, add_up)
        judged = policy.judge(batch["observations"], batch["actions"])
        values = policy.values(batch["observations"])
        log_ratio = judged.log_probabilities - batch["log_probabilities"]
        ratio = log_ratio.exp()
        bounded = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.minimum(ratio * advantages, bounded * advantages).sum()
        critic = 0.5 * (values - batch["returns"]).square().sum()
        entropy = judged.entropies.sum()
        loss = settings.value * critic - gain - settings.entropy * entropy
        gradients = torch.autograd.grad(loss / share.size, parameters)
        with torch.no_grad():
            seen = torch.stack([
                loss, critic, entropy, (ratio - 1 - log_ratio).sum(), (bounded != ratio).sum().to(loss.dtype)
            ])  # fmt: skip
            together = torch.cat([*(g.flatten() for g in gradients), seen / share.size])
            add_up(together)
            *summed, means = together.split([*sizes, len(seen)])
            norm = torch.cat(summed).norm()
            shrink = (settings.max_norm / (norm + 1e-12)).clamp(max=1.0)
            for parameter, gradient in zip(parameters, summed, strict=True):
                parameter.grad = gradient.view_as(parameter) * shrink
        optimizer.step()
        sums += [*means.tolist(), float(norm)]
        updates += 1
    loss_, critic_, entropy_, kl, clipped, norm_ = (sums / updates).tolist()
    return Learned(loss_, critic_, entropy_, kl, clipped, norm_, updates)


def standardised(advantages: T, size: int, add_up: SumOverRanks) -> T:
    """Return a rank's ``advantages`` of a minibatch, shifted and scaled so that those of all ranks together have mean 0
    and deviation 1. All ranks must call it.

    ``size``: number of transitions in the minibatch over all ranks. ``add_up``: adds a tensor up over all ranks.
    """
    total = advantages.sum().reshape(1)
    add_up(total)
    centred = advantages - total / size
    squares = centred.square().sum().reshape(1)
    add_up(squares)
    return centred / ((squares / max(1, size - 1)).sqrt() + 1e-8)
