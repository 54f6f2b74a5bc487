"""Signals that ask a process to end: Ctrl-C, SIGTERM, and SIGHUP when its terminal goes away.

The first signal is a request, which a run fulfils after its step. A signal within :data:`REPEAT_S` repeats this
request: ``timeout`` sends SIGTERM to a command and then to its process group, and users press keys twice. A later
signal ends the process at once. Nothing here imports PyTorch.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

#: Seconds after the first signal in which others are the same wish.
REPEAT_S = 2.0
#: Seconds in which the thread that notes when signals arrive gets its turn.
STAMP_S = 0.01
#: The variable that names the file in which a rank tells its launcher which run it is of.
RUN_FILE = "WEFT_RUN_FILE"


class Stopped(KeyboardInterrupt):
    """Exception raised in a process that a signal has asked to end."""


class ArrivalTimes:
    """Times at which signals after the first arrive, recorded in a thread of its own.

    Python's handlers may run late, because they wait until PyTorch's present operation ends.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._begun = False

    def begin(self) -> None:
        """Start the thread that records when signals arrive.

        Nothing is done outside the main thread, or if an event loop already receives the signals.
        """
        if self._begun or threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        if (other := signal.set_wakeup_fd(writing, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(other)
            os.close(reading)
            os.close(writing)
            return
        self._begun = True

        def note() -> None:
            while number := os.read(reading, 1):
                self._seconds.setdefault(number[0], time.monotonic())

        threading.Thread(target=note, name="weft-signals", daemon=True).start()

    def take(self, number: int, now: float) -> float:
        """Return the time at which signal ``number``, which is being handled, arrived; ``now`` if that is not known.

        Both are times of ``time.monotonic``.
        """
        if self._begun:
            time.sleep(STAMP_S)
        return self._seconds.pop(number, now)


stamps = ArrivalTimes()


class StopRequests:
    """Signals that have asked this process to end.

    The first signal raises :class:`Stopped`, unless :func:`noted_signals` is in effect, which notes signals in a list
    instead.

    Attributes:
        ``clock``: function that returns seconds.
        ``program``: function that this process runs if it is a command of Weft's; None in a program of someone else's.
        ``asked``: number of the first signal; 0 if there was none.
        ``latest``: number of the signal that asked for the end at once; 0 if there was none.
        ``at_once``: whether a later signal has asked the process to end at once.
        ``leaving``: whether the process is about to end, so that a signal ends it at once.
        ``run``: folder of the run that this process trains, from its opening until its end has been reported; else
            None.
        ``noted``: list to which signals are appended; None outside of the context :func:`noted_signals`.
        ``again``: function that is called with the number of a signal after the first.
    """

    #: What this process runs, if it is a command's own; None in a program of somebody else's.
    program: Callable[[], None] | None = None

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget all signals, at the beginning of a new command."""
        self.asked, self.latest, self.at_once, self.leaving, self._since = (
            0,
            0,
            False,
            False,
            0.0,
        )
        self.run: Path | None = None
        self.noted: list[int] | None = None
        self.again: Callable[[int], None] = _stop

    def watch(self) -> None:
        """Handle the signals of :func:`stop_signals` from now on, until this process ends.

        SIGINT is handled even if the process has inherited that it is ignored, as background jobs of a shell script do.
        SIGHUP that is ignored, as under ``nohup``, stays ignored.
        """
        self.reset()
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                signal.signal(number, self.note)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Handle signals as :meth:`watch` does, but only while the context lasts, for use inside another program."""
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) == self.note
        ):
            yield
            return
        before = {number: signal.getsignal(number) for number in stop_signals()}
        self.watch()
        try:
            yield
        finally:
            self.reset()
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Handle signal ``number``: the first request to end, a repetition of it (ignored), or a later signal.

        ``frame``: the interrupted code.
        """
        now = self.clock()
        arrived = min(now, stamps.take(number, now)) if self.asked else now
        if not self.asked:
            self.asked, self._since = number, now
            if number == signal.SIGHUP:
                _leave_terminal()
            stamps.begin()
        elif arrived - self._since <= REPEAT_S:
            return
        else:
            self.at_once, self.latest = True, number
        if self.leaving:
            os._exit(128 + number)
        if self.noted is None and self.program is not None and _is_importing(frame):
            self.end_process()
        if self.noted is None:
            raise Stopped
        self.noted.append(number)
        if len(self.noted) > 1:
            self.again(number)

    def end_process(self) -> None:
        """Print why this process ends, and end it at once without an exception.

        An exception inside an import of PyTorch would be swallowed, or abort the process.
        """
        # of several ranks, the first
        if os.environ.get("RANK", "0") == "0" and "WEFT_LAUNCHED" not in os.environ:
            os.write(2, f"weft: {self.words(self.run)}\n".encode())
        os._exit(self.code)

    def open_run(self, folder: Path | None) -> None:
        """Record ``folder``, the folder of the run that this process trains, for this process and its launcher.

        None means that the end of the run has been reported.
        """
        self.run = folder
        if file := os.environ.get(RUN_FILE):
            with contextlib.suppress(OSError):  # the run matters more
                Path(file).write_text(str(folder.absolute()) if folder else "")

    @property
    def code(self) -> int:
        """Exit code with which this process ends because a signal has asked it to: 128 + the signal's number."""
        return 128 + (self.asked or signal.SIGINT)

    def words(self, run: Path | None) -> str:
        """Return words on how this process ends: by which signal, and which steps of its run are saved.

        ``run``: the run's folder; None if no run is open, so that nothing is said about steps.
        """
        name = signal.Signals(self.latest or self.asked or signal.SIGINT).name
        how = "interrupted" if name == "SIGINT" else f"stopped by {name}"
        how = f"ended at once, by another {name}" if self.at_once else how
        if run is None:
            return how
        from weft.run.saved_steps import what_is_saved

        return f"{how}; {what_is_saved(run)}"


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether the signal has interrupted the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _stop(number: int) -> NoReturn:
    raise Stopped


