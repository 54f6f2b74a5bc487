"""Learners from stored transitions: deep Q-learning, and soft actor-critic."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import nn

from weft.errors import UsageError
from weft.recipe.control_section import Control
from weft.rl.control.acting_policy import HIGHEST, LOWEST
from weft.rl.control.action_policy import perceptron
from weft.rl.control.control_state import adam_tensors
from weft.rl.control.environment_kinds import ActionForm
from weft.rl.control.transition_replay import Transitions

T = torch.Tensor


class StoredLearner(Protocol):
    """Interface of learners from a replay buffer, whose policy is one perceptron.

    ``acting``: the policy's perceptron; ``sizes``: its widths; ``tensors``: tensors to checkpoint, by name.
    """

    acting: nn.Sequential
    sizes: tuple[int, ...]
    tensors: Mapping[str, T]

    def update(
        self, batch: Transitions, draw: np.random.Generator
    ) -> dict[str, float | T]:
        """Learn from the minibatch ``batch``, and return metrics by name. ``draw``: random generator of all noise."""


def move_average(target: nn.Module, model: nn.Module, share: float) -> None:
    """Move the parameters of ``target`` the fraction ``share`` of the way towards those of ``model``, in place."""
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), share)


def learner_tensors(
    modules: Mapping[str, nn.Module], optimizers: Sequence[torch.optim.Adam]
) -> dict[str, T]:
    """Return the parameters of ``modules`` and the moments of ``optimizers`` by name, for a checkpoint. They are the
    tensors themselves, so that loading fills them.
    """
    names: dict[T, str] = {
        p: f"{module}.{name}"
        for module, each in modules.items()
        for name, p in each.named_parameters()
    }
    tensors = {f"model.{name}": p for p, name in names.items()}
    for optimizer in optimizers:
        tensors |= adam_tensors(optimizer, names)
    return tensors


class DqnLearner:
    """Deep Q-learning with a moving average as target (Mnih et al. 2015), for actions that are choices.

    ``form``: form of the environment; ``settings``: the section ``[control]``; ``seed``: seed of the weights;
    ``device``, ``dtype``: where the networks are, and their type. Raises :class:`UsageError` if actions are numbers.
    """

    def __init__(
        self, form: ActionForm, settings: Control, seed: int, device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        if not form.choices:
            raise UsageError(
                "control.method = 'dqn' chooses one of several actions, and the environment's are numbers; use 'sac' "
                "or 'ppo'"
            )
        self._settings = settings
        self.sizes: tuple[int, ...] = (form.observed, *settings.hidden, form.choices)
        generator = torch.Generator().manual_seed(seed)
        self.acting = perceptron(self.sizes, 1.0, generator, nn.ReLU).to(device, dtype)
        self._target = copy.deepcopy(self.acting).requires_grad_(False)
        self._optimizer = torch.optim.Adam(self.acting.parameters(), lr=settings.lr)
        modules = {"values": self.acting, "target": self._target}
        self.tensors: Mapping[str, T] = learner_tensors(modules, [self._optimizer])

    def update(
        self, batch: Transitions, draw: np.random.Generator
    ) -> dict[str, float | T]:
        """Learn from the minibatch ``batch`` by Q-learning, and return metrics by name.

        See :meth:`StoredLearner.update`.
        """
        settings = self._settings
        with torch.no_grad():
            ahead = self._target(batch.nexts).max(-1).values
            aim = batch.rewards + settings.gamma * (1 - batch.terminated) * ahead
        values = self.acting(batch.observations)
        chosen = values.gather(-1, batch.actions.unsqueeze(-1)).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(chosen, aim)
        self._optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.acting.parameters(), settings.max_norm)
        self._optimizer.step()
        move_average(self._target, self.acting, settings.average)
        return {"loss": loss.detach(), "grad_norm": norm}


class SacLearner:
    """Soft actor-critic with two critics and a learned temperature (Haarnoja et al. 2018, 1812.05905).

    Actions are numbers from -1 to 1, which are scaled to the environment's bounds. Arguments: see :class:`DqnLearner`.
    Raises :class:`UsageError` if actions are choices, or have no bounds.
    """

    def __init__(
        self, form: ActionForm, settings: Control, seed: int, device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        if form.choices or not form.bounded:
            has = "choices" if form.choices else "numbers without bounds"
            raise UsageError(
                f"control.method = 'sac' needs actions that are numbers with bounds, and the environment's are {has}; "
                f"use {'dqn' if form.choices else 'ppo'!r}"
            )
        self._settings = settings
        self.sizes: tuple[int, ...] = (
            form.observed,
            *settings.hidden,
            2 * form.numbers,
        )
        generator = torch.Generator().manual_seed(seed)
        critic = (form.observed + form.numbers, *settings.hidden, 1)
        self.acting = perceptron(self.sizes, 1.0, generator, nn.ReLU).to(device, dtype)
        self._critics = nn.ModuleList(
            perceptron(critic, 1.0, generator, nn.ReLU) for _ in range(2)
        ).to(device, dtype)
        self._targets = copy.deepcopy(self._critics).requires_grad_(False)
        self._temperature = nn.ParameterList(
            [nn.Parameter(torch.zeros((), device=device, dtype=dtype))]
        )
        self._entropy = -float(form.numbers)
        self._actor_steps, self._critic_steps, self._temperature_steps = (
            torch.optim.Adam(module.parameters(), lr=settings.lr)
            for module in (self.acting, self._critics, self._temperature)
        )
        modules = {
            "actor": self.acting,
            "critics": self._critics,
            "targets": self._targets,
            "temperature": self._temperature,
        }
        self.tensors: Mapping[str, T] = learner_tensors(
            modules, [self._actor_steps, self._critic_steps, self._temperature_steps]
        )

    def _act(self, observations: T, noise: T) -> tuple[T, T]:
        """Return actions from -1 to 1, and their log-densities."""
        mean, raw = self.acting(observations).chunk(2, -1)
        log_std = LOWEST + (HIGHEST - LOWEST) / 2 * (raw.tanh() + 1)
        before = mean + log_std.exp() * noise
        actions = before.tanh()
        normal = -0.5 * noise.square() - log_std - 0.5 * np.log(2 * np.pi)
        # log(1 - tanh^2), which does not underflow
        slope = 2 * (np.log(2) - before - nn.functional.softplus(-2 * before))
        return actions, (normal - slope).sum(-1)

    def _judge(self, critics: nn.ModuleList, observations: T, actions: T) -> list[T]:
        both = torch.cat([observations, actions], -1)
        return [critic(both).squeeze(-1) for critic in critics]

    def update(
        self, batch: Transitions, draw: np.random.Generator
    ) -> dict[str, float | T]:
        """Learn from the minibatch ``batch``: critics, policy and temperature. Returns metrics by name.

        See :meth:`StoredLearner.update`.
        """
        settings = self._settings
        shape = (2, *batch.actions.shape)
        noise = torch.from_numpy(draw.standard_normal(shape)).to(batch.actions)
        (log_temperature,) = self._temperature
        temperature = log_temperature.detach().exp()
        with torch.no_grad():
            following, logs = self._act(batch.nexts, noise[0])
            ahead = torch.minimum(*self._judge(self._targets, batch.nexts, following))
            ahead = ahead - temperature * logs
            aim = batch.rewards + settings.gamma * (1 - batch.terminated) * ahead
        judged = self._judge(self._critics, batch.observations, batch.actions)
        loss = sum((values - aim).square().mean() for values in judged)
        assert isinstance(loss, torch.Tensor)
        self._critic_steps.zero_grad()
        loss.backward()
        self._critic_steps.step()

        actions, logs = self._act(batch.observations, noise[1])
        worth = torch.minimum(*self._judge(self._critics, batch.observations, actions))
        actor = (temperature * logs - worth).mean()
        self._actor_steps.zero_grad()
        actor.backward()
        self._actor_steps.step()

        more = -(log_temperature * (logs.detach() + self._entropy)).mean()
        self._temperature_steps.zero_grad()
        more.backward()
        self._temperature_steps.step()
        move_average(self._targets, self._critics, settings.average)
        return {
            "loss": loss.detach(),
            "actor": actor.detach(),
            "entropy": -logs.detach().mean(),
            "temperature": temperature,
        }


def stored_learner(
    settings: Control, form: ActionForm, seed: int, device: torch.device, dtype: torch.dtype,
) -> StoredLearner:  # fmt: skip
    """Return the learner that ``settings.method`` names, deep Q-learning ("dqn") or soft actor-critic. ``device`` and
    ``dtype``: where its networks are, and their type. The other arguments are as for :class:`DqnLearner`.
    """
    kind = DqnLearner if settings.method == "dqn" else SacLearner
    return kind(form, settings, seed, device, dtype)
