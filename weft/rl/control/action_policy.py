"""Policies over actions: categorical, Gaussian and beta distributions, and the networks that give their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from weft.errors import UsageError
from weft.rl.control.environment_kinds import ActionForm

T = torch.Tensor

#: Beta's numbers are kept so far from 0 and 1, where its density may be infinite.
EDGE = 1e-6


class JudgedActions(NamedTuple):
    """Log-probabilities of actions under a policy, and entropies of the policy's distributions, each ``[rows]``."""

    log_probabilities: T
    entropies: T


def policy_kind(word: str, form: ActionForm) -> str:
    """Return the kind of the policy's distribution: "categorical", "gaussian" or "beta".

    ``word``: the setting ``control.policy``; "auto" chooses by ``form``. Raises :class:`UsageError` if the kind does
    not fit the actions of the environment.
    """
    if word == "auto":
        if form.choices:
            return "categorical"
        return "beta" if form.bounded else "gaussian"
    if (word == "categorical") != bool(form.choices):
        has = "choices" if form.choices else "numbers"
        fits = "'categorical'" if form.choices else "'gaussian' or 'beta'"
        raise UsageError(
            f"control.policy = {word!r}, and the environment's actions are {has}; use {fits} or 'auto'"
        )
    if word == "beta" and not form.bounded:
        raise UsageError(
            "control.policy = 'beta' needs actions with bounds, and these have none; use 'gaussian'"
        )
    return word


def perceptron(
    sizes: Sequence[int],
    last_gain: float,
    generator: torch.Generator,
    activation: type[nn.Module] = nn.Tanh,
) -> nn.Sequential:
    """Return a multilayer perceptron with orthogonal weights.

    ``sizes``: widths from the input to the output. ``last_gain``: scale of the last layer's weights. ``generator``:
    random generator of the weights. ``activation``: module between two layers.
    """
    layers: list[nn.Module] = []
    for number, (a, b) in enumerate(pairwise(sizes)):
        last = number == len(sizes) - 2
        linear = nn.Linear(a, b)
        gain = last_gain if last else math.sqrt(2)
        nn.init.orthogonal_(linear.weight, gain, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, activation()]
    return nn.Sequential(*layers)


class ActionPolicy(nn.Module):
    """Policy for control tasks: an actor and a critic, as two separate networks.

    ``form``: form of the environment's observations and actions; ``kind``: "categorical", "gaussian" or "beta";
    ``hidden``: widths of hidden layers; ``seed``: seed of the initial weights.
    """

    low: T
    high: T
    shift: T
    scale: T

    def __init__(
        self, form: ActionForm, kind: str, hidden: Sequence[int], seed: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.kind = kind
        outputs = {
            "categorical": form.choices,
            "gaussian": form.numbers,
            "beta": 2 * form.numbers,
        }[kind]
        self.actor = perceptron((form.observed, *hidden, outputs), 0.01, generator)
        self.critic = perceptron((form.observed, *hidden, 1), 1.0, generator)
        if kind == "gaussian":
            self.log_std = nn.Parameter(torch.zeros(form.numbers))
        self.register_buffer("low", torch.tensor(form.low or (0.0,)))
        self.register_buffer("high", torch.tensor(form.high or (0.0,)))
        # observations are normalised with what has been seen so far
        self.register_buffer("shift", torch.zeros(form.observed))
        self.register_buffer("scale", torch.ones(form.observed))

    def normalised(self, observations: T) -> T:
        """Return ``observations``, ``[rows, observed]``, shifted and scaled by :attr:`shift` and :attr:`scale`, and
        limited to 10 in magnitude, as the input of both networks.
        """
        return ((observations - self.shift) / self.scale).clamp(-10, 10)

    def values(self, observations: T) -> T:
        """Return the values of ``observations`` that the critic predicts, float ``[rows]``."""
        return self.critic(self.normalised(observations)).squeeze(-1)

    def outputs(self, observations: T) -> T:
        """Return the actor's outputs (parameters of its distributions) for ``observations``: ``[rows, outputs]``."""
        return self.actor(self.normalised(observations))

    def judge(self, observations: T, actions: T) -> JudgedActions:
        """Return the log-probabilities of ``actions`` under the policy, and the entropies of its distributions.

        ``observations``: ``[rows, observed]``. ``actions``: choices ``[rows]``, or numbers ``[rows, numbers]`` within
        the environment's bounds. Log-probabilities of numbers are densities in the environment's units.
        """
        out = self.outputs(observations)
        if self.kind == "categorical":
            logs = out.log_softmax(-1)
            chosen = logs.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
            return JudgedActions(chosen, -(logs.exp() * logs).sum(-1))
        if self.kind == "gaussian":
            normal = torch.distributions.Normal(out, self.log_std.exp())
            return JudgedActions(
                normal.log_prob(actions).sum(-1), normal.entropy().sum(-1)
            )
        beta = torch.distributions.Beta(*beta_parameters(out), validate_args=False)
        width = self.high - self.low
        share = ((actions - self.low) / width).clamp(EDGE, 1 - EDGE)
        log_width = width.log().sum()
        return JudgedActions(
            beta.log_prob(share).sum(-1) - log_width, beta.entropy().sum(-1) + log_width
        )

    def draw(
        self, outputs: T, generators: Sequence[np.random.Generator] | None
    ) -> np.ndarray:
        """Draw an action for each row of the actor's ``outputs``. Returns choices ``[rows]``, or numbers ``[rows,
        numbers]``.

        ``generators``: a random generator for each row, so that a row's action does not depend on the other rows. None:
        return the most likely actions, or the means of beta distributions.
        """
        out = outputs.detach().double().cpu().numpy()
        if self.kind == "categorical":
            if generators is None:
                return out.argmax(-1)
            weights = np.exp(out - out.max(-1, keepdims=True))
            sums = weights.cumsum(-1)
            at = np.array([g.random() for g in generators]) * sums[:, -1]
            return np.minimum((sums <= at[:, None]).sum(-1), out.shape[-1] - 1)
        if self.kind == "gaussian":
            if generators is None:
                return out
            std = self.log_std.detach().double().exp().cpu().numpy()
            noise = np.stack([g.standard_normal(out.shape[-1]) for g in generators])
            return out + std * noise
        a, b = (
            each.double().cpu().numpy() for each in beta_parameters(outputs.detach())
        )
        if generators is None:
            share = a / (a + b)
        else:
            share = np.stack([g.beta(a[i], b[i]) for i, g in enumerate(generators)])
        low, high = self.low.double().cpu().numpy(), self.high.double().cpu().numpy()
        return low + (high - low) * np.clip(share, EDGE, 1 - EDGE)


def beta_parameters(outputs: T) -> tuple[T, T]:
    """Convert the actor's outputs to both parameters of beta distributions, each ``[rows, numbers]``.

    The parameters are above 1, so that the density has a single peak. ``outputs``: ``[rows, 2 x numbers]`` (Petrazzini
    and Antonelo 2021, 2111.02202).
    """
    a, b = (nn.functional.softplus(outputs) + 1).chunk(2, -1)
    return a, b
