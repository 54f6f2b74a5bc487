"""Gossip without rounds: pairs of islands that exchange at random times, by a clock that all draw from one seed.

The unit of time is the time between two gradients of an island.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from weft.recipe import Sync

#: Links between islands.
Links = Sequence[tuple[int, int]]


class LinkExchange(NamedTuple):
    """An exchange between two islands.

    ``time``: when it happens: 0 is the time of the last gradient, 1 that of the next. ``islands``: numbers of both
    islands. ``number``: index, from 0, among the exchanges of all islands between these two gradients.
    """

    time: float
    islands: tuple[int, int]
    number: int

    def partner_of(self, island: int) -> int:
        """Return the number of the island with which ``island`` exchanges its vector."""
        return sum(self.islands) - island


def links_of(how: Sync, islands: int) -> Links:
    """Return the pairs of islands that exchange vectors, as ``sync.partner`` and ``sync.graph`` say.

    These are the edges of the graph, the neighbours in a ring, or all pairs of ``islands`` islands. ``how``: the
    recipe's section ``[sync]``.
    """
    if how.partner == "graph":
        return sorted({(min(link), max(link)) for link in how.graph})
    if how.partner == "ring":
        pairs = {tuple(sorted((i, (i + 1) % islands))) for i in range(islands)}
        return sorted((a, b) for a, b in pairs)
    return [(i, j) for j in range(islands) for i in range(j)]


@dataclass(frozen=True, kw_only=True)
class GossipDynamics(ABC):
    """How the state of an island changes by gradients, by exchanges with one other island, and between these events.

    A state is a tensor ``[rows, n]``, whose first row has the island's parameters. ``links``: pairs of islands that
    exchange; ``exchanges``: mean number of exchanges over all links in a unit of time, 0: the number that
    :attr:`needed` says.
    """

    links: Links
    exchanges: float = 0.0

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
        return self.exchanges or self.needed

    @property
    def needed(self) -> float:
        """Mean number of exchanges over all links in a unit of time that the method's theory requires."""
        slowness, resistance = self.mixing
        return float((2 * slowness * resistance) ** 0.5)

    @abstractmethod
    def flow(self, time: float) -> torch.Tensor:
        """Return the matrix ``[rows, rows]`` that maps a state to the state after ``time`` without an event."""

    @abstractmethod
    def learn(self, state: torch.Tensor, gradient: torch.Tensor) -> None:
        """Apply to ``state [rows, n]``, in place, a ``gradient [n]`` that was computed at the island's parameters."""

    @abstractmethod
    def sent(self, state: torch.Tensor) -> torch.Tensor:
        """Return the vector ``[n]`` that an island with ``state [rows, n]`` sends in an exchange."""

    @abstractmethod
    def pull(self, state: torch.Tensor, difference: torch.Tensor) -> None:
        """Apply an exchange to ``state [rows, n]``, in place.

        ``difference [n]``: the vector that this island has sent, minus the one that it has received.
        """

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
