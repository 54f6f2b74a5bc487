"""Updates of a state that rests on the host, some units of which the device updates meanwhile.

:mod:`weft.schedule.alternate` says which, and in what order. Here the table runs: every lane of it is a thread with a
stream of its own, and waits for what its actions depend on.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from weft.memory.resting import ALIGNED
from weft.memory.tier_file import page_buffer
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

#: Updates of a whole state by whose fastest rates a share is chosen; the first ones touch memory anew.
PROFILED = 3


#: Updates these parameters and what belongs to them in place, by these gradients.
Update = Callable[[Sequence[Held], Sequence[T]], None]


class UnitUpdate(NamedTuple):
    """The parameters of a unit that learn, and their reduced gradients."""

    held: Sequence[Held]
    grads: Sequence[T]

    @property
    def tensors(self) -> list[T]:
        """What an update reads: first what it changes."""
        return [*self.changed, *self.grads]

    @property
    def changed(self) -> list[T]:
        slots = (part.values for h in self.held for part in h.slots.values())
        return [*(h.local for h in self.held), *slots, *(h.updates for h in self.held)]

    @property
    def size(self) -> int:
        """Bytes of room that it needs elsewhere."""
        return sum(-(-t.nbytes // ALIGNED) * ALIGNED for t in self.tensors)

    def copied(self, room: T) -> "UnitUpdate":
        """The same unit with its tensors in ``room``, uint8."""
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


class Lane:
    """Does one thing after the other in a thread of its own, on a stream of its own where the device has such."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, "weft-update")

    def submit(self, work: Callable[[], None]) -> None:
        self.thread.submit(self._run, work)

    def _run(self, work: Callable[[], None]) -> None:
        with (
            torch.no_grad(),
            torch.cuda.stream(self.stream) if self.stream else nullcontext(),
        ):
            work()

    def finish(self) -> None:
        """Return when the device has done what this lane's thread has asked of it."""
        if self.stream is not None:
            self.stream.synchronize()


class Alternating:
    """Updates units on the host and meanwhile a ``share`` of them, evenly among the others, on ``device``.

    With "auto" the first updates are measured with half of them there, and the share is that of the shortest simulated
    table, which ``report`` is then called with. Both sides' updates have the same bits where their arithmetic has; with
    a CPU in the place of the device that is a second thread. ``wrap`` is called with each action and what it does.
    """

    def __init__(
        self,
        device: torch.device,
        share: float | str,
        report: Callable[[dict[str, Any]], None] = lambda found: None,
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
        """Update all of these."""
        jobs = [UnitUpdate(held, grads) for held, grads in units]
        sizes = [job.size for job in jobs]
        if self.share is None and self._profiled >= PROFILED:
            self._choose(sizes)
        count = round((0.5 if self.share is None else self.share) * len(jobs))
        self._make_room(max(sizes, default=0) if count else 0)
        times = self._run(update_table(len(jobs), count), jobs, update)
        if self.share is None:
            self._note(times, sizes)

    def _make_room(self, size: int) -> None:
        """Have memory on the device for the units that are there at a time, each of at most so many bytes."""
        if size and (not self._rooms or self._rooms[0].numel() < size):
            here = self.device.type == "cpu"
            self._rooms = [
                page_buffer(size)
                if here
                else torch.empty(size, dtype=torch.uint8, device=self.device)
                for _ in range(ROOMS)
            ]

    def _run(
        self, table: Table, jobs: Sequence[UnitUpdate], update: Update
    ) -> dict[Key, float]:
        """Run the table; seconds that each action took."""
        done: dict[Key, Future[None]] = {a.key: Future() for a in table}
        ops, took = self._ops(table, jobs, update), dict[Key, float]()

        def one(a: Action, lane: Lane | None) -> None:
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
                lane.submit(lambda a=a, lane=lane: one(a, lane))  # type: ignore[misc]
        for a in table.ranks[HOST]:
            one(a, None)
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
            for mine, made in zip(
                jobs[a.stage].changed, there.pop(a.stage).changed, strict=True
            ):
                mine.copy_(made, non_blocking=True)

        return {
            ON_HOST: lambda a: update(*jobs[a.stage]), ON_DEVICE: lambda a: update(*there[a.stage]),
            BRING: bring, RETURN: back,
        }  # fmt: skip

    # --- the share

    def _note(self, times: Mapping[Key, float], sizes: Sequence[int]) -> None:
        """Keep the fastest rates of each kind, over all its actions of one table together."""
        self._profiled += 1
        for kind in {key.kind for key in times}:
            of_kind = [key for key in times if key.kind == kind]
            rate = sum(times[key] for key in of_kind) / sum(
                sizes[key.stage] for key in of_kind
            )
            self.rates[kind] = min(self.rates.get(kind, rate), rate)

    def _choose(self, sizes: Sequence[int]) -> None:
        if len(sizes) < 2:  # one side has been measured, so there is nothing to compare
            self.share = 0.0
            return
        found = splits(sizes, self.rates)
        self.share = found[0].device / len(sizes)
        self.report({
            "device": found[0].device, "units": len(sizes), "rates": self.rates,
            "seconds": [split.seconds for split in sorted(found)],
        })  # fmt: skip


def update_alternating(
    state: State,
    alternating: Alternating,
    grads: Callable[[Unit], Mapping[str, T]],
    lr: float,
    scale: float = 1.0,
) -> None:
    """Have ``alternating`` update all units of ``state`` by what ``grads`` says of each, times ``scale``."""
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
