"""Partitions: every sample has one client, and they differ as they are asked to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weft.errors import UsageError, WeftError
from weft.federated.client_partition import Partition, PartitionKind, draw_partition
from weft.federated.labelled_samples import read_labelled

LABELS = np.arange(600) % 6
GROUPS = np.array(["json"] * 300 + ["asyncio"] * 200 + ["test"] * 60 + ["re"] * 40)


@pytest.mark.parametrize("kind", ["even", "dirichlet", "classes", "natural"])
def test_every_sample_has_one_client(kind: PartitionKind) -> None:
    partition = draw_partition(kind, 4, LABELS, GROUPS, alpha=0.3, seed=3)
    assert np.array_equal(np.sort(np.concatenate(partition.rows)), np.arange(600))
    assert min(partition.sizes) > 0
    again = draw_partition(kind, 4, LABELS, GROUPS, alpha=0.3, seed=3)
    assert again.digest == partition.digest
    if kind != "natural":
        other = draw_partition(kind, 4, LABELS, GROUPS, alpha=0.3, seed=4)
        assert other.digest != partition.digest
    stored = Partition.from_json(json.loads(json.dumps(partition.to_json())))
    assert stored.digest == partition.digest


def test_partitions_are_what_they_are_called() -> None:
    classes = draw_partition("classes", 6, LABELS, classes=2)
    assert [len(set(LABELS[rows])) for rows in classes.rows] == [2] * 6
    natural = draw_partition("natural", 3, LABELS, GROUPS)
    assert [sorted(set(GROUPS[rows])) for rows in natural.rows] == [["json"], ["asyncio"], ["re", "test"]]  # fmt: skip

    def spread(alpha: float) -> float:
        partition = draw_partition("dirichlet", 5, LABELS, alpha=alpha)
        shares = [np.bincount(LABELS[rows], minlength=6) / len(rows) for rows in partition.rows]  # fmt: skip
        return float(np.std(shares))

    assert spread(0.1) > 2 * spread(100.0)


def test_many_clients_have_samples_all() -> None:
    partition = draw_partition("dirichlet", 200, LABELS, alpha=0.05)
    assert min(partition.sizes) == 1 and sum(partition.sizes) == 600


@pytest.mark.parametrize(("kind", "clients", "words"), [
    ("even", 601, "lower federated.clients"),
    ("classes", 2, "leave 2 of 6 classes to nobody"),
    ("natural", 5, "4 groups for 5 clients"),
])  # fmt: skip
def test_impossible_partitions_are_refused(
    kind: PartitionKind, clients: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        draw_partition(kind, clients, LABELS, GROUPS)
    with pytest.raises(UsageError, match="name none"):
        draw_partition("natural", 2, LABELS)


def test_samples_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.npz"
    labels, groups = np.array([0, 1, 1]), np.array(["a", "b", "b"])
    np.savez(file, features=np.ones((3, 2, 2)), labels=labels, groups=groups)
    samples = read_labelled(str(file))
    assert samples.features.shape == (3, 4) and samples.classes == 2
    np.savez(file, features=np.ones((3, 2)), labels=np.array([0.5, 1, 1]))
    with pytest.raises(WeftError, match="not whole numbers"):
        read_labelled(str(file))
    np.savez(file, features=np.ones((3, 2)))
    with pytest.raises(UsageError, match="no array 'labels'"):
        read_labelled(str(file))
    np.savez(file, features=np.full((1, 2), np.nan), labels=np.array([0]))
    with pytest.raises(WeftError, match="not finite"):
        read_labelled(str(file))
    file.write_bytes(b"no archive")
    with pytest.raises(WeftError, match="cannot be read"):
        read_labelled(str(file))
    with pytest.raises(UsageError, match="sklearn:digits"):
        read_labelled("nowhere.npz")
    with pytest.raises(UsageError, match="sklearn:digits"):
        read_labelled("sklearn:iris")