def _leave_terminal() -> None:
    """Write nothing more to a terminal that is gone, because the error would end a run before it has saved."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream) if os.isatty(
                stream
            ) else None


#: Those of this process.
requests = StopRequests()


def stop_signals() -> tuple[int, ...]:
    """Return the numbers of the signals that ask a run to stop: SIGINT, SIGTERM and SIGHUP.

    SIGHUP is left out under ``nohup``, where a run outlives its terminal.
    """
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else []))


@contextlib.contextmanager
def noted_signals(
    numbers: Sequence[int], again: Callable[[int], None] = _stop
) -> Iterator[list[int]]:
    """Append the numbers of received signals to a list instead of raising an exception, while the context lasts.

    Yields the list. ``numbers``: the signals to note. Signals that come less than :data:`REPEAT_S` seconds after the
    first count as its repetition, and are ignored. For each signal that comes after this time, ``again(number)`` is
    called, and it is noted.

    A signal may have come before the context, without an effect, because the interrupted code swallowed its exception,
    as imports may. If there was one, it is the first in the list. Only the main thread can handle signals; in other
    threads the list stays empty.
    """
    if threading.current_thread() is not threading.main_thread():
        yield []
        return
    watched = signal.getsignal(numbers[0]) == requests.note if numbers else False
    if not watched:
        requests.reset()
    received = [requests.asked] if requests.asked in numbers else []
    outer = requests.noted, requests.again
    before = {number: signal.signal(number, requests.note) for number in numbers}
    requests.noted, requests.again = received, again
    try:
        yield received
    finally:
        requests.noted, requests.again = outer
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if not watched:
            requests.asked = 0


def leave_signals_to_others() -> None:
    """Ignore the signals that ask this process to end, from now on.

    Call it in ranks whose end the first rank decides: only the first rank then reacts to the signals.
    """
    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            signal.signal(number, requests.note)
        requests.noted, requests.again = [], lambda number: None


@contextlib.contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """Hold Ctrl-C (SIGINT) back from processes that are started while the context lasts.

    Such a process receives it after calling :func:`take_ctrl_c`. Otherwise a Ctrl-C while an interpreter starts would
    end it with a traceback, before any code could handle the signal.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_ctrl_c() -> None:
    """Accept Ctrl-C (SIGINT) in this rank from now on, also one that its launcher has held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
