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
    """Start this command on all ranks of ``layout`` and return the exit code. Return None in a process that is a rank
    itself, or if the layout has one rank.

    Raises :class:`UsageError` for a layout under which the model of ``checkpoint`` cannot generate.
    """
    check_layout(layout)
    if layout.world == 1 or in_ranks():
        return None
    check_layout(layout, open_pretrained(checkpoint).shape)
    return launch(sys.argv[1:], layout.world, patience=STOPPED_S, shared=GENERATING)


@contextmanager
def as_rank(layout: Layout, device: str) -> Iterator[str]:
    """Return a context in which this process is one of the ranks of ``layout``. The context's value is the rank's own
    device, such as "cuda:1".

    ``device``: "cpu" or "cuda".
    """
    if layout.world == 1:
        yield device
        return
    with rank_process(device, WAIT_S):
        yield own_device(device)


def leads() -> bool:
    """Return whether this process is the first rank, which has the engine and leads the other ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0
