"""A second process that reads prompts, with the same weights and the same cache blocks as the engine's own process.

Both lie in memory that the processes share, so that a prompt's blocks are where decode needs them, and nothing is
copied when it goes on there (semi-PD, Hong et al. 2025, 2504.19867). The engine's process alone hands out blocks. It
sends what is to be computed as JSON; the logits come back in shared memory.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import torch

from weft.errors import WeftError
from weft.generate.core_share import CoreShare, Pacer, apply_share
from weft.generate.engine import Engine
from weft.generate.packed_row import PackedRow
from weft.generate.reader import PagedReader
from weft.generate.shared_arena import SharedArena, aligned_bytes
from weft.generate.shared_model import SharedModel, attach_model
from weft.net.child_pipe import (
    PipeEnd,
    RunningProcess,
    call_in_child,
    open_child,
    parent_pipe,
)

T = torch.Tensor

#: Seconds in which the process must start, and without a sign of life in a pass until it is killed.
START_S, SILENT_S = 120.0, 10.0
#: Seconds that count as silence between two looks, at most: who looks again after a long time was stopped itself.
MOST_LOOK_S = 1.0
#: Seconds that a process which was killed may take to be gone.
GONE_S = 60.0
#: Times that the process may end before it is ready, until it is not started again.
TRIES = 3

#: What the phases know of each other, as numbers in shared memory: the quota of prefill, whether decode has work, and
#: a number that grows while prefill computes.
QUOTA, WRITING, BEAT = range(3)
CONTROLS = 3


#: Starts the process with its end of a pipe and the file descriptors of both arenas.
Starter = Callable[[PipeEnd, int, int], RunningProcess]


class PrefillLost(WeftError):
    """Raised for a forward pass that cannot end, because the process that computes it has ended."""


def start_interpreter(pipe: PipeEnd, weights: int, cache: int) -> RunningProcess:
    """Start a process that reads prompts, as a new Python interpreter; return the process. ``pipe``: the new process's
    end of its pipe to the engine. ``weights``, ``cache``: file descriptors of the shared memories with the model's
    weights and with the cache.
    """
    return call_in_child(
        __name__, run_prefill.__name__, pipe, weights, cache, stdout=sys.stderr
    )


class _Silence(NamedTuple):
    """How long the process has given no sign of life. ``beat``: its last sign; ``seconds``: time without another one;
    ``looked``: when it was looked for last.
    """

    beat: float
    seconds: float
    looked: float


class PrefillProcess:
    """Starts a process that reads prompts beside ``engine``, and speaks with it. The cache of ``engine`` moves into
    shared memory. ``shared``: the engine's model, with weights in shared memory. ``cores``: numbers of the processor's
    cores that both phases share. ``start``: function that starts the process. ``say`` prints a line.

    Attributes:
        ``ready``: whether a pass can be begun or is under way.
        ``sent``: bytes of messages to the process so far; contents of cache blocks are in no message.
    """

    def __init__(
        self,
        engine: Engine,
        shared: SharedModel,
        cores: Sequence[int],
        say: Callable[[str], None],
        start: Starter = start_interpreter,
    ) -> None:
        self._shared, self._start, self._say = shared, start, say
        self._cores, self._size = list(cores), engine.reader.size
        self._arena = share_cache(engine)
        self._control, self._logits = self._arena["control"], self._arena["logits"]
        self._pipe: PipeEnd
        self._process: RunningProcess | None = None
        self._failures = 0
        self.ready, self.sent = False, 0
        self.restart()

    @property
    def pid(self) -> int | None:
        """Operating-system number of the process that reads prompts; None if there is none."""
        return getattr(self._process, "pid", None)

    def restart(self) -> None:
        """Start a new process that reads prompts, without waiting until it is ready; :meth:`look` finds out
        when it is.
        """
        self._control[WRITING] = 0.0
        arenas = self._shared.arena.handle, self._arena.handle
        child = open_child(lambda theirs: self._start(theirs, *arenas))
        self._pipe, self._process = child.pipe, child.process
        self._deadline = time.monotonic() + START_S
        about = self._shared.about | {
            "weights": self._shared.arena.form,
            "weight_bytes": self._shared.arena.size,
            "cache": self._arena.form,
            "cache_bytes": self._arena.size,
            "size": self._size,
            "cores": self._cores,
        }
        # a process that has ended already is noticed by the next look
        with suppress(OSError):
            self._pipe.send_bytes(json.dumps(about).encode())

    def set_quota(self, quota: float, writing: bool) -> None:
        """Tell the process that reads prompts which share of the cores it may use. ``quota``: this share, from 0 to 1.
        ``writing``: whether texts are being written now; if not, the process may use all cores.
        """
        self._control[QUOTA], self._control[WRITING] = quota, float(writing)

    def look(self) -> None:
        """Check, without waiting, whether the new process that reads prompts has become ready. It is started again if
        it has failed to start.
        """
        if self._process is None or self.ready:
            return
        try:
            if self._pipe.poll():
                self._pipe.recv_bytes()
                self.ready, self._failures = True, 0
            elif time.monotonic() > self._deadline:
                raise PrefillLost(f"it was not ready within {START_S:g} s")
        except (OSError, EOFError, PrefillLost) as error:
            self._failures += 1
            self._bury(error)

    def await_ready(self) -> None:
        """Wait until the process that reads prompts is ready. Raises :class:`WeftError` if it cannot be started."""
        while not self.ready:
            if self._process is None:
                raise WeftError(
                    "the process that reads prompts does not start; its own lines say why, or leave out --phases"
                )
            self._pipe.poll(0.1)
            self.look()

    def begin(self, row: PackedRow) -> None:
        """Let the other process compute a pass over ``row``, tokens of prompts. Call it only when no pass is under way.
        Raises :class:`PrefillLost` if the other process has ended.
        """
        message = json.dumps(row).encode()
        self.sent += len(message)
        try:
            self._pipe.send_bytes(message)
        except OSError as error:
            self._bury(error)
            raise PrefillLost("the process that reads prompts has ended") from None
        self._watched = _Silence(float(self._control[BEAT]), 0.0, time.monotonic())

    def has_ended(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the end of the pass under way in the other process. Return whether the pass has
        ended: it is complete, or the process is gone.
        """
        try:
            if self._pipe.poll(seconds):
                return True
        except OSError:
            return True
        beat, now = float(self._control[BEAT]), time.monotonic()
        last = self._watched
        passed = min(now - last.looked, max(seconds, MOST_LOOK_S))
        silent = last.seconds + passed if beat == last.beat else 0.0
        self._watched = _Silence(beat, silent, now)
        return silent > SILENT_S

    def logits(self, rows: int) -> T:
        """Return the logits ``[rows, vocab]`` of the pass that the other process has ended.

        Raises :class:`PrefillLost` if that process is gone; it is started again.
        """
        try:
            if not self._pipe.poll():
                raise PrefillLost(f"no sign of life for {SILENT_S:g} s")
            self._pipe.recv_bytes()
        except (OSError, EOFError, PrefillLost) as error:
            self._bury(error)
            raise PrefillLost("the process that reads prompts is gone") from None
        return self._logits[:rows].clone()  # the next pass overwrites them

    def close(self) -> None:
        """End the process that reads prompts, without starting another one."""
        self.ready = False
        self._pipe.close()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                _killed(process)

    def _bury(self, error: Exception) -> None:
        """Make sure that the process is gone, so that it writes to no block any more; then start it again."""
        self.ready = False
        self._pipe.close()
        assert self._process is not None
        end = _killed(self._process)
        why = str(error) if isinstance(error, PrefillLost) else end
        self._process = None
        if self._failures >= TRIES:
            self._say(
                f"the process that reads prompts has failed {TRIES} times ({why}); one process does all from now on"
            )
            return
        self._say(f"the process that reads prompts has ended ({why}); it is started again")  # fmt: skip
        self.restart()


