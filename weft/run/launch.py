"""Starts the ranks of one machine and ends them together.

``launch`` runs this command again as several processes. A rank that fails leaves a record (:mod:`weft.run.failure`);
the parent picks the root cause from all records and exit codes.
"""

import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import psutil

from weft.net.process import PIDS, look_at
from weft.run.failure import Exit, Failure, Grade, oom_kills, root_cause, show
from weft.run.forked import ForkedRank, fork_ranks
from weft.run.rank_processes import LEFT_OUT, MEMBERS, threads_per_rank
from weft.run.signals import (
    RUN_FILE,
    Stopped,
    ctrl_c_held_back,
    noted_signals,
    requests,
    stop_signals,
)

if TYPE_CHECKING:
    import torch.distributed as dist

#: A rank as its launcher sees it.
Process: TypeAlias = "psutil.Popen | ForkedRank"
#: Seconds that ranks get, after Ctrl-C or SIGTERM, to save and stop before they are killed.
GRACE_S = 60
#: Seconds that the others get to end when a rank has failed.
END_S = 3
#: Seconds that the others get to save and stop, once a rank that was asked to stop has ended with an error.
AFTER_FAILURE_S = 10
#: Seconds that killed ranks get to be gone; to give back much memory takes some.
KILLED_S = 30
#: Seconds between two looks at the ranks.
LOOK_S = 0.05

# What a rank runs before the command proper: the kernel is told to kill it when the launcher dies, whatever the cause
# (PR_SET_PDEATHSIG survives exec). Elsewhere than on Linux, ranks of a killed launcher end with their next collective.
# Ctrl-C is held back from weft itself until it is there (ctrl_c_held_back); others get it from here on. It comes
# through the launcher alone, also where that is a background job, which inherits an ignored SIGINT.
_ENTRY = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
signal.signal(signal.SIGINT, signal.SIG_DFL)
if command[1:2] != ["-m"] or command[2].partition(".")[0] != "weft":
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(parent):
    sys.exit(1)
