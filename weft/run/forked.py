"""Starts ranks as forks of their launcher, which has imported PyTorch and Weft for all of them.

A rank that is started as a new interpreter imports for seconds of processor time. A fork shares what its launcher has
imported, its memory too. It is safe while no other thread runs, which could hold a lock that the fork then never gets.
"""

import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL
from pathlib import Path
from typing import NoReturn

import psutil

from weft import plugins
from weft.run.signals import requests, stop_signals

#: The variable that says 0 where every rank shall be an interpreter of its own.
FORK = "WEFT_FORK"
#: What ranks that train import.
TRAINING = (
    "weft.api",
    "weft.train.training",
    "torch._dynamo",
    "torch.distributed.tensor",
)
#: What ranks that generate import.
GENERATING = ("weft.generate.leader", "torch._dynamo")


class ForkedRank(psutil.Process):
    """Forked process that waits for its environment variables, and then becomes a rank.

    Besides the methods of :class:`psutil.Process` it has ``poll`` and ``returncode``, as :class:`subprocess.Popen` has.
    ``returncode``: the exit code; None until a call of ``poll`` has found that the process has ended. ``pid``: number
    of the process; ``environment``: file descriptor of the pipe through which the process gets its environment
    variables.
    """

    returncode: int | None = None

    def __init__(self, pid: int, environment: int) -> None:
        super().__init__(pid)
        self._environment = environment

    def begin(self, environment: Mapping[str, str]) -> None:
        """Send the process its environment variables, upon which it becomes a rank. ``environment``: these
        variables.
        """
        with suppress(BrokenPipeError), os.fdopen(self._environment, "w") as pipe:
            json.dump(dict(environment), pipe)

    def poll(self) -> int | None:
        """Return the exit code, or None while the rank runs. Does not wait."""
        if self.returncode is None:
            with suppress(psutil.TimeoutExpired):
                self.returncode = self.wait(0)
        return self.returncode


def fork_ranks(
    argv: Sequence[str], ranks: int, modules: Sequence[str]
) -> list[ForkedRank]:
    """Fork processes of this machine that wait to become ranks of the command ``weft *argv``.

    A process becomes a rank when it gets its environment variables (:meth:`ForkedRank.begin`). ``ranks``: number of
    processes; ``modules``: names of modules that this process imports before it forks, so that the forks need not.

    Returns an empty list where a fork is not safe. It is safe if all of this holds: the system is Linux, this process
    runs Weft's own command, it has no GPU and only one thread, and there are no plugins, which may look at their rank
    as they are imported.
    """
    import torch

    program = requests.program
    if (
        sys.platform != "linux"
        or os.environ.get(FORK) == "0"
        or program is None
        or plugins.loaded
        or torch.cuda.is_available()
    ):
        return []
    for module in modules:
        importlib.import_module(module)
    if _other_threads():
        return []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.freeze()  # so that no collection touches, and thereby copies, what is shared
    parent, forked = os.getpid(), list[ForkedRank]()
    # What is sent to the launcher meanwhile is not for its handlers in a fork, which has none yet.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        for _ in range(ranks):
            reading, writing = os.pipe()
            if (pid := os.fork()) == 0:
                for other in (writing, *(rank._environment for rank in forked)):
                    os.close(other)
                _be_rank(program, argv, parent, reading)
            os.close(reading)
            forked.append(ForkedRank(pid, writing))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return forked


def _other_threads() -> bool:
    """Return whether a fork would leave threads behind. Threads of OpenBLAS end and restart by themselves at a fork."""
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    tasks = Path("/proc/self/task")
    return not tasks.is_dir() or sum(1 for _ in tasks.iterdir()) > 1


def _be_rank(
    program: Callable[[], None], argv: Sequence[str], parent: int, reading: int
) -> NoReturn:
    """Run ``program`` with ``argv`` once its environment has come through the pipe, as a new interpreter would."""
    code = 1
    try:
        for number in stop_signals():
            signal.signal(number, signal.SIG_DFL)
        os.setsid()  # a terminal's Ctrl-C comes through the launcher alone
        CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
        with os.fdopen(reading) as pipe:
            environment = pipe.read()
        if not environment:  # the launcher has given up
            os._exit(1)
        os.environ.clear()
        os.environ.update(json.loads(environment))
        sys.argv = [sys.argv[0], *argv]
        requests.reset()
        program()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
