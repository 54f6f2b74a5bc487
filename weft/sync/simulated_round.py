"""A round of islands as one process sees it: the input of the references of sync methods.

Nothing here is shared with what islands do: parameters come one by one, with those of all islands at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from weft.recipe import Sync

T = torch.Tensor


class One(NamedTuple):
    """A parameter on one island: its value ``now``, and ``kept``, its slots by name, which last from round to round."""

    now: T
    kept: dict[str, T]


class Round(NamedTuple):
    """An exchange of one parameter among islands.

    ``ones``: the parameter on every island, by the island's number. ``step`` counts from when rounds of this parameter
    begin, ``offset`` steps after the first. ``past``: a list in which a method keeps what is for later. ``near(i)``:
    the islands that island ``i`` agrees with, itself included.
    """

    ones: dict[int, One]
    step: int
    offset: int
    how: Sync
    past: list[Any]
    near: Callable[[int], Collection[int]]

    @property
    def is_due(self) -> bool:
        return self.step % self.how.every == 0 and self.step + self.offset > 0

    def differences(self) -> dict[int, T]:
        return {
            i: replica.kept["anchor"] - replica.now for i, replica in self.ones.items()
        }

    def mean(self, values: Mapping[int, T]) -> T:
        """Return the mean of ``values``, one tensor by island, over all islands that take part."""
        return torch.stack([values[i] for i in sorted(self.near(min(self.ones)))]).mean(
            0
        )


def step_anchor(replica: One, gradient: T, lr: float, momentum: float) -> None:
    """Update a parameter's anchor along ``gradient`` by PyTorch's SGD, with Nesterov's momentum if ``momentum`` > 0."""
    optimizer = torch.optim.SGD(
        [replica.kept["anchor"].clone()], lr, momentum, nesterov=momentum > 0
    )
    (parameter,) = optimizer.param_groups[0]["params"]
    parameter.grad = gradient
    optimizer.state[parameter]["momentum_buffer"] = replica.kept["outer"].clone()
    optimizer.step()
    replica.kept["anchor"].copy_(parameter)
    # Without momentum PyTorch keeps no buffer, and ours has the last gradient, which nobody reads.
    replica.kept["outer"].copy_(
        optimizer.state[parameter]["momentum_buffer"] if momentum else gradient
    )
