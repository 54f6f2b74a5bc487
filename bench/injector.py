"""Fault injection: ranks of a run are killed, frozen, slowed and cut off at random instants.

The run is ``weft train`` as a user starts it, and observed by its files alone: ``ranks/members.json`` has the members
(see :mod:`weft.resilience.roster`), ``metrics.jsonl`` what happens. ``bench/campaign.py`` judges it.
"""

from __future__ import annotations

import json
import os
import sched
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil
from hosts import Host

from weft.observe.run_metrics import FILE, Record

#: Kinds of faults, and what each does.
KINDS = {
    "kill": "kills a rank (SIGKILL)",
    "leader": "kills the rank that leads the agreement about who takes part: the member with the lowest number",
    "two": "kills two ranks at once",
    "host": "kills all ranks of a host at once",
    "freeze": "stops a rank (SIGSTOP); every other one goes on after a while",
    "link": "pulls the cable of a host for a while",
    "slow": "stops a rank half of the time, for a while",
}
#: So many ranks always survive.
LEAST = 2
#: Seconds that a rank stays frozen, a cable out, a rank slow: at random between these.
LASTS = {"freeze": (0.3, 6.0), "link": (0.5, 6.0), "slow": (2.0, 6.0)}
#: Seconds for which a slow rank is stopped, and then runs; and after which a fault that is not possible yet is retried.
PULSE, PAUSE = 0.08, 0.5
#: Seconds after which lost ranks are replaced: at random between these.
REPLACED = (0.5, 4.0)

Member = Mapping[str, Any]


@dataclass(frozen=True)
class Fault:
    """A fault (:data:`KINDS`), ``at`` seconds after the run's first step. It ``lasts`` so many seconds, or for ever.

    ``draw``: the seed that decides who is hit.
    """

    kind: str
    at: float
    draw: int
    lasts: float | None = None


def schedule(counts: Mapping[str, int], seconds: float, seed: int) -> list[Fault]:
    """``counts[kind]`` faults of each kind at random instants within ``seconds``; the same for the same seed."""
    draw = Random(seed)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    draw.shuffle(kinds)
    faults, frozen = [], 0
    for kind, at in zip(
        kinds, sorted(draw.uniform(0, seconds) for _ in kinds), strict=True
    ):
        frozen += kind == "freeze"
        lasts = (
            draw.uniform(*LASTS[kind])
            if kind in LASTS and not (kind == "freeze" and frozen % 2)
            else None
        )
        faults.append(
            Fault(kind, round(at, 3), draw.getrandbits(32), lasts and round(lasts, 3))
        )
    return faults


@dataclass
class Hit:
    """A fault that has happened: when, to which members (``who``) of how many living ones, after which step."""

    fault: Fault
    time: float
    who: list[Member]
    living: int
    step: int

    @property
    def numbers(self) -> set[int]:
        return {int(member["number"]) for member in self.who}


class DisturbedRun:
    """A run under way: its processes, the members of its view, and its records so far."""

    def __init__(
        self, folder: Path, processes: Sequence[subprocess.Popen[bytes]]
    ) -> None:
        self.folder, self.processes = folder, list(processes)
        # what has started more ranks since
        self.added: list[subprocess.Popen[bytes]] = []
        self.records: list[Record] = []
        self._file = self._read = 0

    def members(self) -> list[Member]:
        """The members of the present view; none before the first one."""
        with suppress(OSError, ValueError):
            return list(
                json.loads((self.folder / "ranks/members.json").read_text())["members"]
            )
        return []

    def look(self) -> bool:
        """Read what has been recorded since the last call; returns whether there is a new step.

        A run that goes back to a step removes later records by writing the file anew; that is read from the start.
        """
        path = self.folder / FILE
        with suppress(OSError), path.open("rb") as file:
            if (now := os.fstat(file.fileno()).st_ino) != self._file:
                self._file, self._read, self.records = now, 0, []
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
            self._read += len(whole) + bool(whole)
            new = [json.loads(line) for line in whole.splitlines()]
            self.records += new
            return any(record["kind"] == "train" for record in new)
        return False

    @property
    def step(self) -> int:
        return max((r["step"] for r in self.records if r["kind"] == "train"), default=0)

    @property
    def ended(self) -> bool:
        return all(
            process.poll() is not None for process in (*self.processes, *self.added)
        )


