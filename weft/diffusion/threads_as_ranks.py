"""All ranks of a sampling table as threads of one process: what a table computes, without any process group."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

import torch

from weft.diffusion.sampling_check import RunnableTable
from weft.diffusion.sampling_run import (
    SampleSource,
    SamplingRun,
    TokenDenoiser,
    TokenSampler,
    run_sampling,
)
from weft.errors import WeftError
from weft.schedule.actions import Value

#: Seconds between two looks at whether another thread has failed.
LOOK_S = 0.5


class MemoryWire:
    """Transfers between threads that act as ranks, with the interface of :class:`weft.schedule.pipeline_wire.Wire`.

    ``queues``: values in transit by (source, target); ``rank``: number of this rank; ``failed``: set when a rank fails.
    """

    def __init__(
        self,
        queues: dict[tuple[int, int], SimpleQueue[tuple[Value, Any]]],
        rank: int,
        failed: Event,
    ) -> None:
        self.queues, self.rank, self.failed = queues, rank, failed
        self.bytes_sent = 0

    def send(self, value: Value, payload: Any, target: int, window: int) -> None:
        """Send a copy of ``payload`` as ``value`` to rank ``target``. ``window`` is not used."""
        self.bytes_sent += payload.numel() * payload.element_size()
        self.queues[self.rank, target].put((value, payload.clone()))

    def ask(self, value: Value, source: int) -> None:
        """Do nothing, because values arrive without being requested."""

    def take(self, value: Value, source: int, purpose: str) -> torch.Tensor:
        """Wait for ``value`` from rank ``source``, and return it. ``purpose``: what the value is for, in words for the
        error. Raises :class:`WeftError` if another rank has failed.
        """
        while True:
            try:
                arrived, payload = self.queues[source, self.rank].get(timeout=LOOK_S)
            except Empty:
                if self.failed.is_set():
                    raise WeftError(
                        f"rank {self.rank} waits for {value} to run {purpose}, and another rank has failed"
                    ) from None
                continue
            assert arrived == value, f"{value} is taken before {arrived}"
            return payload

    def flush(self) -> None:
        """Do nothing, because :meth:`send` returns only when its value has arrived."""


def run_as_threads(
    runnable: RunnableTable,
    denoiser: Callable[[], TokenDenoiser],
    sampler: TokenSampler,
    source: SampleSource,
) -> list[SamplingRun]:
    """Run all ranks of the sampling table ``runnable`` as threads of this process, and return the measurements of each
    rank.

    ``denoiser``: returns a new denoiser for each rank, all with the same weights. ``sampler``: updates the latents.
    ``source``: gives the noise, and gets finished samples. Raises the first error of a rank.
    """
    ranks = runnable.source.ranks
    queues: dict[tuple[int, int], SimpleQueue[tuple[Value, Any]]] = defaultdict(
        SimpleQueue
    )
    for pair in ((a, b) for a in range(ranks) for b in range(ranks)):
        queues[pair] = SimpleQueue()
    failed, denoisers = Event(), [denoiser() for _ in range(ranks)]

    def run(rank: int) -> SamplingRun:
        wire: Any = MemoryWire(queues, rank, failed)
        try:
            return run_sampling(runnable, rank, denoisers[rank], sampler, source, wire)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
