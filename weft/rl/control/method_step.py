"""What a control run asks of a method, and what it gets of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class MethodStep(NamedTuple):
    """Result of one step of a control run, the same on all ranks.

    ``transitions``: steps of environments that all ranks have taken; ``updates``: updates of the policy; ``values``:
    what is recorded, by name; ``lines``: lines to print.
    """

    transitions: int
    updates: int
    values: dict[str, Any]
    lines: list[str]


class ControlMethod(Protocol):
    """Interface of learning methods, such as PPO, to the run.

    ``tensors``: tensors to checkpoint, by name; ``parameters``: number of parameters; ``facts``: settings in which a
    resumed run must agree.
    """

    tensors: Mapping[str, torch.Tensor]
    parameters: int
    facts: dict[str, Any]

    def resume(self, begun: int, updates: int) -> None:
        """Prepare to go on after ``begun`` steps with ``updates`` updates, whose tensors have been loaded."""

    def take_step(self, number: int) -> MethodStep:
        """Take the run's step ``number``, from 0. Collective."""

    def best(self, observations: np.ndarray) -> np.ndarray:
        """Return the best actions for ``observations``, ``[environments, observed]``."""

    def close(self) -> None:
        """End all processes of the method."""
