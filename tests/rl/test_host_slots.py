"""Weights pass through memory that ranks of one host share, and through sockets between hosts, with the same bits."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
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
    # rank 2 may not open what others have, and rank 3 has nothing to open
    with (
        patch.object(os, "open", side_effect=PermissionError)
        if rank == 2
        else nullcontext()
    ):
        slots = HostSlots(16, None, rank != 3)
    assert slots.theirs.keys() == ({0, 1, 2} - {rank} if rank < 2 else set())
    assert slots.readers == {0: {1}, 1: {0}, 2: {0, 1}, 3: set()}[rank]
    assert slots.own.dtype == torch.uint8
    return len(slots.own)


def test_a_rank_that_cannot_open_a_memory_is_sent_messages(pool: Any) -> None:
    assert pool.run(4, without_memory) == [SLOTS, SLOTS, SLOTS, 0]
