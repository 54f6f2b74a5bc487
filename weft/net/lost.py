"""Names the rank for which the others waited in vain: it is silent while all others say that they gave up."""

import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil
import torch.distributed as dist

from weft.net.groups import limit
from weft.net.process import PIDS, look_at

#: Seconds that a rank which gave up looks for others that did. Waits end apart, by up to as long as a step takes.
PATIENCE_S = 5.0
#: Most ranks that are named when it cannot be told which of them is the cause.
MOST = 4

#: Describes where ranks are in their code, if :mod:`weft.observe.trace` has set it.
witness: Callable[[Sequence[int]], str] | None = None
#: Where ranks watch each other: its last entry returns a line on who is lost, or nothing if that is not known yet.
watch: list[Callable[[], str]] = []


class PeerLost(RuntimeError):
    """Error of a wait for another rank that is gone or late. The message names the rank."""


def peer_lost(
    error: BaseException,
    waits_for: int | None = None,
    doing: str = "",
    seconds: float | None = None,
) -> PeerLost | None:
    """Find the ranks because of which a wait has failed, and return an error that names them; None if none is found.

    These ranks are gone, stopped, or do not answer. ``error``: the error of the wait; ``waits_for``: world rank from
    which this rank needs something, if it is known; ``doing``: what this rank waited for, in words; ``seconds``: how
    long the wait could last before it failed, by default the limit of the default process group. The search takes up to
    about :data:`PATIENCE_S` seconds.
    """
    if watch:
        return PeerLost(watch[-1]() or str(error))
    if seconds is None:
        given = limit()
        seconds = given.total_seconds() if given else PATIENCE_S
    late = bool(re.search("(?i)timed ?out|timeout", str(error)))
    patience, answers = min(PATIENCE_S, seconds), list[tuple[list[int], bool]]()

    def search() -> None:
        with suppress(RuntimeError):  # the store has gone with its rank
            answers.append(_culprits(late, waits_for, patience))

    # In a thread of its own, as a store whose rank is stopped never answers.
    searching = threading.Thread(target=search, daemon=True)
    searching.start()
    searching.join(patience + 2)
    # Without an answer it is the store's own rank; torchrun's store and the launcher's have none.
    own_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    culprits, late = (
        answers[0] if answers else ([0] if own_store and dist.get_rank() else [], late)
    )
    halted = stopped_ranks()
    culprits = halted or culprits
    if not 0 < len(culprits) <= MOST:
        return None
    what = f"has not answered for {seconds:g} s" if late or halted else "is gone"
    if halted:
        what += " and is stopped (SIGSTOP or a debugger)"
    via = f" (through rank {waits_for})" if waits_for not in (None, *culprits) else ""
    doing = doing or f"waited for it{_place(error)}"
    seen = witness([dist.get_rank(), *culprits]) if witness else ""
    return PeerLost(
        f"rank {' or '.join(map(str, culprits))} {what}: rank {dist.get_rank()} {doing}{via}"
        + f"; {seen}" * bool(seen)
    )


def _place(error: BaseException) -> str:
    """Return the place in Weft where the rank waited."""
    package = os.path.dirname(os.path.dirname(__file__))
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename.startswith(package)
    ]
    return (
        f" in {frames[-1].name} ({os.path.relpath(frames[-1].filename, package)})"
        if frames
        else ""
    )


def stopped_ranks() -> list[int]:
    """Return the ranks on this machine that a signal or a debugger has stopped.

    Only ranks with the same parent process as this rank are looked at.
    """
    stopped = []
    forks = os.environ.get(PIDS, "").split(",")
    with suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error, KeyError):
                if look_at(process.pid).state == "stopped":
                    if str(process.pid) in forks:
                        stopped.append(forks.index(str(process.pid)))
                        continue
                    given = process.environ()
                    stopped.append(
                        int(given["RANK"] if "RANK" in given else given["SLURM_PROCID"])
                    )
    return sorted(stopped)


def _culprits(
    late: bool, waits_for: int | None, patience: float
) -> tuple[list[int], bool]:
    """Ranks of which at least one is the cause, and whether any wait ran into its limit.

    A rank that gives up publishes whom it waited for; a rank that publishes nothing is the cause.
    """
    # The store that all ranks share; PyTorch has no public way to it.
    store = dist.distributed_c10d._get_default_store()
    me, world = dist.get_rank(), dist.get_world_size()
    said: dict[int, Any] = {me: {"late": late, "waits_for": waits_for}}
    deadline = time.monotonic() + patience
    store.set(f"weft/gave-up/{me}", json.dumps(said[me]))
    while len(said) < world - 1 and not stopped_ranks() and time.monotonic() < deadline:
        time.sleep(0.1)
        for rank in set(range(world)) - said.keys():
            if store.check([f"weft/gave-up/{rank}"]):
                said[rank] = json.loads(store.get(f"weft/gave-up/{rank}"))
    late = any(words["late"] for words in said.values())
    silent = sorted(set(range(world)) - said.keys())
    asked, seen = waits_for, {me}
    # down the chain of those that are known to wait
    while asked in said and asked not in seen:
        seen.add(asked)
        asked = said[asked]["waits_for"]
    return ([asked] if len(silent) > 1 and asked in silent else silent), late