os.execv(command[0], command)
"""


def launch(
    argv: list[str], ranks: int, command: list[str] | None = None, threads: int = 0, survive: bool = False,
    patience: float = math.inf, shared: Sequence[str] = (), grace: float | None = None,
) -> int:  # fmt: skip
    """Run ``weft *argv`` as several processes of this machine. Prints why they failed, and returns the exit code.

    After a signal, it also prints lines that the ranks could not print themselves.

    Args:
        ``argv``: the arguments of ``weft``.
        ``ranks``: number of processes.
        ``command``: command to run instead of ``weft *argv``; None: there is none.
        ``threads``: threads of each rank; 0: an equal share of the cores.
        ``survive``: whether the run goes on if ranks are lost, so that the loss of a rank is no failure.
        ``patience``: seconds after which a rank that is stopped (SIGSTOP) counts as failed.
        ``shared``: names of modules that this process imports before it forks the ranks from itself. If it is empty,
            each rank is started as a new process.
        ``grace``: seconds that ranks get to end after a signal, if a signal is the usual way to end this command. The
            exit code then is 0 if all ranks have ended well. None: :data:`GRACE_S`, and 128 + the signal's number.
    """
    ended = run_ranks(
        command or [sys.executable, "-m", "weft", *argv],
        ranks,
        threads,
        survive,
        patience,
        partial(fork_ranks, argv, ranks, shared) if shared and not command else list,
        grace,
    )
    if ended.cause is not None:
        show(ended.cause)
    elif ended.unsaid:
        print(f"weft: {ended.unsaid}", file=sys.stderr)
    return ended.code


class RanksEnded(NamedTuple):
    """End of a launch.

    ``code``: exit code of the launch; ``cause``: failure that caused the end, or None; ``unsaid``: lines for the user
    about a received signal that the ranks could not print themselves.
    """

    code: int
    cause: Failure | None = None
    unsaid: str = ""


def run_ranks(
    command: list[str],
    ranks: int,
    threads: int = 0,
    survive: bool = False,
    patience: float = math.inf,
    fork: Callable[[], list[ForkedRank]] = list,
    grace: float | None = None,
) -> RanksEnded:
    """Run ``command`` as several processes of this machine (the ranks), and return how they have ended.

    Ctrl-C, SIGTERM and SIGHUP are passed on to the ranks, which then have :data:`GRACE_S` seconds to stop. A second
    signal ends them at once, unless it follows so soon that it counts as a repetition of the first. The exit code after
    a signal is 128 + its number. If a rank fails, the others are stopped.

    Args:
        ``ranks``: number of processes.
        ``threads``: threads of each rank; 0: an equal share of the cores.
        ``survive``: whether the run goes on if ranks are lost. A rank that was killed or left out is then no failure,
            if this happens after all ranks have exchanged addresses at the start.
        ``patience``: seconds after which a rank that is stopped (SIGSTOP) counts as failed.
        ``fork``: function that returns forked processes to be the ranks. If it returns none, each rank is a new process
            that runs ``command``.
        ``grace``: the argument of :func:`launch`.
    """
    import torch.distributed as dist

    # an import has swallowed the exception: nobody need be started for that
    if requests.asked:
        raise Stopped
    folders = tempfile.TemporaryDirectory(
        prefix="weft-ranks-", ignore_cleanup_errors=True
    )
    started, stopped, failed, before = (
        list[Process](),
        dict[int, float](),
        dict[int, Exit](),
        oom_kills(),
    )
    entry = [sys.executable, "-I", "-S", "-c", _ENTRY, str(os.getpid())]
    with folders as folder, noted_signals(stop_signals(), _kill_all) as received:
        try:
            started += fork()
            forked = started.copy()
            pids = ",".join(str(process.pid) for process in forked)
            # Where the ranks meet: at a port that the store itself picks, so that no other run can have it. It has
            # threads, so it comes after the forks.
            store = dist.TCPStore(
                "127.0.0.1", 0, is_master=True, wait_for_workers=False
            )
            for rank in range(ranks):
                env = rank_environment(rank, ranks, threads) | {
                    "MASTER_PORT": str(store.port), "TORCHELASTIC_ERROR_FILE": f"{folder}/{rank}.json",
                    RUN_FILE: f"{folder}/run", PIDS: pids,
                }  # fmt: skip
                if forked:
                    forked[rank].begin(env)
                    continue
                # In a session of its own: a terminal's Ctrl-C comes to it through this process alone.
                with ctrl_c_held_back():
                    started.append(
                        psutil.Popen(
                            [*entry, *command], env=env, start_new_session=True
                        )
                    )
            met, running = False, time.monotonic()
            stuck: list[int] = []
            while (
                not (received or stuck or _over(started, met))
                and time.monotonic() - running <= patience
            ):
                time.sleep(LOOK_S)
                if patience == math.inf or not any(map(_is_stopped, started)):
                    running = time.monotonic()
                met = met or (survive and _have_met(store, ranks))
                stuck = _stuck(Path(folder), started)
            if not received:
                failed = {
                    rank: Exit(p.returncode, time.time())
                    for rank, p in enumerate(started)
                    if p.returncode
                }
                if survive and 0 in (p.returncode for p in started):
                    failed = {
                        rank: end
                        for rank, end in failed.items()
                        if not _is_lost(end.code)
                    }
                failed |= {rank: Exit(1, time.time()) for rank in stuck}
            if received or failed or time.monotonic() - running > patience:
                stopped = _end(started, received, GRACE_S if grace is None else grace)
        finally:
            _kill(started)
        cause = _cause(Path(folder), failed, stopped, before)
        unsaid = _unsaid(Path(folder), started) if received else ""
    code = 128 + received[0] if received else int(bool(failed or stopped))
    if grace is not None and all(process.returncode == 0 for process in started):
        code = 0
    if code == 0 or cause is None or (code > 128 and cause.grade > Grade.UNEXPECTED):
        return RanksEnded(code, unsaid=unsaid)
    return RanksEnded(code if code > 128 else cause.exit_code, cause)


def _unsaid(folder: Path, started: Sequence[Process]) -> str:
    """Return the lines that ranks could not print because a signal ended them; empty if they ended regularly."""
    file = folder / "run"
    run = file.read_text() if file.is_file() else None
    if run == "" or all(process.returncode == 0 for process in started):
        return ""
    return requests.words(Path(os.path.relpath(run)) if run else None)


def _over(started: Sequence[Process], survive: bool) -> bool:
    """Return whether there is nothing more to wait for: a rank has failed, all are done, or no rank is left to go on.

    If ranks ``survive`` others, stopped ranks do not keep the launcher once the rest is done.
    """
    codes = [process.poll() for process in started]
    if not survive:
        return codes.count(0) == len(started) or any(codes)
    left = [
        process for process, code in zip(started, codes, strict=True) if code is None
    ]
    return (
        any(code and not _is_lost(code) for code in codes)
        or not left
        or (0 in codes and all(map(_is_stopped, left)))
    )


def _stuck(folder: Path, started: Sequence[Process]) -> list[int]:
    """Return ranks that announced their end :data:`END_S` seconds ago and have not ended, because the kernel waits for
    a device.
    """
    said = {
        rank: folder / f"{rank}.json"
        for rank, process in enumerate(started)
        if process.poll() is None
    }
    return [
        rank
        for rank, file in said.items()
        if file.is_file() and time.time() - file.stat().st_mtime > END_S
    ]


def _is_lost(code: int) -> bool:
    """Return whether a rank with this exit code was killed, or left out by the others."""
    return code < 0 or code == LEFT_OUT


def _is_stopped(process: Process) -> bool:
    return look_at(process.pid).state == "stopped"


def _have_met(store: "dist.Store", ranks: int) -> bool:
    """Return whether all ranks have exchanged their addresses."""
    return bool(store.check([f"{MEMBERS}/{rank}" for rank in range(ranks)]))


def rank_environment(rank: int, ranks: int, threads: int) -> dict[str, str]:
    """Return the environment variables of one rank on this machine, as torchrun sets them.

    ``rank``: number of the rank; ``ranks``: number of all ranks; ``threads``: threads of each rank, 0 for an equal
    share of the cores.
    """
    # All ranks are on this machine: gloo needs no network, nor a host name that resolves.
    usual = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    usual["OMP_NUM_THREADS"] = str(threads_per_rank(threads, ranks))
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "WEFT_LAUNCHED": 1,
    }
    agent = {
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    return (
        usual | os.environ | {name: str(number) for name, number in own.items()} | agent
    )


def _living(started: Sequence[Process]) -> list[Process]:
    return [process for process in started if process.poll() is None]


def _end(
    started: Sequence[Process], received: Sequence[int], grace: float
) -> dict[int, float]:
    """End the remaining ranks; return those that were found stopped after another rank's failure, and when.

    They have :data:`END_S` seconds. If all are asked to stop they have ``grace`` seconds, or :data:`AFTER_FAILURE_S`
    once one has not ended well. Stopped ranks are continued, so that they can end.
    """
    stopped = dict[int, float]()
    for process in _living(started):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(received[0] if received else signal.SIGTERM)
            if received:
                process.resume()
            elif _is_stopped(process):
                # before others miss it because it was killed
                stopped[started.index(process)] = time.time()
                process.kill()
    until, failed = time.monotonic() + (grace if received else END_S), False
    while (living := _living(started)) and time.monotonic() < until:
        psutil.wait_procs(living, LOOK_S)
        if not failed and any(process.poll() for process in started):
            failed, until = True, min(until, time.monotonic() + AFTER_FAILURE_S)
    return stopped


def _kill(started: Sequence[Process]) -> None:
    """Kill the remaining ranks. A rank that waits in the kernel, perhaps for a dead disk, may stay, and is named."""
    for process in _living(started):
        process.kill()
    psutil.wait_procs(_living(started), KILLED_S)
    for process in _living(started):
        rank = f"rank {started.index(process)} (process {process.pid})"
        print(
            f"weft: {rank} was killed, but the kernel has not ended it: it waits for a device",
            file=sys.stderr,
        )


def _cause(
    folder: Path,
    failed: dict[int, Exit],
    stopped: dict[int, float],
    oom_before: int | None,
) -> Failure | None:
    """Return why the ranks ended, from their records in ``folder``, their exits, and the ranks that were stopped
    meanwhile, with the times at which that was found.
    """
    records = []
    for path in folder.glob("*.json"):
        # cut short: the exit code still counts
        with contextlib.suppress(ValueError, KeyError, TypeError):
            records.append(Failure(**json.loads(path.read_text())["weft"]))
    if stopped:  # NCCL aborts a rank whose wait has come to its limit
        failed = {
            rank: end for rank, end in failed.items() if end.code != -signal.SIGABRT
        }
    for rank, when in stopped.items():
        message = f"rank {rank} is stopped (SIGSTOP or a debugger) and the others have given up waiting for it"
        records.append(Failure(rank, message, 1, Grade.NAMED, when))
    after = oom_kills()
    return root_cause(
        records, failed, None if None in (oom_before, after) else after != oom_before
    )


def _kill_all(number: int) -> None:
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
