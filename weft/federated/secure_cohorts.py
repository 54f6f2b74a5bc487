"""Secure sums at the server: masked updates wait until their whole cohort has answered or is known to be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weft.errors import WeftError
from weft.federated.client_work import CohortShare
from weft.federated.secure_sum import ToldSeed, unmasked_sum

T = torch.Tensor


@dataclass
class SecureCohort:
    """Clients whose updates are summed together, so that the server learns only the sum.

    Attributes:
        ``name``: name of the sum.
        ``keys``: the public key of each client.
        ``shares``: the factor of each client's difference.
        ``arrived``: the masked integers of each client that has answered, in the order of arrival.
        ``lost``: the clients that will not answer.
        ``revealed``: seeds that clients have revealed, by the pair (client, lost client).
        ``asked``: the pairs whose seed was asked for.
    """

    name: str
    keys: Mapping[str, str]
    shares: Mapping[str, float]
    arrived: dict[str, T] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    revealed: dict[tuple[str, str], bytes] = field(default_factory=dict)
    asked: set[tuple[str, str]] = field(default_factory=set)

    def share_of(self, client: str) -> CohortShare:
        """Return the part of ``client`` in the secure sum, to be sent with its work order."""
        return CohortShare(self.name, self.keys, self.shares[client])

    def lose(self, client: str) -> None:
        """Mark ``client`` as lost: it will not answer, or its answer can no longer be unmasked."""
        self.arrived.pop(client, None)
        self.lost.add(client)

    def to_ask(self) -> list[tuple[str, str]]:
        """Return the pairs (client, lost client) whose seeds were not requested yet, and mark them as requested."""
        pairs = [
            (client, lost)
            for client in self.keys
            if client not in self.lost
            for lost in sorted(self.lost)
            if (client, lost) not in self.asked
        ]
        self.asked.update(pairs)
        return pairs

    @property
    def complete(self) -> bool:
        """Whether all clients have answered or are lost, and all seeds of lost clients have arrived."""
        rest = [client for client in self.keys if client not in self.lost]
        return all(client in self.arrived for client in rest) and all(
            (client, lost) in self.revealed for client in rest for lost in self.lost
        )

    def mean(self) -> T:
        """Return the mean of the differences that have arrived, weighted by their shares, as a flat float64 tensor.

        Raises :class:`WeftError` if the result cannot be a mean of updates, because a seed or an update was false.
        """
        seeds = [
            ToldSeed(client, lost, seed)
            for (client, lost), seed in self.revealed.items()
            if client in self.arrived and lost in self.lost
        ]
        total = unmasked_sum(self.arrived, seeds)
        return total / sum(self.shares[client] for client in self.arrived)


def new_cohort(
    name: str,
    clients: Sequence[str],
    public: Callable[[str], str],
    sizes: Mapping[str, float],
) -> SecureCohort:
    """Create a cohort of ``clients`` for one secure sum.

    ``public``: function that returns a client's public key. ``sizes``: the weight of each client; shares are
    proportional to it. Raises :class:`WeftError` if there are fewer than two clients, because their sum would hide
    nothing.
    """
    if len(clients) < 2:
        raise WeftError(
            f"federated.secure: a sum over {' and '.join(clients) or 'nobody'} hides nothing; at least 2 clients must "
            "take part in every round"
        )
    total = sum(sizes[client] for client in clients)
    shares = {client: sizes[client] / total for client in clients}
    return SecureCohort(name, {client: public(client) for client in clients}, shares)


def unanswered(cohort: SecureCohort) -> Iterable[str]:
    """Return the clients of a cohort that have neither answered nor are lost."""
    return [c for c in cohort.keys if c not in cohort.arrived and c not in cohort.lost]