def _killed(process: RunningProcess) -> str:
    """End ``process`` at once, and return how it ended, in words.

    A process in a call that the system does not interrupt is waited for :data:`GONE_S` seconds. It ends as soon as the
    call does, without running any code of its own, so that it writes nothing after this.
    """
    process.kill()
    try:
        return f"exit code {process.wait(GONE_S)}"
    except subprocess.TimeoutExpired:
        return f"it was killed, and has not ended within {GONE_S:g} s"


def share_cache(engine: Engine) -> SharedArena:
    """Move the cache of ``engine`` into memory that another process can share, with room for all its blocks. Return
    this memory. It also has a tensor ``logits`` for the logits of a step, and a tensor ``control`` of numbers that both
    processes read and write.
    """
    engine.block_form()  # the layers' caches exist from now on
    scheduler, dtype = engine.scheduler, engine.model.norm.scale.dtype
    blocks, logits = scheduler.pool.blocks, (scheduler.budget, engine.model.shape.vocab)
    stores = [pages.store for pages in engine.reader.pages if pages.store is not None]
    sizes = [store[:, 0].nbytes * blocks for store in stores]
    sizes += [prod(logits) * dtype.itemsize, CONTROLS * 8]
    arena = SharedArena(sum(map(aligned_bytes, sizes)))
    for number, (pages, store) in enumerate(
        zip(engine.reader.pages, stores, strict=True)
    ):
        parts, held, *rest = store.shape
        pages.store = arena.room(f"layer {number}", (parts, blocks, *rest), store.dtype)
        held = min(blocks, held)
        pages.store[:, :held] = store[:, :held]
    arena.room("logits", logits, dtype)
    arena.room("control", (CONTROLS,), torch.float64)
    return arena


