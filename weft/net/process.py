"""Identities of processes and machines, and a check whether a process still lives."""

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

PROC = Path("/proc")
#: The variable by which ranks that are forks of one process know the processes of all, in the order of ranks.
PIDS = "WEFT_RANK_PIDS"


def machine_id(*namespaces: str) -> str:
    """Return a text that identifies one boot of this machine, and the Linux namespaces of this process.

    ``namespaces``: kinds of namespaces to include. Processes with the same ``pid`` namespace see each other by
    process number. Processes with the same ``net`` namespace reach each other over the loopback interface.
    """
    parts = [platform.node()]
    with suppress(OSError):
        parts.append((PROC / "sys/kernel/random/boot_id").read_text().strip())
        parts += [os.readlink(PROC / "self/ns" / name) for name in namespaces]
    return "/".join(parts)


Sight = Literal["gone", "stopped", "works", "blocked", "idle"]


class ProcessSight(NamedTuple):
    """State of a process at one moment.

    ``state``: "gone", "stopped", "works" (the process has used a processor since the last look, or waits for one),
    "blocked" (it has not, and is in a call that no signal ends, as to a file system) or "idle". ``ticks``: processor
    time of the process so far, in clock ticks.
    """

    state: Sight
    ticks: int


def started_at(pid: int) -> float:
    """Return when the process with number ``pid`` started, in a unit of the system that only :func:`look_at` compares.

    Returns 0 if there is no such process.
    """
    try:
        return _stat(pid).started
    except OSError:
        return 0.0


def look_at(pid: int, started: float | None = None, ticks: int = -1) -> ProcessSight:
    """Return the state of the process with number ``pid`` on this machine.

    ``started``: the result of :func:`started_at` for it; if given, another process that has got the same number counts
    as gone. ``ticks``: its processor time at the last look, -1 for the first look.
    """
    try:
        now = _stat(pid)
        if started not in (None, now.started) or now.state in "ZX":
            return ProcessSight("gone", now.ticks)
        if now.state in "Tt":
            return ProcessSight("stopped", now.ticks)
        states = _states(pid)
        if now.ticks != ticks or "R" in states:
            return ProcessSight("works", now.ticks)
        return ProcessSight("blocked" if "D" in states else "idle", now.ticks)
    except OSError:
        return ProcessSight("gone", ticks)


class _Stat(NamedTuple):
    state: str
    ticks: int
    started: float  # not by the clock, which may be set


def _stat(pid: int, task: str = "") -> _Stat:
    """Read the state of a process or of one of its threads. Raises OSError if it is gone."""
    if not PROC.joinpath("self/stat").exists():
        return _stat_elsewhere(pid)
    folder = PROC / str(pid) / (f"task/{task}" if task else "")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError as error:  # between opening and reading
        raise FileNotFoundError from error
    return _Stat(fields[0], int(fields[11]) + int(fields[12]), float(fields[19]))


def _states(pid: int) -> set[str]:
    """Return the states of all threads of a process."""
    with suppress(FileNotFoundError):
        return {_stat(pid, task).state for task in os.listdir(PROC / f"{pid}/task")}
    return set()


def _stat_elsewhere(pid: int) -> _Stat:
    """Read the state of a process on systems without Linux's ``/proc``; see :func:`_stat`."""
    import psutil

    try:
        process = psutil.Process(pid)
        letter = {psutil.STATUS_ZOMBIE: "Z", psutil.STATUS_STOPPED: "T"}
        used = process.cpu_times()
        return _Stat(
            letter.get(process.status(), "S"),
            round((used.user + used.system) * 100),
            round(process.create_time()),
        )
    except psutil.Error as error:
        raise FileNotFoundError from error
