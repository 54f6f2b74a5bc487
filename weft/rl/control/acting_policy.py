"""Policies of off-policy methods as workers act by them: networks in NumPy, so that a worker needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from weft.rl.control.environment_kinds import ActionForm

#: Limits of a Gaussian's log-deviation, as in CleanRL's SAC.
LOWEST, HIGHEST = -5.0, 2.0


class ActingLayer(NamedTuple):
    """Linear layer of a network in NumPy: ``weight`` ``[outputs, inputs]`` and ``bias`` ``[outputs]``."""

    weight: np.ndarray
    bias: np.ndarray


def split_weights(flat: np.ndarray, sizes: Sequence[int]) -> list[ActingLayer]:
    """Return the layers of a perceptron, as views of ``flat``, which holds all its parameters one after another.

    ``sizes``: widths from the input to the output.
    """
    layers, at = [], 0
    for a, b in pairwise(sizes):
        weight = flat[at : at + a * b].reshape(b, a)
        layers.append(ActingLayer(weight, flat[at + a * b : at + a * b + b]))
        at += a * b + b
    return layers


def network_outputs(layers: Sequence[ActingLayer], rows: np.ndarray) -> np.ndarray:
    """Return a perceptron's outputs, ``[rows, outputs]``, for the inputs ``rows``, ``[rows, inputs]``. Between layers
    is ReLU.
    """
    for number, layer in enumerate(layers):
        rows = rows @ layer.weight.T + layer.bias
        if number < len(layers) - 1:
            rows = np.maximum(rows, 0)
    return rows


class ChosenAction(NamedTuple):
    """An action in two forms: ``kept`` for the replay buffer, and ``native`` for the environment.

    For choices both are the index. Otherwise ``kept`` are numbers from -1 to 1, and ``native`` the same numbers scaled
    to the environment's bounds.
    """

    kept: np.ndarray
    native: np.ndarray


def scaled_action(form: ActionForm, unit: np.ndarray) -> np.ndarray:
    """Return the numbers of an action within the environment's bounds. ``unit``: the numbers from -1 to 1,
    ``[form.numbers]``; ``form``: form of the actions, with their bounds.
    """
    low, high = np.array(form.low), np.array(form.high)
    return (low + high) / 2 + (high - low) / 2 * unit


def random_action(form: ActionForm, draw: np.random.Generator) -> ChosenAction:
    """Return a random action of the form ``form``, drawn uniformly by the generator ``draw``."""
    if form.choices:
        choice = np.array(draw.integers(form.choices))
        return ChosenAction(choice, choice)
    unit = draw.uniform(-1, 1, form.numbers)
    return ChosenAction(unit, scaled_action(form, unit))


def exploring_action(
    form: ActionForm,
    layers: Sequence[ActingLayer],
    observation: np.ndarray,
    draw: np.random.Generator,
    explore: float,
) -> ChosenAction:
    """Return the action for one ``observation``, ``[observed]``, with the policy's exploration.

    ``form``: form of the actions; ``layers``: the policy's network; ``draw``: random generator. Among choices it is the
    one with the highest value or, with probability ``explore``, a random one. Continuous actions are drawn from a
    Gaussian and squashed by tanh.
    """
    dtype = layers[0].weight.dtype
    if form.choices:
        if draw.random() < explore:
            return random_action(form, draw)
        values = network_outputs(layers, observation[None].astype(dtype))
        choice = np.array(values[0].argmax())
        return ChosenAction(choice, choice)
    mean, raw = np.split(network_outputs(layers, observation[None].astype(dtype))[0], 2)
    log_std = LOWEST + (HIGHEST - LOWEST) / 2 * (np.tanh(raw) + 1)
    noise = draw.standard_normal(form.numbers).astype(dtype)
    unit = np.tanh(mean + np.exp(log_std) * noise).astype(np.float64)
    return ChosenAction(unit, scaled_action(form, unit))


def best_actions(
    form: ActionForm, layers: Sequence[ActingLayer], observations: np.ndarray
) -> np.ndarray:
    """Return the policy's actions without exploration for ``observations``, ``[rows, observed]``: choices ``[rows]``,
    or numbers ``[rows, numbers]`` within the environment's bounds. ``form``: form of the actions; ``layers``: the
    policy's network.
    """
    outputs = network_outputs(layers, observations.astype(layers[0].weight.dtype))
    if form.choices:
        return outputs.argmax(-1)
    mean, _ = np.split(outputs, 2, axis=-1)
    return scaled_action(form, np.tanh(mean).astype(np.float64))
