"""Starts the ranks that generate, joins them, and separates the scheduling rank from the others."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from weft.checkpoint.weights import open_pretrained
from weft.generate.leader import check_layout
from weft.layout.layout import Layout
from weft.run.forked import GENERATING
from weft.run.launch import launch
from weft.run.rank_processes import in_ranks, own_device, rank_process

#: Seconds that ranks wait for each other.
WAIT_S = 600

#: Seconds that a rank may be stopped, while people wait for the answers of all.
STOPPED_S = 10


def launch_ranks(layout: Layout, checkpoint: str) -> int | None:
    """Run this command on all ranks of ``layout``; return the exit code, or None in a rank or without several ranks.

    Raises :class:`UsageError` for a layout under which this model cannot generate.
    """
    check_layout(layout)
    if layout.world == 1 or in_ranks():
        return None
    check_layout(layout, open_pretrained(checkpoint).shape)
    return launch(sys.argv[1:], layout.world, patience=STOPPED_S, shared=GENERATING)


@contextmanager
def as_rank(layout: Layout, device: str) -> Iterator[str]:
    """Make this process one of the ranks of ``layout`` in the context; yield its device."""
    if layout.world == 1:
        yield device
        return
    with rank_process(device, WAIT_S):
        yield own_device(device)


def leads() -> bool:
    """Return whether this process has the engine that the other ranks follow."""
    return not dist.is_initialized() or dist.get_rank() == 0
