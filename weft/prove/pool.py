"""One pool of worker processes for many small jobs over ranks, so that PyTorch is imported once and not per job.

``pool.run(world, fn, *args)`` runs ``fn(*args)`` on ``world`` ranks of a fresh gloo process group and returns the
results in rank order. ``fn`` is a top-level function of a test module; arguments and results are pickled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

from weft.run.failure import is_secondary

MAX_WORLD = 8
START_S = 120  # importing PyTorch on a busy machine
MAX_THREADS = 120
CALL_S = 150  # a call that takes longer hangs
AFTERMATH_S = 5  # what the other ranks get to notice that one has failed


class WorkerDied(RuntimeError):
    """Raised when a worker process ends by itself during a call: a crash, not a hang."""


@dataclass(frozen=True)
class RankResult:
    """The result of a call on one rank, as a worker process sends it to the pool.

    Attributes:
        ``ok``: whether the call returned without an exception.
        ``payload``: the pickled value or, if the call failed, the pickled exception; None for an exception that cannot
            be pickled.
        ``trace``: traceback of the exception.
        ``secondary``: whether the exception only follows from the failure of another rank.
        ``leaving``: whether the worker process ends after this call.
    """

    ok: bool
    payload: bytes | None
    trace: str = ""
    secondary: bool = False
    leaving: bool = False  # the worker ends after this call


def fork_server(preload: Sequence[str] = ()) -> Any:
    """Return a multiprocessing context whose processes have PyTorch, Weft and the modules ``preload`` already imported.

    They are forked from a server; on other systems than Linux processes are started anew.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # The first operator of our own imports torch._dynamo, which every worker would do again.
    usual = ["torch", "torch._dynamo", "torch.distributed.tensor"]
    context.set_forkserver_preload([*usual, *preload, "weft.train.training"])
    return context


@dataclass(frozen=True)
class Worker:
    """A worker process of a pool.

    ``process``: the process; ``conn``: the connection to it; ``stacks``: the file to which it writes the stacks of its
    threads when it hangs.
    """

    process: multiprocessing.process.BaseProcess
    conn: Connection
    stacks: Path