def run_prefill(pipe: int, weights: int, cache: int) -> None:
    """Run in a process of its own: read prompts for the engine's process, and exit when that process ends. The
    arguments are inherited file descriptors: of the pipe, and of the shared memories with the model's weights and with
    the cache.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve_prefill(parent_pipe(pipe), weights, cache, apply_share)
    # the interpreter's own end takes long, and nothing is left to do
    os._exit(0)


class _Beats:
    """What a pass does before each layer: give a sign of life, and keep to the quota."""

    def __init__(
        self, control: T, cores: Sequence[int], apply: Callable[[CoreShare], None]
    ) -> None:
        self.control = control
        self.pacer = Pacer(cores, self, last=False, apply=apply, rest=self.rest)

    def present_share(self) -> float:
        return float(self.control[QUOTA]) if self.control[WRITING] else 1.0

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)
        self.control[BEAT] += 1

    def __call__(self, *arguments: Any) -> None:
        self.control[BEAT] += 1
        self.pacer.pace()


@torch.inference_mode()
def serve_prefill(
    pipe: PipeEnd,
    weights: int,
    cache: int,
    apply: Callable[[CoreShare], None],
    watch: Callable[[], None] = lambda: None,
) -> None:
    """Compute the rows of tokens that come through ``pipe``, until the pipe is closed. ``weights``, ``cache``: file
    descriptors of the shared memories with the model's weights and with the cache. ``apply``: sets the threads and
    cores of this process to a share. ``watch``: called before each layer.
    """
    with suppress(EOFError, OSError):
        about = json.loads(pipe.recv_bytes())
        arena = SharedArena(about["weight_bytes"], weights, about["weights"])
        model = attach_model(SharedModel(about, arena))
        blocks = SharedArena(about["cache_bytes"], cache, about["cache"])
        reader = PagedReader(model, about["size"])
        for number, pages in enumerate(reader.pages):
            pages.store = blocks[f"layer {number}"]
        logits, control = blocks["logits"], blocks["control"]
        beats = _Beats(control, about["cores"], apply)
        for block in model.blocks.values():
            block.register_forward_pre_hook(lambda *_: watch())
            block.register_forward_pre_hook(beats)
        pipe.send_bytes(b"ready")
        while True:
            row = PackedRow.of(json.loads(pipe.recv_bytes()))
            beats.pacer.begin()
            computed = reader.read_row(row)
            logits[: len(computed)] = computed
            pipe.send_bytes(b"done")
