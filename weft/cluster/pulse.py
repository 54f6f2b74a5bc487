"""Whether this process was busy while its threads did not run: then what it computed has held them up."""

import threading
import time

#: Seconds between two beats of a pulse.
PULSE_S = 0.2


class Pulse:
    """Measures the longest time during which a thread of this process could not run although the process computed.
    Times in which the process was stopped from outside do not count, because it computed nothing then.
    """

    def __init__(self) -> None:
        self._longest, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name="weft-pulse", daemon=True
        )
        self._thread.start()

    def note(self, seconds: float, computed: float) -> None:
        """Record that ``seconds`` have passed between two runs of the thread. The process used the processor for
        ``computed`` seconds of this time.
        """
        if computed > seconds / 2:
            self._longest = max(self._longest, seconds)

    def take(self) -> float:
        """Return the longest time in seconds since the last call, and start again from 0."""
        longest, self._longest = self._longest, 0.0
        return longest

    def close(self) -> None:
        """End the thread that measures."""
        self._ended.set()

    def _beat(self) -> None:
        then, used = time.monotonic(), time.process_time()
        while not self._ended.wait(PULSE_S):
            now, use = time.monotonic(), time.process_time()
            self.note(now - then - PULSE_S, use - used)
            then, used = now, use
