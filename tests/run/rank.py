"""A rank that joins the others (unless it only waits), notes its process, and then does as its second word says.

It is an interpreter of its own (``python tests/run/rank.py FOLDER DEED``), or a fork of its launcher.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from weft.errors import UsageError
from weft.run.failure import report_failure
from weft.run.rank_processes import init_ranks
from weft.run.signals import take_ctrl_c


def be_rank(folder: str, deed: str, *more: str) -> None:
    try:
        _do(Path(folder), deed, int(os.environ["RANK"]), more)
    except BaseException as error:
        sys.exit(report_failure(error))


def _do(folder: Path, deed: str, rank: int, more: tuple[str, ...]) -> None:
    meets = deed not in ("wait", "stubborn")
    if meets:
        init_ranks("cpu", 60)
        import torch
        import torch.distributed as dist

        total = torch.ones(1)
        dist.all_reduce(total)
    stopped = list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    take_ctrl_c()  # as weft itself does
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if deed == "print":
        words = (rank, total.item(), os.environ["OMP_NUM_THREADS"], *more)
        sys.stdout.write(" ".join(map(str, words)) + "\n")
    if rank == 1 and deed == "usage":
        raise UsageError("layout axis 'tq' is unknown")
    if rank == 1 and deed == "bug":
        raise ValueError("an oversight\nwith details")
    if rank == 1 and deed == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed in ("stuck", "stopped", "aborted"):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP if deed != "stuck" else signal.SIGTERM)
            deed = "stubborn"
        else:
            time.sleep(0.5)
            if deed == "aborted":
                os.abort()
            raise RuntimeError(
                "[gloo/transport] Timed out waiting 60000ms for recv operation to complete"
            )
    while deed == "stubborn" or (deed in ("wait", "meet") and not stopped):
        time.sleep(0.05)
    if stopped:
        time.sleep(0.5)
        (folder / f"saved-{rank}").write_text(signal.Signals(stopped[0]).name)
    elif meets:
        dist.all_reduce(total)
        dist.destroy_process_group()


def launch_forks(ranks: str, *words: str) -> None:
    """Launch forks of this process as ranks; exits with the launcher's code."""
    from weft.run.launch import launch
    from weft.run.signals import requests

    requests.program = lambda: be_rank(*sys.argv[1:])
    sys.exit(launch(list(words), int(ranks), shared=["torch.distributed"]))


def launch_interpreters(ranks: str, *words: str) -> None:
    """Launch interpreters as ranks; exits with the launcher's code."""
    from weft.run.launch import launch

    sys.exit(launch([], int(ranks), [sys.executable, __file__, *words]))


if __name__ == "__main__":
    be_rank(*sys.argv[1:])
