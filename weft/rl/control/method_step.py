"""What a control run asks of a method, and what it gets of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class MethodStep(NamedTuple):
    """Result of one step of a control run, the same on all ranks.

    ``transitions``: number of steps that the environments of all ranks have taken. ``updates``: number of updates of
    the policy. ``values``: metrics to record, by name. ``lines``: lines to print.
    """

    transitions: int
    updates: int
    values: dict[str, Any]
    lines: list[str]


class ControlMethod(Protocol):
    """Interface of a learning method for control tasks, such as PPO, to the run that calls it.

    ``tensors``: tensors to checkpoint, by name; ``parameters``: number of parameters; ``facts``: settings in which a
    resumed run must agree.
    """

    tensors: Mapping[str, torch.Tensor]
    parameters: int
    facts: dict[str, Any]

    def resume(self, begun: int, updates: int) -> None:
        """Prepare to go on from a checkpoint. The caller has loaded :attr:`tensors` before.

        ``begun``: number of steps that the run has taken; ``updates``: number of updates in them.
        """

    def take_step(self, number: int) -> MethodStep:
        """Take the run's step ``number``, from 0: act in environments and learn; return the result. All ranks must call
        it.
        """

    def best(self, observations: np.ndarray) -> np.ndarray:
        """Return the policy's actions without exploration for ``observations``, ``[environments, observed]``."""

    def close(self) -> None:
        """End all processes that act in environments."""
