"""Holds a phase to its share of the processor's cores: whole cores by affinity, the rest by pauses.

A share of 0.6 of two cores is 1.2 cores: two threads that compute 60 % of the time. An operating system would divide
the cores by itself, but equally, and users may not set other weights there. So a phase rests between two layers, for as
long as it has been ahead of its share. It has all cores while the other phase has nothing to do.
"""

import os
import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import NamedTuple, Protocol

#: In place of a core's number: any core will do, as the process has fewer threads than cores.
ANY = -1
#: Seconds of a rest at most before the share is looked at again, and of debt that a phase can have.
SLICE_S, DEBT_S = 0.005, 0.25


class CoreShare(NamedTuple):
    """The part of the processor cores that a phase may use, such as the computation of prompts. ``cores``: numbers of
    the cores. ``threads``: number of threads that compute. ``duty``: the fraction of the time in which they compute,
    above 0 and at most 1.
    """

    cores: tuple[int, ...]
    threads: int
    duty: float


def core_share(cores: Sequence[int], share: float, last: bool) -> CoreShare:
    """Return which of ``cores`` a phase uses if it may use the fraction ``share`` of them. ``last``: take the last
    cores instead of the first ones. Two phases that take opposite ends have at most one core in common, if their
    shares add up to at most 1.
    """
    amount = share * len(cores)
    threads = max(1, min(len(cores), ceil(amount - 1e-6)))
    own = cores[-threads:] if last else cores[:threads]
    return CoreShare(tuple(own), threads, min(1.0, amount / threads))


def own_cores() -> list[int]:
    """Return the numbers of the processor cores on which PyTorch computes in this process. If PyTorch has fewer threads
    than there are permitted cores, its cores are not known: the list then has :data:`ANY` once per thread.
    """
    import torch

    allowed, threads = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
    return allowed if len(allowed) <= threads else [ANY] * threads


def apply_share(share: CoreShare) -> None:
    """Restrict all threads of this process to the cores of ``share``, and set PyTorch's number of threads to
    ``share.threads``. The threads stay where they are if the cores are :data:`ANY`.
    """
    import torch

    for thread in os.listdir("/proc/self/task") if ANY not in share.cores else ():
        try:
            os.sched_setaffinity(int(thread), share.cores)
        except OSError:  # it has ended, or a container allows no change
            continue
    torch.set_num_threads(share.threads)


class Clocks(NamedTuple):
    """Functions that return a time in seconds. ``wall``: time that passes. ``spent``: processor time of all threads of
    this process.
    """

    wall: Callable[[], float] = time.monotonic
    spent: Callable[[], float] = time.process_time


class ShareSource(Protocol):
    """Interface of an object that says which fraction of the cores a phase may use."""

    def present_share(self) -> float:
        """Return the fraction of the cores that the phase may use now, from 0 to 1."""


class Pacer:
    """Keeps a phase of computation within its share of ``cores``, if :meth:`pace` is called often while it computes.
    ``source``: says which share of the cores the phase may use at the moment. ``last``: whether the phase takes the
    last cores instead of the first. ``apply``: sets the threads and cores of this process to a share. ``rest``:
    function that waits for a number of seconds, and may return earlier. ``clocks``: the clocks that it reads.
    """

    def __init__(
        self,
        cores: Sequence[int],
        source: ShareSource,
        last: bool,
        apply: Callable[[CoreShare], None] = apply_share,
        rest: Callable[[float], None] = time.sleep,
        clocks: Clocks = Clocks(),  # noqa: B008
    ) -> None:
        self.cores, self.source, self.last = tuple(cores), source, last
        self.apply, self.rest, self.clocks = apply, rest, clocks
        self.rested = 0.0  # seconds so far
        self._applied: tuple[tuple[int, ...], int] | None = None
        self.begin()

    def begin(self) -> None:
        """Start measuring the phase's use of the cores from now on; call this before the phase computes."""
        self._spent, self._debt = self.clocks.spent(), 0.0
        self._wall = self.clocks.wall()
        self._follow()

    def pace(self) -> None:
        """Rest until the phase has used no more than its share of the time since :meth:`begin`."""
        share = self._follow()
        spent, wall = self.clocks.spent(), self.clocks.wall()
        if share.duty >= 1.0:
            self._spent, self._wall, self._debt = spent, wall, 0.0
            return
        owed = (spent - self._spent) / (share.threads * share.duty)
        self._debt += owed - (wall - self._wall)
        self._debt = max(-SLICE_S, min(DEBT_S, self._debt))
        self._spent, self._wall = spent, wall
        # shorter rests than a microsecond may not move a clock
        while self._debt > 1e-6 and share.duty < 1.0:
            begun = self.clocks.wall()
            self.rest(min(SLICE_S, self._debt))
            passed = self.clocks.wall() - begun
            self._debt -= passed
            self.rested += passed
            share = self._follow()
        self._spent, self._wall = self.clocks.spent(), self.clocks.wall()

    def _follow(self) -> CoreShare:
        share = core_share(self.cores, self.source.present_share(), self.last)
        if (share.cores, share.threads) != self._applied:
            self.apply(share)
            self._applied = share.cores, share.threads
        return share