class Injector:
    """Injects faults into a run, and ends those that last for a while (thaws a rank, puts a cable back).

    ``add(count, random)`` starts so many new ranks, in place of lost ones. ``hits``: the faults that have happened;
    ``last``: when the last one did.
    """

    def __init__(
        self,
        run: DisturbedRun,
        faults: Sequence[Fault],
        hosts: Sequence[Host] = (),
        add: Callable[[int, Random], None] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.run, self.hosts, self.add, self.say = run, hosts, add, say
        self.hits: list[Hit] = []
        self.last = 0.0
        self.processes: dict[int, psutil.Process] = {}  # by member
        # by process: the process that has started it
        self.launchers: dict[int, int] = {}
        self._gone: set[int] = set()  # members that were killed, or frozen for ever
        self._down: Host | None = None  # its cable is out
        self._agenda = sched.scheduler(time.monotonic)
        self._planned = len(faults)
        for fault in faults:
            self._later(fault.at, self._inject, fault)

    def work(self) -> None:
        """Do what is due."""
        self._agenda.run(blocking=False)

    def restore(self) -> None:
        """Before the run's end: put the cable back, thaw ranks that were to thaw, and kill those that were not."""
        for event in self._agenda.queue:
            self._agenda.cancel(event)
        if self._down:
            self._down.link(up=True)
        for number, process in self.processes.items():
            with suppress(psutil.NoSuchProcess):
                process.kill() if number in self._gone else process.resume()

    def has_ended_all_of(self, launcher: int) -> bool:
        """Whether faults have ended every rank that the process ``launcher`` had started."""
        ranks = {
            pid for pid, started_by in self.launchers.items() if started_by == launcher
        }
        return bool(ranks) and ranks <= {
            self.processes[number].pid for number in self._gone
        }

    @property
    def left(self) -> int:
        """Faults that have not happened."""
        return self._planned - len(self.hits)

    def _later(
        self, seconds: float, action: Callable[..., None], *arguments: Any
    ) -> None:
        self._agenda.enter(seconds, 0, action, arguments)

    def _inject(self, fault: Fault) -> None:
        """Hit the ranks that the fault's seed chooses; if there are too few, try again soon."""
        living = self._living()
        who = self._victims(fault, living)
        for_good = fault.lasts is None
        if not who or (for_good and len(living) - len(who) < LEAST):
            self._later(PAUSE, self._inject, fault)
            return
        numbers, self.last = [int(m["number"]) for m in who], time.monotonic()
        self.run.look()
        self.hits.append(Hit(fault, time.time(), who, len(living), self.run.step))
        self.say(
            f"{fault.kind}: "
            + ", ".join(f"rank {m['rank']} (process {m['pid']})" for m in who)
        )
        if fault.kind == "link":
            self._pull(
                next(h for h in self.hosts if h.address == who[0]["host"]),
                fault.lasts or 0,
            )
        elif fault.kind == "slow":
            self._slow(numbers[0], time.monotonic() + (fault.lasts or 0))
        else:
            for number in numbers:
                self._signal(number, "suspend" if fault.kind == "freeze" else "kill")
            if not for_good:
                self._later(fault.lasts or 0, self._signal, numbers[0], "resume")
        if for_good:
            self._gone |= set(numbers)
            if self.add is not None:
                draw = Random(fault.draw)
                self._later(draw.uniform(*REPLACED), self.add, len(numbers), draw)

    def _living(self) -> list[Member]:
        """Members that no fault has ended; their processes are remembered."""
        members = self.run.members()
        for member in members:
            if member["number"] not in self.processes:
                with suppress(psutil.NoSuchProcess):
                    self.processes[member["number"]] = process = psutil.Process(
                        member["pid"]
                    )
                    self.launchers[process.pid] = process.ppid()
        return [
            m
            for m in members
            if m["number"] in self.processes and m["number"] not in self._gone
        ]

    def _victims(self, fault: Fault, living: Sequence[Member]) -> list[Member]:
        draw = Random(fault.draw)
        if not living or (fault.kind == "link" and self._down):
            return []  # one cable at a time: of three hosts two must see each other
        if fault.kind == "leader":
            return [min(living, key=lambda m: int(m["number"]))]
        if fault.kind in ("host", "link"):
            address = draw.choice(sorted({m["host"] for m in living}))
            return [m for m in living if m["host"] == address]
        return draw.sample(
            list(living), min(len(living), 2 if fault.kind == "two" else 1)
        )

    def _signal(self, number: int, what: str) -> None:
        with suppress(psutil.NoSuchProcess):
            getattr(self.processes[number], what)()

    def _slow(self, number: int, until: float, stop: bool = True) -> None:
        self._signal(number, "suspend" if stop else "resume")
        if stop or time.monotonic() < until:
            self._later(PULSE, self._slow, number, until, not stop)

    def _pull(self, host: Host, lasts: float) -> None:
        def back() -> None:
            host.link(up=True)
            self._down = None

        host.link(up=False)
        self._down = host
        self._later(lasts, back)
