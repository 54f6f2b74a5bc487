"""Turns a failure in any of several ranks into one line.

A rank that fails leaves a record (:func:`report_failure`); the launcher picks the root cause from all of them.
"""

import contextlib
import errno
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from weft.errors import WeftError, why_unwritten
from weft.plugins import PluginError

# How gloo, NCCL and the rendezvous store put it that *another* rank is gone or late.
_PEER_LOST = (
    r"(?i)gloo/|NCCL|by peer|Broken pipe|Timed out|wait timeout|pair closure|"
    r"Connection (refused|closed)|ProcessGroup"
)

_ACCESS = "give this user access to it, or name another"
#: What helps if the system refuses a path, by the error's number. Users name such paths, and Weft none.
_REFUSED_PATHS = {
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.ENAMETOOLONG: "name another",
    errno.ELOOP: "name another",
}


class Grade(IntEnum):
    """Grade of a failure by how well it explains the failures of other ranks.

    Of several failures, the one with the lowest grade is taken as the cause of all others.

    ``WEFT_ERROR``: an error that Weft has foreseen. ``UNEXPECTED``: any other error. ``NAMED``: the loss of another
    rank, which the error names. ``LOST``: the loss of an unknown rank. ``ASKED``: the process was asked to stop.
    """

    WEFT_ERROR = 0
    UNEXPECTED = 1
    NAMED = 2  # the loss of another rank, which is named
    LOST = 3  # the loss of another rank
    ASKED = 4  # it was asked to stop


@dataclass(frozen=True)
class Failure:
    """Record of why one rank ended. Of several failures, the one with the lowest grade is taken as the cause of all
    others.

    If several have the lowest grade, the earliest of these is the cause.

    Attributes:
        ``rank``: rank that ended.
        ``message``: line for the user.
        ``exit_code``: exit code of the rank's process.
        ``grade``: how well the failure explains others (:class:`Grade`); the lowest grade explains best.
        ``when``: Unix time in seconds.
        ``trace``: traceback; "" if there is none.
    """

    rank: int
    message: str
    exit_code: int
    grade: int  # a Grade
    when: float  # seconds since the epoch
    trace: str = ""


def nobody_reads() -> bool:
    """Return whether the reader of this process's output is gone, so that a broken pipe is no failure."""
    ends = select.poll()
    # flushing tells nothing where what could not be written is dropped
    try:
        ends.register(sys.stdout, 0)
    except (OSError, ValueError):  # no file
        return False
    return bool(ends.poll(0))


def report_failure(error: BaseException) -> int:
    """Record ``error``, because of which this process fails, and return the exit code.

    If this process is one of several ranks, the call ends the process and does not return. In a rank that ``launch``
    started, the record goes to the launcher, which prints one line for all ranks. Otherwise (one process, or ranks of
    torchrun or Slurm) the line is printed here. The environment variable ``WEFT_DEBUG=1`` adds the traceback.
    """
    cause = cause_of(error)
    if not isinstance(cause, SystemExit) and is_secondary(cause):
        error = cause  # another rank is gone, which is not the plugin's doing
    # whoever opened it
    if isinstance(error, OSError) and isinstance(error.filename, str | os.PathLike):
        remedy = _REFUSED_PATHS.get(error.errno or 0)
        if remedy:
            refused = WeftError(f"{error.filename}: {error.strerror}; {remedy}")
            refused.__cause__, error = error, refused
    # the output's disk, too, whose file has no name here
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = WeftError(
            f"cannot write {error.filename or 'the output or a file'}: {why_unwritten(error)}"
        )
        full.__cause__, error = error, full
    if isinstance(error, WeftError):
        message, code, grade = (
            str(error),
            error.exit_code,
            Grade.LOST if error.secondary else Grade.WEFT_ERROR,
        )
    else:
        message = f"{type(error).__name__}: {str(error).strip()}".splitlines()[
            0
        ].removesuffix(": ")
        message = message.removeprefix("PluginError: ")
        code, grade = 1, Grade.LOST if is_secondary(error) else Grade.UNEXPECTED
        if grade == Grade.LOST and (named := _line_with_rank(error)):
            message, grade = named, Grade.NAMED
    trace = "".join(traceback.format_exception(error))
    failure = Failure(
        int(os.environ.get("RANK", "0")), message, code, grade, time.time(), trace
    )
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # the form torchrun reads
        extra = {"py_callstack": trace, "timestamp": str(int(failure.when))}
        record = {
            "message": {"message": message, "extraInfo": extra},
            "weft": asdict(failure),
        }
        # an earlier error matters more than a full disk
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(record))
    if "WEFT_LAUNCHED" not in os.environ:
        show(failure, name_rank=int(os.environ.get("WORLD_SIZE", "1")) > 1)
    leave(code, at_once=isinstance(error, WeftError) and error.hangs)
    return code


