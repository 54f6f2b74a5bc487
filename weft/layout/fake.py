"""Process groups that move nothing: one process sees what a rank of many would do."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    """A default process group of ``world`` ranks in which this process is ``rank``. Replaces none that exists."""
    # The fake group lives in torch.testing: there is no public spelling of it.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
