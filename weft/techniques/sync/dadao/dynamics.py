"""DADAO's constants, and its differential equation between events (Nabli & Oyallon 2023).

The unit of time is the time between two gradients of an island. Rows of a state ``[6, n]`` are those of the paper:
``x, x~, y, y~, z, z~``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from weft.sync.gossip_dynamics import GossipDynamics, links_of

if TYPE_CHECKING:
    from weft.recipe import Sync
    from weft.techniques.sync.dadao import DADAOSettings

X, X_AHEAD, Y, Y_AHEAD, Z, Z_AHEAD = range(6)


@dataclass(frozen=True)
class Dynamics(GossipDynamics):
    """Dynamics of DADAO: how an island's state of six vectors changes by gradients, by exchanges, and between them.

    A unit of time is the time between two gradients of an island. ``condition``: condition number of the loss;
    ``stride``: factor on the change of the parameters that counts as a gradient; ``links``: pairs of islands that
    exchange; ``exchanges``: mean number of exchanges over all links in a unit of time, 0: the number that the theory
    demands; ``pace``: units of time of the paper's equation in a unit of time here. The paper takes a gradient in each
    of its units, which is 1; other paces are not the paper's.
    """

    condition: float
    stride: float
    pace: float = 1.0

    @classmethod
    def of(cls, own: DADAOSettings, how: Sync, islands: int) -> Dynamics:
        """Build the dynamics for a number of ``islands`` from the settings of DADAO and of section ``[sync]``."""
        links = links_of(how, islands)
        return cls(
            own.condition, own.stride, own.pace, links=links, exchanges=own.exchanges
        )

    @property
    def needed(self) -> float:
        return self.pace * super().needed

    @property
    def root(self) -> float:
        """Rate, per unit of the paper's time, at which each accelerated vector of the state and its slow partner
        approach each other: ``(2 condition)^(-1/2)``.
        """
        return float((2 * self.condition) ** -0.5)

    @property
    def shift(self) -> float:
        """Half the assumed smallest curvature of the loss, ``nu`` in the paper. As gradient of the loss counts here the
        change of the parameters by ``sync.every`` local steps.
        """
        return self.root**2 / (4 * self.stride)

    def flow(self, time: float) -> torch.Tensor:
        """Return the matrix ``[6, 6]`` that maps a state to the state after ``time`` without an event."""
        return torch.linalg.matrix_exp(self._slope * (self.pace * time))

    @cached_property
    def _slope(self) -> torch.Tensor:
        root, pull = self.root, 1 / (2 * self.root)
        slope = torch.zeros(6, 6, dtype=torch.float64)
        slope[X, X], slope[X, X_AHEAD] = -root / 8, root / 8
        slope[X_AHEAD, X], slope[X_AHEAD, X_AHEAD] = root / 8, -root / 8
        slope[Y, Y], slope[Y, Y_AHEAD] = -root / 4, root / 4
        slope[Y_AHEAD, X_AHEAD], slope[Y_AHEAD, Y], slope[Y_AHEAD, Z] = (
            -pull * self.shift,
            -pull,
            -pull,
        )
        slope[Z, Z], slope[Z, Z_AHEAD] = -root / 4, root / 4
        slope[Z_AHEAD, Z], slope[Z_AHEAD, Z_AHEAD] = root / 8, -root / 8
        return slope

    def learn(self, state: torch.Tensor, gradient: torch.Tensor) -> None:
        """Apply to ``state [6, n]``, in place, a ``gradient [n]`` that was computed at the state's row ``x``."""
        residual = gradient - self.shift * state[X] - state[Y_AHEAD]
        state[X] -= self.stride * residual
        state[X_AHEAD] -= self.stride / self.root * residual
        state[Y_AHEAD] += (1 + self.root / 4) * residual

    def pull(self, state: torch.Tensor, difference: torch.Tensor) -> None:
        """Apply an exchange to ``state [6, n]``, in place.

        ``difference [n]``: the vector that this island has sent (:meth:`sent`), minus the one that it has received.
        """
        state[Z] -= 0.5 * difference
        slowness = self.mixing[0] / (self.rate / self.pace)
        state[Z_AHEAD] -= 2 * slowness / self.root * difference

    def sent(self, state: torch.Tensor) -> torch.Tensor:
        """Return the vector ``[n]`` that an island with ``state [6, n]`` sends in an exchange."""
        return state[Y] + state[Z]
