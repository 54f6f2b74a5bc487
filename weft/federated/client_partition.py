"""Partitions: which sample belongs to which client, for experiments on data that stand in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from weft.cache import digest
from weft.errors import UsageError

PartitionKind = Literal["even", "dirichlet", "classes", "natural"]
#: A name or number for each sample.
Names = Sequence[Any] | np.ndarray
#: How often a Dirichlet partition is drawn again in which a client would have no sample.
DRAWS = 100


@dataclass(frozen=True)
class Partition:
    """Division of samples among clients.

    Attributes:
        ``kind``: the way in which samples were divided, such as "dirichlet".
        ``rows``: for each client the numbers of its samples, int64, sorted. No sample has two clients.
    """

    kind: str
    rows: tuple[np.ndarray, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of samples of each client, in the order of the clients."""
        return [len(rows) for rows in self.rows]

    @property
    def digest(self) -> str:
        """Hash that identifies the partition, so that a resumed run can check that it has the same."""
        return digest(self.kind, [rows.tolist() for rows in self.rows])

    def to_json(self) -> dict[str, Any]:
        """Return kind, rows and digest of the partition as JSON values, for checkpoints."""
        rows = [rows.tolist() for rows in self.rows]
        return {"kind": self.kind, "rows": rows, "digest": self.digest}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Partition:
        """Build a partition from the JSON values that :meth:`to_json` returned."""
        rows = tuple(np.array(rows, np.int64) for rows in values["rows"])
        return cls(values["kind"], rows)


def draw_partition(
    kind: PartitionKind,
    clients: int,
    labels: Names,
    groups: Names | None = None,
    *,
    alpha: float = 0.5,
    classes: int = 2,
    seed: int = 0,
) -> Partition:
    """Divide samples at random among ``clients`` clients, and return the division.

    Arguments:
        ``kind``: "even": at random, equally many for each client. "dirichlet": the shares of each class follow a
            Dirichlet distribution with parameter ``alpha`` (Hsu et al. 2019). "classes": ``classes`` classes for each
            client. "natural": whole groups, such as authors or packages, the largest first, to the client with the
            fewest samples.
        ``labels``: the class of each sample.
        ``groups``: the group of each sample, for "natural".
        ``seed``: seed of the random choices.

    Raises :class:`UsageError` if a client would have no sample.
    """
    count = len(labels)
    if clients > count:
        raise UsageError(
            f"{count} samples cannot be divided among {clients} clients; lower federated.clients"
        )
    draw = np.random.default_rng([seed, 38])
    if kind == "even":
        rows = list(np.array_split(draw.permutation(count), clients))
    elif kind == "dirichlet":
        rows = _dirichlet(_numbers(labels), clients, alpha, draw)
    elif kind == "classes":
        rows = _classes(_numbers(labels), clients, classes, draw)
    else:
        if groups is None:
            raise UsageError(
                "partition = 'natural' divides whole groups, and the samples name none; give an array 'groups', or "
                "choose another partition"
            )
        rows = _natural(groups, clients)
    return Partition(kind, tuple(np.sort(each).astype(np.int64) for each in rows))


def _numbers(labels: Names) -> np.ndarray:
    """Return the number of each label among all labels in their order."""
    return np.unique(np.asarray(labels), return_inverse=True)[1]


def _dirichlet(
    labels: np.ndarray, clients: int, alpha: float, draw: np.random.Generator
) -> list[np.ndarray]:
    for _ in range(DRAWS):
        rows: list[list[np.ndarray]] = [[] for _ in range(clients)]
        for label in range(labels.max() + 1):
            members = draw.permutation(np.flatnonzero(labels == label))
            shares = draw.dirichlet(np.full(clients, alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(int)
            for client, part in enumerate(np.split(members, cuts)):
                rows[client].append(part)
        joined = [np.concatenate(parts) for parts in rows]
        if all(len(each) for each in joined):
            return joined
    # clients with nothing take a sample from the one with most
    for client, each in enumerate(joined):
        if not len(each):
            largest = max(range(clients), key=lambda other: len(joined[other]))
            joined[client], joined[largest] = joined[largest][:1], joined[largest][1:]
    return joined


def _classes(
    labels: np.ndarray, clients: int, classes: int, draw: np.random.Generator
) -> list[np.ndarray]:
    count = int(labels.max()) + 1
    if classes > count:
        raise UsageError(
            f"partition = 'classes' with {classes} classes for each client, and there are {count}; lower "
            "federated.classes"
        )
    if clients * classes < count:
        raise UsageError(
            f"{clients} clients with {classes} classes each leave {count - clients * classes} of {count} classes to "
            "nobody; raise federated.classes"
        )
    owners: list[list[int]] = [[] for _ in range(count)]
    for place in range(clients * classes):
        owners[place % count].append(place // classes)
    rows: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, of_label in enumerate(owners):
        members = draw.permutation(np.flatnonzero(labels == label))
        if len(members) < len(of_label):
            raise UsageError(
                f"{len(of_label)} clients share a class of {len(members)} samples; use partition = 'dirichlet', or "
                "lower federated.clients"
            )
        for client, part in zip(of_label, np.array_split(members, len(of_label)), strict=True):  # fmt: skip
            rows[client].append(part)
    return [np.concatenate(parts) for parts in rows]


def _natural(groups: Names, clients: int) -> list[np.ndarray]:
    names, numbers = np.unique(np.asarray(groups), return_inverse=True)
    if len(names) < clients:
        raise UsageError(
            f"partition = 'natural' has {len(names)} groups for {clients} clients; lower federated.clients"
        )
    sizes = np.bincount(numbers)
    rows: list[list[np.ndarray]] = [[] for _ in range(clients)]
    totals = [0] * clients
    for group in np.argsort(-sizes, kind="stable"):
        client = totals.index(min(totals))
        rows[client].append(np.flatnonzero(numbers == group))
        totals[client] += int(sizes[group])
    return [np.concatenate(parts) for parts in rows]
