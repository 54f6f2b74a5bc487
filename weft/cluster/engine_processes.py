"""Engines as processes of this host, which a server starts and ends."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from weft.errors import WeftError

#: Seconds between two looks at the processes, until one that has ended is started again, and to end by themselves.
LOOK_S, AGAIN_S, END_S = 0.2, 1.0, 10.0


class EngineProcesses:
    """Runs one process of ``weft engine`` for each of ``roles``. All processes join the router at ``address``.
    ``roles``: roles of the engines, "" for one that computes prompts and writes. ``words``: further arguments of the
    command, by role; those of "" are for all roles that are not named. ``share``: fraction of the free memory that all
    engines together use, of which each gets an equal part; None: they learn elsewhere how much they may use. Each gets
    an equal part of the processor's cores. ``say`` prints a line. ``ranks``: number of processes of each engine.
    ``gpus``: names of this host's GPUs, as in ``CUDA_VISIBLE_DEVICES``; the ranks of the engines get them in turn.
    ``environment``: environment variables of the processes; None: those of this process. ``start``: starts a process,
    given the name of its engine, its command and its environment variables; None: as a child of this process. Once all
    have joined, a process that ends by a fault is started again. The processes inherit the variable ``WEFT_SECRET``.
    """

    def __init__(
        self,
        roles: Sequence[str],
        address: str,
        words: Mapping[str, Sequence[str]],
        share: float | None,
        say: Callable[[str], None],
        ranks: int = 1,
        gpus: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start: Callable[[str, Sequence[str], Mapping[str, str]], Any] | None = None,
    ) -> None:
        self.say, self._place = say, start
        computing = [role for role in roles if role != "cache"]
        threads = max(1, (os.cpu_count() or 1) // (max(1, len(computing)) * ranks))
        given = os.environ if environment is None else environment
        self._environment = {"OMP_NUM_THREADS": str(threads), **given}
        devices = iter(gpus_of_engines(len(computing), ranks, gpus))
        command = [sys.executable, "-m", "weft", "engine", f"--join={address}"]
        kinds = [role or "engine" for role in roles]
        names = [f"{kind}-{kinds[:i].count(kind)}" for i, kind in enumerate(kinds)]
        self._commands = {
            name: [
                *command, f"--name={name}", f"--role={role}", "--redial=0",
                *share_option(role, roles, share, ranks, len(gpus)), *words.get(role, words[""]),
            ]
            for name, role in zip(names, roles, strict=True)
        }  # fmt: skip
        self._devices = {
            name: {"CUDA_VISIBLE_DEVICES": "" if role == "cache" else next(devices)}
            for name, role in zip(names, roles, strict=True)
            if gpus
        }
        self._ended = threading.Event()
        self._running = {name: self._start(name) for name in self._commands}
        self._thread = threading.Thread(
            target=self._watch, name="weft-engines", daemon=True
        )

    def _start(self, name: str) -> Any:
        environment = self._environment | self._devices.get(name, {})
        if self._place is not None:
            return self._place(name, self._commands[name], environment)
        # signals for the server are for the server alone, which lets its answers end
        return subprocess.Popen(
            self._commands[name],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
        )

    def await_joined(self, joined: Callable[[], int], limit: float = inf) -> None:
        """Wait until all engines have joined. From then on, start engines again that end by a fault. ``joined``:
        returns how many have joined. ``limit``: seconds to wait.

        Raises :class:`WeftError` if an engine ends before it has joined, or if some have not joined in time.
        """
        deadline = time.monotonic() + limit
        while joined() < len(self._commands):
            for name, process in self._running.items():
                if (code := process.poll()) is not None:
                    raise WeftError(
                        f"{name} has ended with {ending(process, code)} before it joined; its own lines say why"
                    )
            if time.monotonic() >= deadline:
                raise WeftError(
                    f"{joined()} of {len(self._commands)} engines have joined within {limit:g} s; their own lines say "
                    "what the others do"
                )
            time.sleep(0.05)
        self._thread.start()

    @property
    def pids(self) -> dict[str, int]:
        """Operating-system number of each engine's present process, by the engine's name."""
        return {name: process.pid for name, process in self._running.items()}

    def _watch(self) -> None:
        failures: dict[str, str] = {}  # why engines could not be started again
        while not self._ended.wait(LOOK_S):
            for name, process in self._running.items():
                code = process.poll()
                if not code:  # with 0 it was asked to end
                    continue
                if not failures.get(name):
                    how = ending(process, code)
                    self.say(f"{name} has ended with {how}; it is started again")
                if self._ended.wait(AGAIN_S):
                    return
                why = self._restart(name)
                if why and why != failures.get(name):
                    self.say(
                        f"{name} cannot be started again ({why}); this is tried every {AGAIN_S:g} s"
                    )
                failures[name] = why

    def _restart(self, name: str) -> str:
        """Start an engine again; return why that is not possible, or an empty string."""
        try:
            self._running[name] = self._start(name)
        # whatever it is, the other engines are still watched
        except Exception as error:
            return (str(error).strip().splitlines() or [repr(error)])[0]
        return ""

    def close(self, joined: Collection[str] = ()) -> None:
        """End all processes. ``joined``: names of the engines that the router has asked to end; they get some seconds
        to do so. All others have nothing to complete, and are killed at once.
        """
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        deadline = time.monotonic() + END_S
        try:
            for name, process in self._running.items():
                if name in joined:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, deadline - time.monotonic()))
        finally:  # also when Ctrl-C is pressed again
            for process in self._running.values():
                if process.poll() is None:
                    process.kill()
                process.wait()


def ending(process: Any, code: int) -> str:
    """Return how a process has ended, for a line that says so. ``code``: its exit code.

    ``process``: a process, here or on another host; one that was lost with its host says so in its attribute ``lost``.
    """
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    lost: str = getattr(process, "lost", "")
    return lost or how


def share_option(
    role: str, roles: Sequence[str], share: float | None, ranks: int, gpus: int
) -> list[str]:
    """Return the option that tells an engine with ``role`` its part of the free memory; none if ``share`` is None.

    ``gpus``: number of this host's GPUs. The other arguments are those of :class:`EngineProcesses`.
    """
    if share is None:
        return []
    # engines that share their memory: all of this host's, or those of a GPU
    caches = roles.count("cache")
    beside = -(-(len(roles) - caches) * ranks // gpus) if gpus else len(roles)
    if gpus and role == "cache":
        beside = caches
    return [f"--share={share / beside}"]


def gpus_of_engines(engines: int, ranks: int, gpus: Sequence[str]) -> list[str]:
    """Return for each engine a text with the GPUs of its ranks, separated by commas. The ranks of all engines get the
    GPUs in turn. ``engines``: number of engines. ``ranks``: number of ranks of each. ``gpus``: names of all GPUs;
    without any, the list is empty.
    """
    if not gpus:
        return []
    each = range(min(ranks, len(gpus)))
    return [
        ",".join(gpus[(engine * ranks + rank) % len(gpus)] for rank in each)
        for engine in range(engines)
    ]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs of this host that this process may use, as in ``CUDA_VISIBLE_DEVICES``."""
    import torch

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return (names or [str(index) for index in range(count)])[:count]
