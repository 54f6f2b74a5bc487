"""Messages from one rank to all others, in order, through the store that they share."""

import pickle
from datetime import timedelta
from typing import Any

import torch.distributed as dist

#: How long a rank waits for a ticket before it does so again; the end of the store it hears of at once.
IDLE = timedelta(days=1)


class Tickets:
    """A queue that the first rank writes and every other rank reads; messages are numbered from 1. All ranks make it.

    Writing never waits for a reader; reading waits for the next message, however long that takes.
    """

    def __init__(self) -> None:
        # The store of the default process group; PyTorch has no public way to it.
        self.store = dist.distributed_c10d._get_default_store()
        # the same on all ranks
        book = self.store.add(f"weft/tickets/{dist.get_rank()}", 1)
        self.name, self.number = f"weft/tickets/{book}", 0
        self.oldest = 1

    def give(self, message: Any) -> int:
        """Write ``message`` for all; returns its number."""
        self.number += 1
        self.store.set(f"{self.name}/{self.number}", pickle.dumps(message))  # type: ignore[arg-type]
        return self.number

    def forget(self, number: int) -> None:
        """Delete the messages up to this number, which all ranks have read."""
        for read in range(self.oldest, number + 1):
            self.store.delete_key(f"{self.name}/{read}")
        self.oldest = number + 1

    def next(self) -> Any:
        """The next message, as soon as there is one."""
        self.number += 1
        key = f"{self.name}/{self.number}"
        while True:
            try:
                self.store.wait([key], IDLE)
            except dist.DistStoreError:  # nothing to do so far
                continue
            return pickle.loads(self.store.get(key))