class ProcessPool:
    """A pool of at most :data:`MAX_WORLD` processes that run functions as the ranks of process groups.

    Processes are started when first needed, used again, and replaced when they die. ``preload``: names of modules that
    they import beforehand, besides PyTorch's and Weft's.
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        """Prepare the pool; processes start when :meth:`run` needs them.

        ``preload``: modules that the workers import besides PyTorch's and Weft's.
        """
        import torch.distributed as dist

        self._context = fork_server(preload)
        self._folder = Path(tempfile.mkdtemp(prefix="weft-pool-"))
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self._workers: list[Worker] = []
        self._calls = 0

    def pids(self) -> list[int]:
        """Return the operating-system ids of the worker processes that run now."""
        return [worker.process.pid or 0 for worker in self._workers]

    def run(
        self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = CALL_S
    ) -> list[Any]:
        """Run ``fn(*args)`` on ``world`` ranks of a new process group; return the results in rank order.

        An exception of a rank is raised here, with its traceback as a note. Ranks that do not answer within ``timeout``
        seconds are killed, and :class:`TimeoutError` names them and shows their stacks. If a rank's process has ended
        before, :class:`WorkerDied` is raised instead.
        """
        workers = self._ready(world)
        self._calls += 1
        task = pickle.dumps((fn, args))
        for rank, worker in enumerate(workers):
            worker.conn.send((rank, world, f"call-{self._calls}", timeout, task))
        answers = self._collect(workers, timeout)
        leaving = [workers[rank] for rank, answer in answers.items() if answer.leaving]
        self._workers = [w for w in self._workers if w not in leaving]
        silent = {r: w for r, w in enumerate(workers) if r not in answers}
        lost = self._bury(silent, timeout)
        failures = {rank: answer for rank, answer in answers.items() if not answer.ok}
        rank = min(failures, key=lambda r: (failures[r].secondary, r), default=-1)
        worst = failures.get(rank)
        if lost and (worst is None or worst.secondary):
            if worst:
                lost.add_note(
                    f"beside it, rank {rank} of {world} failed:\n{worst.trace}"
                )
            raise lost
        if worst:
            error: Exception = RuntimeError("the error cannot be pickled")
            if worst.payload:
                error = pickle.loads(worst.payload)
            error.add_note(f"on rank {rank} of {world}:\n{worst.trace}")
            raise error
        return [pickle.loads(answers[rank].payload or b"") for rank in range(world)]

    def close(self) -> None:
        """End all worker processes, and delete the files to which they write their stacks."""
        for worker in self._workers:
            worker.conn.close()  # an idle worker leaves at the end of its input
        for worker in self._workers:
            worker.process.join(2)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ready(self, world: int) -> list[Worker]:
        """Return the first ``world`` workers, all alive; start those that are missing."""
        if world > MAX_WORLD:
            raise ValueError(f"world = {world}, but the pool has {MAX_WORLD} workers")
        self._workers = [w for w in self._workers if w.process.is_alive()]
        fresh = [self._start() for _ in range(world - len(self._workers))]
        for worker in fresh:
            if not worker.conn.poll(START_S) or worker.conn.recv() != "ready":
                raise RuntimeError("a worker did not start")
        self._workers += fresh
        return self._workers[:world]

    def _start(self) -> Worker:
        ours, theirs = self._context.Pipe()
        stacks = Path(tempfile.mkstemp(prefix="stacks-", dir=self._folder)[1])
        process = self._context.Process(
            target=_serve, args=(theirs, str(stacks), self._store.port), daemon=True
        )
        process.start()
        theirs.close()
        return Worker(process, ours, stacks)

    def _collect(self, workers: list[Worker], timeout: float) -> dict[int, RankResult]:
        """Collect answers by rank until all are in, time is up, or a rank has failed and others had time to notice."""
        answers: dict[int, RankResult] = {}
        waiting = {worker.conn: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for conn in cast(list[Connection], wait(list(waiting), left)):
                rank = waiting.pop(conn)
                with contextlib.suppress(EOFError, ConnectionError):
                    answers[rank] = conn.recv()
                if rank not in answers or not answers[rank].ok:
                    deadline = min(deadline, time.monotonic() + AFTERMATH_S)
        return answers

    def _bury(self, silent: dict[int, Worker], timeout: float) -> Exception | None:
        """Kill workers that did not answer; return an error that says how each ended or where its threads stood."""
        died, late = list[str](), list[str]()
        hanging = dict[int, Worker]()
        for rank, worker in silent.items():
            worker.process.join(0.2)
            if worker.process.exitcode is None:
                hanging[rank] = worker
                continue
            stood = worker.stacks.read_text()
            died.append(
                f"rank {rank} died with exit code {worker.process.exitcode}\n{stood}".rstrip()
            )
        # All stacks before the first kill, at which those who wait for that rank fail and stand elsewhere.
        for worker in hanging.values():
            os.kill(worker.process.pid or 0, signal.SIGUSR1)
        if hanging:
            time.sleep(0.2)
        for rank, worker in hanging.items():
            late.append(
                f"rank {rank} did not answer within {timeout:g} s; it stood at\n{worker.stacks.read_text()}"
            )
        for worker in hanging.values():
            worker.process.kill()
            worker.process.join()
        self._workers = [w for w in self._workers if w.process.is_alive()]
        # Those who died are named first: they are why the others hang.
        text = "\n".join(died + late)
        return WorkerDied(text) if died else TimeoutError(text) if late else None


def _serve(conn: Connection, stacks: str, port: int) -> None:
    """Run a worker: one call after another until the pool closes the connection."""
    threading.Thread(target=_end_with_session, daemon=True).start()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Ctrl-C is for pytest, which then hangs up
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = open(stacks, "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    faulthandler.enable(file=log)
    import torch
    import torch.distributed as dist

    from weft.memory.heap import keep_heap

    torch.set_num_threads(1)
    keep_heap()
    warnings.filterwarnings(
        "ignore", r".*(all_gather|reduce_scatter)\w*` is deprecated", FutureWarning
    )
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    gc.freeze()  # what is here now need not be looked at again and again
    conn.send("ready")
    while True:
        try:
            rank, world, prefix, timeout, task = conn.recv()
        except (EOFError, ConnectionError):
            return
        leaving = False
        try:
            outcome = _call(rank, world, dist.PrefixStore(prefix, store), timeout, task)
            # a handshake that failed may leave the connection to the store in the middle of an answer
            leaving = "init_process_group" in outcome.trace or _too_many_threads()
            try:
                conn.send(replace(outcome, leaving=leaving))
            except ConnectionError:  # the pool has hung up in the middle of a call
                os._exit(0)
        finally:  # after the answer: gloo takes some 20 ms to close
            # a process group in a circle of references would keep its threads running
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
        if leaving:
            os._exit(0)


def _too_many_threads() -> bool:
    """Return whether this process has too many threads: PyTorch's caches keep a mesh with gloo's threads per layout."""
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and sum(1 for _ in tasks.iterdir()) > MAX_THREADS


def _end_with_session() -> None:
    """End this worker when its parent process ends, even while a call hangs."""
    if session := multiprocessing.parent_process():
        session.join()
        os._exit(1)


def _call(rank: int, world: int, store: Any, timeout: float, task: bytes) -> RankResult:
    """Run a call in a process group of its own, with PyTorch's settings reset."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    try:
        # The longer timeout lets the pool notice a hang first.
        limit = timedelta(seconds=timeout + 10)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=limit
        )
        fn, args = pickle.loads(task)
        return RankResult(True, pickle.dumps(fn(*args)))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        try:
            payload = pickle.dumps(error)
            pickle.loads(payload)
        except Exception:
            payload = None
        return RankResult(False, payload, trace, is_secondary(error))
