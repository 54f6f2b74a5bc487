"""A process of this one that answers lines."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress


class LineProcess:
    """A process that answers lines, over one socket for both directions.

    ``command``, ``environment``: what to start. ``first``: line that is sent before all others. ``answers``: what the
    process writes, line by line.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], first: str
    ) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment
            )
        self.answers = self._socket.makefile(encoding="utf-8")
        self._unsent = f"{first}\n"

    def send(self, line: str) -> None:
        """Send ``line``. Raises ConnectionError if the process has ended."""
        text, self._unsent = f"{self._unsent}{line}\n", ""
        self._socket.sendall(text.encode())

    def end(self) -> None:
        """Kill the process, and let go of who waits for its answer: it may be in a call that even this does not end."""
        self.process.kill()
        with suppress(OSError):  # the process has ended before
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, seconds: float) -> None:
        """Wait until the killed process is gone, at most for so many ``seconds``, and close the socket."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.answers.close()
        self._socket.close()
