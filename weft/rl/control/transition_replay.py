"""Transitions that are kept, to be learned from more than once, in the order in which they came."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from weft.rl.control.environment_kinds import ActionForm

T = torch.Tensor


class Transitions(NamedTuple):
    """A minibatch of transitions: observations ``[rows, observed]``, actions, rewards ``[rows]``, whether the episode
    terminated ``[rows]``, and next observations (``nexts``) ``[rows, observed]``.
    """

    observations: T
    actions: T
    rewards: T
    terminated: T
    nexts: T


class TransitionReplay:
    """Replay buffer: the newest ``capacity`` transitions of a run, from which rows are drawn with replacement.

    ``form``: form of the environment; ``dtype``: type of the numbers; ``device``: device of the buffer.

    Attributes:
        ``tensors``: tensors to checkpoint, by name.
        ``added``: number of transitions added so far, including overwritten ones.
    """

    def __init__(
        self, capacity: int, form: ActionForm, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(*shape: int, of: torch.dtype = dtype) -> T:
            return torch.zeros(capacity, *shape, dtype=of, device=device)

        actions = empty(of=torch.int64) if form.choices else empty(form.numbers)
        self._rows = Transitions(
            empty(form.observed), actions, empty(), empty(), empty(form.observed)
        )
        self._capacity, self._count = capacity, torch.zeros(1, dtype=torch.int64)
        self.tensors = {
            f"replay.{name}": rows for name, rows in self._rows._asdict().items()
        }
        self.tensors["replay.count"] = self._count

    @property
    def added(self) -> int:
        return int(self._count)

    def add(
        self,
        observation: np.ndarray,
        action: np.ndarray,
        reward: float,
        terminated: bool,
        following: np.ndarray,
    ) -> None:
        """Add a transition; it overwrites the oldest if the buffer is full.

        ``observation``, ``action``, ``reward``: the transition. ``terminated``: whether the episode ended in a terminal
        state. ``following``: the next observation.
        """
        at = self.added % self._capacity
        values = (observation, action, reward, terminated, following)
        for rows, value in zip(self._rows, values, strict=True):
            rows[at] = torch.tensor(value)
        self._count += 1

    def draw(self, count: int, generator: np.random.Generator) -> Transitions:
        """Return ``count`` transitions, each drawn uniformly from the whole buffer by ``generator``; one may be drawn
        several times.
        """
        at = generator.integers(min(self.added, self._capacity), size=count)
        index = torch.from_numpy(at).to(self._rows.rewards.device)
        return Transitions(*(rows[index] for rows in self._rows))
