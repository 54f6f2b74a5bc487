"""Weights pass through memory that ranks of one host share, and through sockets between hosts, with the same bits."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.rl.test_generation_model import SHAPE, moved_under
from weft.rl import host_slots
from weft.rl.host_slots import SLOTS, HostSlots

#: Numbers of the hosts of four ranks.
HOSTS = {"one": (0, 0, 0, 0), "two": (0, 1, 0, 1), "odd": (0, 0, 0, 1)}


def of_hosts(hosts: tuple[int, ...]) -> Any:
    """A patch by which this rank believes that it is on its host of ``hosts``."""
    host = f"host {hosts[dist.get_rank()]}"
    return patch.object(host_slots, "machine_id", lambda *namespaces: host)


def moved_on_hosts(hosts: tuple[int, ...], bucket: int) -> set[int]:
    rank = dist.get_rank()
    with of_hosts(hosts):
        slots = HostSlots(16, None, True)
        for training, generation in (("tp=4", "tp=2"), ("shard=2,tp=2", "")):
            options = {"bucket": bucket, "freeze": []}
            moved_under(training, generation, SHAPE, options)
    beside = {r for r, host in enumerate(hosts) if host == hosts[rank]} - {rank}
    assert slots.theirs.keys() == slots.readers == beside
    assert len(slots.own) == (SLOTS if beside else 0)
    slots.own[:] = rank + 1
    dist.barrier()
    for other, theirs in slots.theirs.items():
        assert (theirs == other + 1).all()
    dist.barrier()
    return set(slots.theirs)


@pytest.mark.parametrize(
    ("kind", "bucket"), [("one", 64 << 20), ("two", 4000), ("odd", 4000)]
)
def test_weights_arrive_whatever_host_a_rank_is_on(
    pool: Any, kind: str, bucket: int
) -> None:
    pool.run(4, moved_on_hosts, HOSTS[kind], bucket)


def without_memory() -> int:
    rank = dist.get_rank()
    # rank 2 may not open what others have, rank 3 may make no memory, and rank 4 has weights elsewhere
    refused = PermissionError(1, "not here")
    with (
        patch.object(os, "open", side_effect=refused) if rank == 2 else nullcontext(),
        patch.object(os, "memfd_create", side_effect=refused)
        if rank == 3
        else nullcontext(),
    ):
        # no multiple of a page, of which the memory needs several
        slots = HostSlots(99_992, None, rank != 4)
    assert slots.theirs.keys() == ({0, 1, 2} - {rank} if rank < 2 else set())
    assert slots.readers == {0: {1}, 1: {0}, 2: {0, 1}}.get(rank, set())
    return len(slots.own)


def test_a_rank_that_cannot_open_a_memory_is_sent_messages(pool: Any) -> None:
    assert pool.run(5, without_memory) == [SLOTS, SLOTS, SLOTS, 0, 0]


@pytest.mark.parametrize("content", [b"", bytes(9999)])
def test_other_memory_in_the_place_of_slots_is_not_taken(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where containers cannot be told apart, and a number is that of another process."""
    file = tmp_path / "other"
    file.write_bytes(content)
    with file.open("r+b") as other:
        monkeypatch.setattr(
            host_slots,
            "from_all",
            lambda value, group: [
                value,
                value._replace(handle=other.fileno()) if value else frozenset(),
            ],
        )
        before = len(os.listdir("/proc/self/fd"))
        slots = HostSlots(64, None, True)
        assert len(os.listdir("/proc/self/fd")) == before
    assert not slots.theirs and not slots.readers