def _line_with_rank(error: BaseException) -> str:
    """Return a line that names the lost rank if ``error`` is the loss of a rank; empty if the rank is not known."""
    dist = sys.modules.get("torch.distributed")
    if (
        dist is None
        or not dist.is_initialized()
        or isinstance(error, KeyboardInterrupt | SystemExit)
    ):
        return ""
    from weft.net.lost import PeerLost, peer_lost

    return str(error if isinstance(error, PeerLost) else peer_lost(error) or "")


def cause_of(error: BaseException) -> BaseException:
    """Return the error that a plugin has raised if ``error`` is a plugin's failure; otherwise return ``error``."""
    return (
        error.__cause__
        if isinstance(error, PluginError) and error.__cause__ is not None
        else error
    )


def is_secondary(error: BaseException) -> bool:
    """Return whether ``error`` only follows from another failure or from a request to stop.

    That is so if it says that another rank is gone or late, or that this process was asked to stop.
    """
    # by name: a typo must not cost an import of torch
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"DistError", "PeerLost", "KeyboardInterrupt", "SystemExit"}:
        return True
    return isinstance(error, RuntimeError | OSError) and bool(
        re.search(_PEER_LOST, str(error))
    )


class Exit(NamedTuple):
    """Exit of a process.

    ``code``: exit code; a code below 0 is minus the number of the signal that killed the process. ``when``: Unix time
    in seconds.
    """

    code: int
    when: float


def root_cause(
    records: list[Failure], failed: Mapping[int, Exit], oom: bool | None = None
) -> Failure | None:
    """Return the failure that explains the others; None if there is no failure.

    ``records``: failures that ranks have recorded; ``failed``: exits of the ranks that failed, by rank; ``oom``:
    whether the kernel has killed processes for lack of memory since the ranks were started; None if that is not known.
    """
    candidates = list(records)
    for rank in failed.keys() - {record.rank for record in records}:
        code, when = failed[rank]
        message = (
            f"rank {rank} ended with exit code {code}; its last output above says more"
        )
        if code < 0:
            message = f"rank {rank} was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            message += {
                True: ': out of memory; try a smaller train.micro_batch or train.recompute = "full"',
                False: ", but not by the kernel for want of memory",
                None: "; whether for want of memory the kernel does not say here",
            }[oom]
        asked = {-code, code - 128} & {signal.SIGTERM, signal.SIGINT}
        candidates.append(
            Failure(rank, message, 1, Grade.ASKED if asked else Grade.UNEXPECTED, when)
        )
    return min(
        candidates, key=lambda failure: (failure.grade, failure.when), default=None
    )


def show(failure: Failure, name_rank: bool = True) -> None:
    """Print the line of ``failure`` on the standard error stream.

    ``name_rank``: whether the line names the failed rank. Errors that Weft did not foresee also leave their traceback
    in a file, which the line names.
    """
    line = failure.message
    if failure.trace and failure.grade > Grade.WEFT_ERROR:
        who = (
            f"rank {failure.rank}: "
            if name_rank and failure.grade != Grade.NAMED
            else ""
        )
        line = f"{who}{line} ({_kept(failure.trace)})"
    if os.environ.get("WEFT_DEBUG", "0") not in ("", "0"):
        print(failure.trace.rstrip(), file=sys.stderr)
    print(f"weft: error: {line}", file=sys.stderr, flush=True)


def _kept(trace: str) -> str:
    """Write the traceback ``trace`` to a new file. Return words on where it is, or on how to see it if no file can be
    written.
    """
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="weft-error-", suffix=".log", delete=False
        ) as log:
            log.write(trace)
    except OSError as error:
        # this line matters more
        return f"its traceback cannot be kept: {error.strerror}; WEFT_DEBUG=1 prints it"
    return f"traceback in {log.name}"


def leave(code: int, at_once: bool = False) -> None:
    """End this process with exit code ``code`` after flushing output, if it is one of several ranks.

    If it is not, nothing happens, unless ``at_once`` is set: the process is then ended in any case. The usual shutdown
    of the interpreter is left out, as it can hang because of the threads of process groups. A rank that was started
    alone and has joined a run (``weft ranks add``) counts as one of several.
    """
    others = "WEFT_LAUNCHED" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1
    if ("RANK" not in os.environ or not others) and not at_once:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory; None if that is not known.

    The count is that of this process's control group, or, if that is not known, of the machine. ``root``: root of the
    file system.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            where, name = (
                ("memory", "memory.oom_control")
                if "memory" in kinds.split(",")
                else ("", "memory.events")
            )
            path = root / "sys/fs/cgroup" / where / group.lstrip("/") / name
            if (
                (not kinds or where)
                and path.is_file()
                and (count := _oom_count(path)) is not None
            ):
                return count
    return _oom_count(root / "proc/vmstat")


def _oom_count(path: Path) -> int | None:
    """Return the count after ``oom_kill`` in a file of the kernel."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
            return int(match[1])
    return None
