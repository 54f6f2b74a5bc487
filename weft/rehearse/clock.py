"""Runs the programs of all ranks of a rehearsed step against each other, on a clock where busy ranks share cores.

Times are seconds, sizes bytes. Messages cost what the measured curves say (:mod:`weft.rehearse.curves`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from weft.layout.layout import Layout
from weft.rehearse.curves import ProbedMachine, Setting
from weft.rehearse.journal import Event
from weft.rehearse.rehearsed_step import Rehearsal
from weft.rehearse.worker_links import WorkerLinks


@dataclass(frozen=True)
class Do:
    """An action of a rank in a simulated step: ``cpu`` seconds of work on the cores, then ``wait`` seconds without a
    core.

    Attributes:
        ``kind``: ``work`` (no communication), ``meet`` (a collective), ``post`` (sends a message) or ``take`` (receives
            a message).
        ``key``: identifies the collective or the message, and is the same on all ranks that take part.
        ``members``: the ranks of a collective.
        ``cause``: the part of the step to which the time counts, a field of :class:`weft.planner.cost.Cost`.
    """

    kind: str
    cpu: float
    wait: float = 0.0
    key: tuple[Any, ...] = ()
    members: tuple[int, ...] = ()
    cause: str = ""


@dataclass(frozen=True)
class Far:
    """Model of the time that collectives and messages take over links that are much slower than the fastest link.

    The measured curves (:mod:`weft.rehearse.curves`) leave such links out. ``links``: the measured links between the
    processes of the probe. ``groups``: which groups communicate at the same time, and so share slow links. A key is the
    ranks of one group; its value is a table of all groups that run the same collective at once, one row of ranks per
    group. ``workers``: for each rank, the process of the probe whose links the rank is taken to have.
    """

    links: WorkerLinks
    groups: Mapping[tuple[int, ...], np.ndarray]
    workers: np.ndarray

    @classmethod
    def of(
        cls,
        links: WorkerLinks,
        rehearsed: Sequence[Sequence[Event]],
        workers: Sequence[int],
    ) -> Far:
        met = {
            e.ranks
            for events in rehearsed
            for e in events
            if e.kind == "collective" and len(e.ranks) > 1
        }
        groups = {}
        for ranks in met:
            beside, taken = [ranks], set(ranks)
            for other in sorted(met):
                if len(other) == len(ranks) and not taken & set(other):
                    beside.append(other)
                    taken |= set(other)
            groups[ranks] = np.array(beside)
        return cls(links, groups, np.array(workers))

    def collective(self, e: Event) -> float:
        if e.ranks not in self.groups:
            return 0.0
        speed, delay = (
            x[0] for x in self.links.pairs(self.workers[self.groups[e.ranks]], False)
        )
        if speed.min() >= self.links.shared:
            return 0.0
        n = len(e.ranks)
        rounds = (2 if e.name == "reduce" else 1) * (n - 1)
        return float(rounds * (e.bytes / n / speed.min() + delay.max()))

    def message(self, a: int, b: int, size: float) -> float:
        speed, delay = self.links.pairs(self.workers[[[a, b]]], True)
        return (
            0.0
            if speed[0, 0] >= self.links.shared
            else float(size / speed[0, 0] + delay[0, 0])
        )


def program(
    rank: int,
    events: Sequence[Event],
    setting: Setting,
    far: Far | None,
    layout: Layout,
) -> list[Do]:
    """Return the actions of ``rank`` in a simulated step, made from the recorded ``events`` with measured seconds.

    ``setting``: the measured costs of communication. ``far``: the time on slow links, None if links are alike.
    ``layout``: the layout of the step, by which communication is attributed to axes.
    """
    actions: list[Do] = []
    met: dict[tuple[int, ...], int] = defaultdict(int)
    sent: dict[tuple[int, ...], int] = defaultdict(int)
    asked: dict[int, Do] = {}
    for e in events:
        if e.kind == "work":
            actions.append(Do("work", e.seconds, cause=e.name))
        elif e.kind == "collective":
            work, wait = setting.collective(e)
            wait = max(wait, far.collective(e) - work) if far else wait
            met[e.ranks] += 1
            actions.append(
                Do(
                    "meet",
                    work,
                    wait,
                    (e.ranks, met[e.ranks]),
                    e.ranks,
                    axis_of(layout, e.ranks),
                )
            )
        elif e.kind in ("send", "recv"):
            peer, tag = e.ranks
            ends = (rank, peer) if e.kind == "send" else (peer, rank)
            work, wait = setting.message(e.bytes)
            wait = max(wait, far.message(*ends, e.bytes)) if far else wait
            sent[*ends, tag] += 1
            key, cause = (*ends, tag, sent[*ends, tag]), axis_of(layout, ends)
            if e.kind == "send":
                actions.append(Do("post", work, wait, key, cause=cause))
            else:
                asked[e.number] = Do("take", work, 0.0, key, cause=cause)
        elif e.kind == "wait" and e.name == "recv" and e.number in asked:
            actions.append(asked.pop(e.number))
    return actions


def run(programs: Sequence[Sequence[Do]], cores: float, threads: int = 1) -> float:
    """Simulate all ranks together, and return the seconds until all of them have finished.

    Busy ranks share ``cores`` cores evenly. ``programs``: the actions of every rank. ``threads``: number of threads
    with which each rank computes. Raises ``ValueError`` if ranks wait for each other in a circle. In
    :mod:`weft.schedule.simulate`, by contrast, each rank has a device of its own.
    """
    count = len(programs)
    at, left = [0] * count, [0.0] * count
    begun = [False] * count
    until = [0.0] * count  # asleep before
    arrived: dict[Any, set[int]] = defaultdict(set)
    there: dict[Any, float] = {}  # messages, and when they arrive
    now = 0.0
    while True:
        moved = True
        while moved:
            moved = False
            for r in range(count):
                while at[r] < len(programs[r]) and until[r] <= now and left[r] <= 0:
                    do = programs[r][at[r]]
                    if begun[r]:  # its work is done
                        if do.kind == "post":
                            there[do.key] = now + do.wait
                        elif do.wait:
                            until[r] = now + do.wait
                        at[r], begun[r], moved = at[r] + 1, False, True
                        continue
                    if do.kind == "meet":
                        if r not in arrived[do.key]:
                            arrived[do.key].add(r)
                            moved = True
                        if len(arrived[do.key]) < len(do.members):
                            break
                    if do.kind == "take" and there.get(do.key, math.inf) > now + 1e-12:
                        break
                    begun[r], left[r], moved = True, max(do.cpu, 1e-12), True
        busy = [r for r in range(count) if left[r] > 0]
        if not busy and all(at[r] >= len(programs[r]) for r in range(count)):
            return max([now, *until])
        rate = min(1.0, cores / (threads * len(busy))) if busy else 1.0
        ahead = [now + left[r] / rate for r in busy] + [t for t in until if t > now]
        ahead += [t for t in there.values() if t > now + 1e-12]
        if not ahead:
            stuck = [
                (r, programs[r][at[r]])
                for r in range(count)
                if at[r] < len(programs[r])
            ]
            raise ValueError(f"these ranks wait for each other: {stuck}")
        then = min(ahead)
        for r in busy:
            left[r] -= (then - now) * rate
            if left[r] < 1e-12:
                left[r] = 0.0
        now = then


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of a step.

    ``seconds``: the time of the step. ``memory``: peak resident bytes of each rank. ``busy``: processor seconds of each
    rank. ``parts``: seconds of the step by cause (a field of :class:`weft.planner.cost.Cost`), of which ``bubble`` is
    the time for which ranks wait for each other.
    """

    seconds: float
    memory: tuple[float, ...]
    busy: tuple[float, ...]
    parts: Mapping[str, float]


