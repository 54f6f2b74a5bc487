"""Updates of a state that rests on the host, while the device updates some of its units.

:mod:`weft.schedule.alternate` makes the table of which unit is updated where, and in what order. Here the table runs:
every lane is a thread with a stream of its own, and waits for the actions that its actions depend on.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from weft.memory.nameless_file import TierError
from weft.memory.resting import ALIGNED, RestingGroup
from weft.memory.tier_file import BufferPool, page_buffer
from weft.parallel.state import Held, State, Unit
from weft.schedule.actions import Action, Key, Table
from weft.schedule.alternate import (
    BRING,
    HOST,
    ON_DEVICE,
    ON_HOST,
    RETURN,
    ROOMS,
    splits,
    update_table,
)
from weft.schedule.kinds import Clock

T = torch.Tensor

#: Measured updates of the whole state before a share is chosen by their fastest rates; the first touch new memory.
PROFILED = 3


#: Updates parameters and their slots in place by gradients.
Update = Callable[[Sequence[Held], Sequence[T]], None]


class UnitUpdate(NamedTuple):
    """The optimizer update of one unit (parameters that are updated together).

    ``held``: the unit's parameters that learn, as this rank holds them; ``grads``: their reduced gradients, in the
    order of ``held``.
    """

    held: Sequence[Held]
    grads: Sequence[T]

    @property
    def tensors(self) -> list[T]:
        """The tensors that the update reads: first the tensors that the update also changes (:attr:`changed`), then the
        gradients.
        """
        return [*self.changed, *self.grads]

    @property
    def changed(self) -> list[T]:
        """The tensors that the update changes: weights, optimizer slots, and counts of updates."""
        slots = (part.values for h in self.held for part in h.slots.values())
        return [*(h.local for h in self.held), *slots, *(h.updates for h in self.held)]

    @property
    def size(self) -> int:
        """Bytes that a copy of the update's tensors takes in the memory of another device, with each tensor aligned."""
        return sum(-(-t.nbytes // ALIGNED) * ALIGNED for t in self.tensors)

    def copied(self, room: T) -> "UnitUpdate":
        """Return the same update with all its tensors copied into ``room``, a uint8 tensor of at least :attr:`size`
        bytes on another device.
        """
        start, places = 0, []
        for t in self.tensors:
            place = room[start : start + t.nbytes].view(t.dtype).view(t.shape)
            places.append(place.copy_(t, non_blocking=True))
            start += -(-t.nbytes // ALIGNED) * ALIGNED
        left = iter(places)
        local = [next(left) for _ in self.held]
        slots = [
            {n: replace(p, values=next(left)) for n, p in h.slots.items()}
            for h in self.held
        ]
        updates = [next(left) for _ in self.held]
        held = [
            replace(h, local=w, slots=s, updates=n)
            for h, w, s, n in zip(self.held, local, slots, updates, strict=True)
        ]
        return UnitUpdate(held, list(left))


def pin_slots(jobs: Sequence[UnitUpdate], pool: BufferPool) -> None:
    """Move the slots of updates to pinned memory from ``pool``, unless they are in such memory already.

    The tensor objects stay the same. Weights and gradients on the host are pinned where they are made. Slots are made
    like any tensor of the CPU; a device copies from and to such memory at a fraction of the link's speed, and a thread
    of the host has to help. ``jobs``: the updates of all units.
    """
    for job in jobs:
        slots = [part.values for h in job.held for part in h.slots.values()]
        loose = [t for t in slots if t.numel() and not t.is_pinned()]
        with suppress(TierError):  # they then stay where they are, which is slower
            if loose:
                RestingGroup(loose, None, pool)


class Lane:
    """A thread that runs submitted callables in order, on a CUDA stream of its own where the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, "weft-update")

    def submit(self, work: Callable[[], None]) -> None:
        """Queue the callable ``work`` for the lane's thread, and return without waiting until it has run."""
        self.thread.submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        on_stream = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        with torch.no_grad(), on_stream:
            work()

    def finish(self) -> None:
        """Wait until the CUDA device has done all work that this lane's thread has launched; on a CPU, return at
        once.
        """
        if self.stream is not None:
            self.stream.synchronize()


class Alternating:
    """Updates a ``share`` of the units on ``device``, and the others on the host at the same time.

    The method is that of Maurya et al. 2024 (2410.21316). A unit is a group of parameters that are updated together.
    All units rest on the host. Those updated on the device are spread evenly among all; each is copied to the device,
    updated there and copied back. Host and device give the same bits if their arithmetic does. If ``device`` is a CPU,
    a second thread takes its place.

    ``share``: a number from 0 to 1, or "auto". With "auto" the first calls update half of the units on the device, and
    are timed. A simulation with these times then chooses the number of units on the device. ``report``: called once
    with a dict about this choice. ``wrap`` (attribute): a function through which each copy or update is run. It gets
    the schedule's action and the callable that runs it.
    """

    def __init__(
        self,
        device: torch.device,
        share: float | str,
        report: Callable[[dict[str, Any]], None] = lambda chosen: None,
    ) -> None:
        self.device, self.report = device, report
        self.share = None if share == "auto" else float(share)
        self.wrap: Callable[[Action, Callable[[], None]], None] = lambda a, work: work()
        self.rates: dict[str, float] = {}  # seconds per byte, the fastest
        self._profiled = 0
        self._lanes: dict[tuple[int, Clock], Lane] = defaultdict(lambda: Lane(device))
        self._rooms: list[T] = []

    def __call__(
        self, units: Sequence[tuple[Sequence[Held], Sequence[T]]], update: Update
    ) -> None:
        """Update the parameters of all ``units`` in place with the optimizer ``update``.

        Each unit is given as its parameters and their reduced gradients.
        """
        jobs = [UnitUpdate(held, grads) for held, grads in units]
        sizes = [job.size for job in jobs]
        if self.share is None and self._profiled >= PROFILED:
            self._choose(sizes)
        count = round((0.5 if self.share is None else self.share) * len(jobs))
        self._make_room(max(sizes, default=0) if count else 0)
        if count and self.device.type == "cuda":
            pin_slots(jobs, BufferPool(pinned=True))
        times = self._run(update_table(len(jobs), count), jobs, update)
        if self.share is None:
            self._note(times, sizes)

    def _make_room(self, size: int) -> None:
        """Allocate memory on the device for the units that are there at once, ``size`` bytes for each."""
        if size and (not self._rooms or self._rooms[0].numel() < size):
            on_device = partial(torch.empty, dtype=torch.uint8, device=self.device)
            make = page_buffer if self.device.type == "cpu" else on_device
            self._rooms = [make(size) for _ in range(ROOMS)]

    def _run(
        self, table: Table, jobs: Sequence[UnitUpdate], update: Update
    ) -> dict[Key, float]:
        """Run the table; return the seconds of each action."""
        done: dict[Key, Future[None]] = {a.key: Future() for a in table}
        ops, took = self._ops(table, jobs, update), dict[Key, float]()

        def run(a: Action, lane: Lane | None = None) -> None:
            try:
                for need in a.deps:
                    done[Key(*need)].result()
                begun = time.perf_counter()
                self.wrap(a, lambda: ops[a.kind](a))
                if lane is not None:
                    lane.finish()
                took[a.key] = time.perf_counter() - begun
                done[a.key].set_result(None)
            except BaseException as error:
                done[a.key].set_exception(error)

        for a in table:
            if a.rank != HOST:
                lane = self._lanes[a.rank, a.declared.clock]
                lane.submit(partial(run, a, lane))
        for a in table.ranks[HOST]:
            run(a)
        # all, so that nothing is under way when one has failed
        for future in done.values():
            future.exception()
        for future in done.values():
            future.result()
        return took

    def _ops(
        self, table: Table, jobs: Sequence[UnitUpdate], update: Update
    ) -> Mapping[str, Callable[[Action], None]]:
        away = [a.stage for a in table if a.kind == BRING]
        rooms = {unit: i % ROOMS for i, unit in enumerate(away)}
        there: dict[int, UnitUpdate] = {}

        def bring(a: Action) -> None:
            there[a.stage] = jobs[a.stage].copied(self._rooms[rooms[a.stage]])

        def back(a: Action) -> None:
            updated = there.pop(a.stage).changed
            for tensor, new in zip(jobs[a.stage].changed, updated, strict=True):
                tensor.copy_(new, non_blocking=True)

        return {
            ON_HOST: lambda a: update(*jobs[a.stage]), ON_DEVICE: lambda a: update(*there[a.stage]),
            BRING: bring, RETURN: back,
        }  # fmt: skip

    # --- the share

    def _note(self, times: Mapping[Key, float], sizes: Sequence[int]) -> None:
        """Keep the fastest rate of each kind of action; a rate is the mean over a table."""
        self._profiled += 1
        for kind in {key.kind for key in times}:
            keys = [key for key in times if key.kind == kind]
            seconds = sum(times[key] for key in keys)
            rate = seconds / sum(sizes[key.stage] for key in keys)
            self.rates[kind] = min(self.rates.get(kind, rate), rate)

    def _choose(self, sizes: Sequence[int]) -> None:
        if len(sizes) < 2:  # one side has been measured, so there is nothing to compare
            self.share = 0.0
            return
        by_time = splits(sizes, self.rates)
        self.share = by_time[0].device / len(sizes)
        self.report({
            "device": by_time[0].device, "units": len(sizes), "rates": self.rates,
            "seconds": [split.seconds for split in sorted(by_time)],
        })  # fmt: skip


def update_alternating(
    state: State,
    alternating: Alternating,
    grads: Callable[[Unit], Mapping[str, T]],
    lr: float,
    scale: float = 1.0,
) -> None:
    """Update all units of ``state`` on host and device with ``alternating``.

    ``grads``: function that returns the reduced gradients of a unit by name; they are multiplied by ``scale``. ``lr``:
    learning rate.
    """
    optimizer, units = state.optimizer, []
    assert optimizer is not None, "a state that only computes"
    state.settle()
    for unit in state.units:
        if held := [h for h in unit.held if h.learns]:
            own = grads(unit)
            units.append((held, [own[h.name] for h in held]))

    def update(held: Sequence[Held], own: Sequence[T]) -> None:
        if scale != 1.0:
            torch._foreach_mul_(list(own), scale)
        optimizer(held, own, lr)

    try:
        alternating(units, update)
    except BaseException as error:
        state.failed = error
        raise
    state.settle()
