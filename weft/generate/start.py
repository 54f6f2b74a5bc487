"""Starts the ranks that generate, joins them, and separates the scheduling rank from the others."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from weft.checkpoint.weights import open_pretrained
from weft.generate.leader import check_layout, mesh_of_rank
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.run.forked import GENERATING
from weft.run.launch import launch
from weft.run.rank_processes import (
    backend_of,
    in_ranks,
    own_device,
    rank_process,
    settle_in,
    threads_per_rank,
)

#: The variable of a rank that Weft itself has started, which torchrun's and Slurm's have not.
LAUNCHED = "WEFT_LAUNCHED"
#: Bytes of a weight as it is loaded.
FLOAT32 = 4
#: Seconds that ranks wait for each other.
WAIT_S = 600

#: Seconds that a rank may be stopped, while people wait for the answers of all.
STOPPED_S = 10


def launch_ranks(
    layout: Layout, checkpoint: str, grace: float | None = None
) -> int | None:
    """Start this command on all ranks of ``layout`` and return the exit code. Return None in a process that is a rank
    itself, or if the layout has one rank. ``checkpoint``: the model's name. ``grace``: seconds that the ranks get to
    end after a signal, for commands that usually end by one; None: the default. Raises :class:`UsageError` for a layout
    under which the model cannot generate.
    """
    check_layout(layout)
    if layout.world == 1 or in_ranks():
        return None
    check_layout(layout, open_pretrained(checkpoint).shape)
    return launch(
        sys.argv[1:], layout.world, patience=STOPPED_S, shared=GENERATING, grace=grace
    )


@contextmanager
def as_rank(layout: Layout, device: str) -> Iterator[str]:
    """Return a context in which this process is one of the ranks of ``layout``. The context's value is the rank's own
    device, such as "cuda:1".

    ``device``: "cpu" or "cuda".
    """
    if layout.world == 1:
        yield device
        return
    with rank_process(device, WAIT_S, _threads()):
        yield own_device(device)


@contextmanager
def as_engine(layout: Layout, device: str) -> Iterator[str]:
    """Return a context in which this process is an engine or one of its ranks, as with :func:`as_rank`. The context's
    value is the process's own device. If the layout has one rank, each process that torchrun or Slurm has started is
    an engine of its own. It has its own GPU and an equal share of the host's cores.
    """
    with as_rank(layout, device) as own:
        if layout.world == 1 and in_ranks():
            settle_in(device, _threads())
            _, index = backend_of(device)
            own = device if index is None else str(index)
        yield own


def _threads() -> int:
    """Return the number of threads of this process: 0 for an equal share of the cores, or what a launcher that has
    given each engine a share of them allows.
    """
    share = threads_per_rank(0, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    allowed = os.environ.get("OMP_NUM_THREADS", "") if LAUNCHED in os.environ else ""
    return min(share, int(allowed)) if allowed.isdecimal() and int(allowed) else share


def mesh_for(layout: Layout, device: str, checkpoint: str) -> Mesh:
    """Build the mesh of this rank, on ``device``, that generates with the model of ``checkpoint`` under ``layout``."""
    needed = 0.0
    if layout.tp_shares == "auto":
        from weft.shapes.parameters import parameter_count

        shape = open_pretrained(checkpoint).shape
        needed = float(FLOAT32 * parameter_count(shape, shape.vocab))
    return mesh_of_rank(layout, device, needed)


def leads() -> bool:
    """Return whether this process is the first rank, which has the engine and leads the other ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0
