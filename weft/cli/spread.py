"""``--layout`` of commands that generate: refuse what is not possible, start ranks, or be one of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from weft.train.launch import launch
from weft.train.ranks import in_ranks, own_device, rank_process

if TYPE_CHECKING:  # `weft --help` does not wait for PyTorch
    from weft.layout.layout import Layout

_help = 'Ranks for models and texts that are too large for one: "tp=2", "cp=4", "pp=2", "cp=4,ep=4", "tp=2,pp=2" ...'
Spread = Annotated[str | None, typer.Option("--layout", help=_help)]

#: Seconds that ranks wait for each other.
WAIT_S = 600

#: Seconds that a rank may be stopped, while people wait for the answers of all.
STOPPED_S = 10


def run_ranks(layout: "Layout", checkpoint: str) -> int | None:
    """Run this command on all ranks of ``layout``; the exit code, or None if this process is one of them, or alone."""
    from weft.checkpoint.weights import open_pretrained
    from weft.generate.ranks import check_layout

    check_layout(layout)
    if layout.world == 1 or in_ranks():
        return None
    check_layout(layout, open_pretrained(checkpoint).shape)
    return launch(sys.argv[1:], layout.world, patience=STOPPED_S)


@contextmanager
def as_rank(layout: "Layout", device: str) -> Iterator[str]:
    """In here this process is one of the ranks of ``layout``; its device."""
    if layout.world == 1:
        yield device
        return
    with rank_process(device, WAIT_S):
        yield own_device(device)


def leads() -> bool:
    """Whether this process has the engine: the others follow it."""
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0
