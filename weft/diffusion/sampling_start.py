"""Starts the ranks that sample, and joins them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from weft.errors import UsageError
from weft.run.launch import launch
from weft.run.rank_processes import in_ranks, own_device, rank_process

#: What ranks that sample import.
SAMPLING = ("weft.diffusion.parallel_sample", "weft.diffusion.denoiser")
#: Seconds that ranks wait for each other, and that one may be stopped.
WAIT_S, STOPPED_S = 600, 10


def launch_sampling(ranks: int) -> int | None:
    """Start this command on ``ranks`` ranks, and return the exit code.

    Returns None, without starting anything, in a process that is itself a rank, or for a single rank.
    """
    if ranks == 1 or in_ranks():
        return None
    return launch(sys.argv[1:], ranks, patience=STOPPED_S, shared=SAMPLING)


@contextmanager
def in_sampling_rank(ranks: int, device: str) -> Iterator[str]:
    """Return a context in which this process is one of ``ranks`` ranks, and which yields the rank's own device.

    ``device``: "cpu" or "cuda".
    """
    if ranks == 1:
        yield device
        return
    with rank_process(device, WAIT_S):
        started = dist.get_world_size()
        if started != ranks:
            raise UsageError(
                f"{started} processes were started, and --layout has {ranks} ranks; start as many as it has"
            )
        yield own_device(device)
