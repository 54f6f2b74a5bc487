"""Start the ranks of one machine and end them together.

``launch`` runs this command again as several processes under ``torch.distributed.elastic``. A rank that fails leaves a
record (:mod:`weft.train.failure`); the parent picks the root cause from all records and exit codes.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from unittest import mock

import psutil

from weft.train.failure import Exit, Failure, Grade, oom_kills, root_cause, show
from weft.train.ranks import threads_per_rank

#: Seconds that ranks get, after Ctrl-C or SIGTERM, to save and stop before they are killed.
GRACE_S = 60
#: Seconds that the others get to end when a rank has failed.
END_S = 3

# What a rank runs before the command proper: the kernel is told to kill it when the launcher dies, whatever the cause
# (PR_SET_PDEATHSIG survives exec). Elsewhere than on Linux, ranks of a killed launcher end with their next collective.
_ENTRY = """
import ctypes, os, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(parent):
    sys.exit(1)
os.execv(command[0], command)
"""


def launch(argv: list[str], ranks: int, command: list[str] | None = None, threads: int = 0) -> int:
    """Run ``weft *argv`` (or ``command``) as ``ranks`` local processes, print why they failed, if they did, and return
    the exit code. See :func:`run_ranks`.
    """
    code, cause = run_ranks(command or [sys.executable, "-m", "weft", *argv], ranks, threads)
    if cause is not None:
        show(cause)
    return code


def run_ranks(command: list[str], ranks: int, threads: int = 0) -> tuple[int, Failure | None]:
    """Run ``command`` as ``ranks`` local processes; their exit code, and why they failed if they did.

    Ctrl-C, SIGTERM and SIGHUP are passed on; ranks then have :data:`GRACE_S` seconds to stop, a second signal
    ends them at once, and the code is 128 + signal. If a rank fails the others are stopped.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is reported here, once
    # All ranks are on this machine: gloo needs no network, nor a host name that resolves.
    local = {"WEFT_LAUNCHED": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    env = {**local, "OMP_NUM_THREADS": str(threads_per_rank(threads, ranks)), **os.environ}
    entry = ["-I", "-S", "-c", _ENTRY, str(os.getpid())]
    folders = tempfile.TemporaryDirectory(prefix="weft-ranks-", ignore_cleanup_errors=True)
    with folders as folder, mock.patch.dict(os.environ, env):
        config = LaunchConfig(
            1, 1, ranks, logs_specs=DefaultLogsSpecs(folder), max_restarts=0, shutdown_timeout=GRACE_S,
            # On a port that the store itself picks, so that no other run can have it.
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            signals_to_handle="SIGQUIT",  # the others are _forwarded, which knows about second signals
        )  # fmt: skip
        # The agent expands ${...} in arguments, but these are the user's.
        words = [a.replace("$", "$$") for a in [*entry, *command]]
        code, failed, before = 0, {}, oom_kills()
        try:
            with _forwarded(SignalException), _ended_soon() as ending:
                launch_agent(config, sys.executable, words)
        except ChildFailedError as error:
            # What the agent has killed to clean up is no cause.
            own = {rank: f for rank, f in error.failures.items() if rank in ending.first}
            code, failed = 1, {rank: Exit(f.exitcode, float(f.timestamp)) for rank, f in own.items()}
        except (SignalException, KeyboardInterrupt) as error:
            code = 128 + getattr(error, "sigval", signal.SIGINT)
        cause = _cause(Path(folder), failed, ending.stopped, before)
    if code == 0 or cause is None or (code > 128 and cause.grade > Grade.UNEXPECTED):
        return code, None
    return (code if code > 128 else cause.exit_code), cause


def _cause(folder: Path, failed: dict[int, Exit], stopped: list[int], oom_before: int | None) -> Failure | None:
    """Why the ranks ended: by what they left in ``folder``, how they ended, and who was stopped meanwhile."""
    records = []
    for path in folder.glob("*/attempt_*/*/error.json"):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # cut short: the exit code still counts
            records.append(Failure(**json.loads(path.read_text())["weft"]))
    if stopped:  # NCCL aborts a rank whose wait has come to its limit
        failed = {rank: end for rank, end in failed.items() if end.code != -signal.SIGABRT}
    for rank in stopped:
        message = f"rank {rank} is stopped (SIGSTOP or a debugger) and the others have given up waiting for it"
        records.append(Failure(rank, message, 1, Grade.NAMED, time.time()))
    after = oom_kills()
    return root_cause(records, failed, None if None in (oom_before, after) else after != oom_before)


@dataclass
class _Ending:
    """How the ranks' end began: who ended by itself, with what exit code, and who was stopped."""

    first: dict[int, int] = field(default_factory=dict)
    stopped: list[int] = field(default_factory=list)


@contextlib.contextmanager
def _ended_soon() -> Iterator[_Ending]:
    """In here the agent ends the ranks that are left within :data:`END_S` seconds of the first that fails.

    It would wait half a minute for ranks that are stopped, and not tell their end from that of the first. When all are
    asked to stop, those that are stopped go on, so that they can.
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

    ending, close = _Ending(), SubprocessContext.close

    def close_soon(ranks: SubprocessContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        alive, failing = [], bool(ending.first)  # called again when all has been ended
        for rank, handler in ranks.subprocess_handlers.items():
            if (code := handler.proc.poll()) is None:
                alive.append((rank, psutil.Process(handler.proc.pid)))
            elif code and not failing:
                ending.first[rank] = code
        for rank, process in alive:
            with contextlib.suppress(psutil.Error):
                if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    if ending.first:
                        ending.stopped.append(rank)
                        process.kill()
                    else:
                        process.resume()
        close(ranks, death_sig, min(timeout, END_S) if ending.first else timeout)

    with mock.patch.object(SubprocessContext, "close", close_soon):
        yield ending


@contextlib.contextmanager
def _forwarded(stop: type[Exception]) -> Iterator[None]:
    """Let the first signal raise ``stop``, which makes the agent forward it and wait, and later ones kill the ranks."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            raise stop("stopped", signal.Signals(number))
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:  # under nohup a run outlives its terminal
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
