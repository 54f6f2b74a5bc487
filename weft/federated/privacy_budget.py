"""Differential privacy of clients: clipped updates, Gaussian noise, and what an observer of all models can learn.

The whole difference of a client is clipped to a norm, and noise is added to every change of the server's model (McMahan
et al. 2018). A client's part in a change is its clipped difference times its weight, so noise of ``multiplier * clip *
largest weight`` gives every client at least the privacy of ``multiplier``. Participation is chosen by policies and
arrivals and not at random, so no amplification by sampling is counted. The accountant is that of Opacus (Mironov 2017,
Renyi differential privacy), asked for the client that took part most often.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.errors import UsageError

T = torch.Tensor
Named = Mapping[str, T]


def difference_norm(difference: Named) -> float:
    """Return the Euclidean norm of a client's update over all elements together. ``difference``: tensors by name."""
    squares = [float(x.double().square().sum()) for x in difference.values()]
    return math.sqrt(math.fsum(squares))


def clipped_difference(difference: Named, most: float) -> dict[str, T]:
    """Return ``difference``, a client's update as tensors by name, scaled down to the norm ``most`` if its norm is
    larger; with ``most`` 0, unchanged.
    """
    norm = difference_norm(difference)
    if not most or norm <= most:
        return dict(difference)
    return {name: x * (most / norm) for name, x in difference.items()}


def spent_epsilon(multiplier: float, times: int, delta: float) -> float:
    """Return the epsilon of (epsilon, delta) differential privacy after noise has been added ``times`` times (Gaussian
    mechanisms).

    ``multiplier``: standard deviation of the noise relative to the sensitivity. The result is infinite without noise,
    and 0 if ``times`` is 0. Raises :class:`UsageError` if Opacus is not installed.
    """
    if not times:
        return 0.0
    if not multiplier:
        return math.inf
    accountant = opacus_accountant()
    accountant.history = [(multiplier, 1.0, times)]
    return float(accountant.get_epsilon(delta=delta))


def opacus_accountant() -> Any:
    """Return a new accountant of Opacus. Raises :class:`UsageError` if the package is not installed."""
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        raise UsageError(
            "federated.noise counts privacy with the package opacus: pip install 'weft[private]'"
        ) from None
    return RDPAccountant()


@dataclass
class PrivacyBudget:
    """Differential privacy of a run: clips updates, adds noise, and counts each client's participations.

    Attributes:
        ``clip``: largest norm of a client's difference.
        ``multiplier``: standard deviation of the noise, as a multiple of ``clip`` times the largest weight of a client
            in a change.
        ``delta``: delta of the (epsilon, delta) guarantee.
        ``seed``: seed of the noise, for tests; None draws it from the system's random numbers.
        ``taken``: number of changes that each client has taken part in.
        ``changes``: number of changes so far.
    """

    clip: float
    multiplier: float
    delta: float
    seed: int | None = None
    taken: Counter[str] = field(default_factory=Counter)
    changes: int = 0

    def noisy(
        self, change: Named, clients: Sequence[str], weights: Sequence[float]
    ) -> dict[str, T]:
        """Return ``change`` with noise added to every element, and count that ``clients`` took part.

        ``weights``: the factor of each client's difference in ``change``.
        """
        self.taken.update(clients)
        self.changes += 1
        scale = self.multiplier * self.clip * max(map(abs, weights), default=0.0)
        if not scale:
            return dict(change)
        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed(self.seed * 1_000_003 + self.changes)
        noisy = dict[str, T]()
        for name in sorted(change):
            x = change[name]
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            noisy[name] = x + (scale * noise).to(x.dtype)
        return noisy

    def epsilon(self) -> float:
        """Return the epsilon of the client that has taken part most often."""
        times = max(self.taken.values(), default=0)
        return spent_epsilon(self.multiplier, times, self.delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of participations of each client, for a resumed run."""
        return {"taken": dict(self.taken), "changes": self.changes}

    def count(self, state: Mapping[str, Any]) -> None:
        """Take over the counts of ``state``, which :meth:`state_dict` returned, where they are larger than the present
        ones.
        """
        self.taken |= Counter(state["taken"])
        self.changes = max(self.changes, int(state["changes"]))