def predict_step(
    local: ProbedMachine,
    rehearsed: Sequence[Rehearsal],
    layout: Layout,
    workers: Sequence[int] = (),
) -> Prediction:
    """Return the predicted time and memory of a step, from every rank's rehearsed step.

    ``local``: the probed machine. ``rehearsed``: the rehearsed step of each rank. ``layout``: the layout of the step.
    ``workers``: for each rank, the process of the probe on whose links the rank communicates, by default the process
    with the rank's number.
    """
    world = len(rehearsed)
    setting, uneven = local.setting(world), local.uneven(world)
    far = (
        Far.of(uneven, [seen.events for seen in rehearsed], workers or range(world))
        if uneven
        else None
    )
    programs = [
        program(r, seen.events, setting, far, layout)
        for r, seen in enumerate(rehearsed)
    ]
    seconds = run(programs, local.cores, setting.threads)
    busy = tuple(sum(do.cpu for do in p) for p in programs)
    memory = tuple(setting.resident(layout, seen.peak) for seen in rehearsed)
    parts: dict[str, float] = defaultdict(float)
    side_by_side = max(1.0, min(world, local.cores / setting.threads))
    for do in chain.from_iterable(programs):
        parts[do.cause] += do.cpu / side_by_side + do.wait / world
    known = sum(parts.values())
    if known > seconds:  # some waited while others worked
        parts = defaultdict(
            float, {cause: s * seconds / known for cause, s in parts.items()}
        )
    return Prediction(
        seconds, memory, busy, parts | {"bubble": max(0.0, seconds - known)}
    )


def axes_along(layout: Layout, ranks: Sequence[int]) -> set[str]:
    """Return the axes of ``layout`` along which the coordinates of ``ranks`` differ."""
    places = np.unravel_index(
        np.array(ranks, dtype=int), [layout.size(axis) for axis in layout.axis_order]
    )
    return {
        axis
        for axis, row in zip(layout.axis_order, places, strict=True)
        if len(set(row.tolist())) > 1
    }


def axis_of(layout: Layout, ranks: Sequence[int]) -> str:
    """Return the field of :class:`weft.planner.cost.Cost` to which traffic among ``ranks`` is counted.

    It follows from the axes of ``layout`` along which the ranks lie.
    """
    along = axes_along(layout, ranks)
    if along & {"dp", "shard"}:
        return "dp" if not along & {"tp", "pp"} else "other"
    return along.pop() if len(along) == 1 else "other"
