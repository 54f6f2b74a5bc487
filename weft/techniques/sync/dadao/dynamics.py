"""DADAO's constants, its differential equation between events, and the clock of its exchanges (Nabli & Oyallon 2023).

The unit of time is the time between two gradients of an island. Rows of a state ``[6, n]`` are those of the paper:
``x, x~, y, y~, z, z~``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from weft.recipe import Sync
    from weft.techniques.sync.dadao import DADAOSettings

X, X_AHEAD, Y, Y_AHEAD, Z, Z_AHEAD = range(6)

#: Links between islands.
Links = Sequence[tuple[int, int]]


class LinkExchange(NamedTuple):
    """An exchange between two islands. ``time``: when it happens, counted from the last gradient. ``islands``: numbers
    of both islands. ``number``: index of the exchange since that gradient.
    """

    time: float
    islands: tuple[int, int]
    number: int

    def partner_of(self, island: int) -> int:
        """Return the number of the island with which ``island`` exchanges its vector."""
        return sum(self.islands) - island


def links_of(how: Sync, islands: int) -> Links:
    """Return the pairs of islands that exchange vectors, as ``sync.partner`` and ``sync.graph`` say: the edges of the
    graph, of a ring, or all pairs.
    """
    if how.partner == "graph":
        return sorted({(min(link), max(link)) for link in how.graph})
    if how.partner == "ring":
        pairs = {tuple(sorted((i, (i + 1) % islands))) for i in range(islands)}
        return sorted((a, b) for a, b in pairs)
    return [(i, j) for j in range(islands) for i in range(j)]


@dataclass(frozen=True)
class Dynamics:
    """Dynamics of DADAO: how an island's state of six vectors changes by gradients, by exchanges, and between them.

    A unit of time is the time between two gradients of an island. ``condition``: condition number of the loss;
    ``stride``: factor on the change of the parameters that counts as a gradient; ``links``: pairs of islands that
    exchange; ``exchanges``: mean number of exchanges over all links in a unit of time, 0: the number that the theory
    demands.
    """

    condition: float
    stride: float
    links: Links
    exchanges: float = 0.0

    @classmethod
    def of(cls, own: DADAOSettings, how: Sync, islands: int) -> Dynamics:
        """Build the dynamics for a number of ``islands`` from the settings of DADAO and of section ``[sync]``."""
        links = links_of(how, islands)
        return cls(own.condition, own.stride, links, own.exchanges)

    @property
    def root(self) -> float:
        """Rate, per unit of time, at which each accelerated vector of the state and its slow partner approach each
        other: ``(2 condition)^(-1/2)``.
        """
        return float((2 * self.condition) ** -0.5)

    @property
    def shift(self) -> float:
        """Half the assumed smallest curvature of the loss, ``nu`` in the paper. As gradient of the loss counts here the
        change of the parameters by ``sync.every`` local steps.
        """
        return self.root**2 / (4 * self.stride)

    @cached_property
    def mixing(self) -> tuple[float, float]:
        """Two constants of the graph of links, if one exchange happens in a unit of time over all links together.

        The first is the inverse of the smallest positive eigenvalue of the graph's Laplacian; it is larger if the links
        mix more slowly. The second is half the largest effective resistance of a link.
        """
        count = 1 + max(max(link) for link in self.links)
        laplacian = np.zeros((count, count))
        for i, j in self.links:
            share = np.array([1, 1, -1, -1]) / len(self.links)
            laplacian[[i, j, i, j], [i, j, j, i]] += share
        inverse = np.linalg.pinv(laplacian)
        resistances = [
            inverse[i, i] + inverse[j, j] - 2 * inverse[i, j] for i, j in self.links
        ]
        return 1 / float(np.linalg.eigvalsh(laplacian)[1]), float(max(resistances)) / 2

    @property
    def rate(self) -> float:
        """Mean number of exchanges over all links in a unit of time, the time between two gradients of an island."""
        slowness, resistance = self.mixing
        return self.exchanges or float((2 * slowness * resistance) ** 0.5)

    def flow(self, time: float) -> torch.Tensor:
        """Return the matrix ``[6, 6]`` that maps a state to the state after ``time`` without an event."""
        return torch.linalg.matrix_exp(self._slope * time)

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
        state[Z_AHEAD] -= 2 * self.mixing[0] / self.rate / self.root * difference

    @staticmethod
    def sent(state: torch.Tensor) -> torch.Tensor:
        """Return the vector ``[n]`` that an island with ``state [6, n]`` sends in an exchange."""
        return state[Y] + state[Z]

    def clock(self, gradients: int, seed: int = 0) -> list[LinkExchange]:
        """Return the exchanges between gradient number ``gradients`` of all islands and the next, drawn at random and
        in order of time. ``seed``: seed of the clock, the same on all islands.
        """
        random = np.random.default_rng([seed, gradients])
        times = np.sort(random.random(random.poisson(self.rate)))
        chosen = random.integers(len(self.links), size=len(times))
        return [
            LinkExchange(float(time), self.links[int(link)], number)
            for number, (time, link) in enumerate(zip(times, chosen, strict=True))
        ]
