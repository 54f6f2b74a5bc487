"""What a test that plays a role's process itself gives the run in place of one."""

from __future__ import annotations

from subprocess import TimeoutExpired


class SeemingProcess:
    """A process that there is not. ``code``: the exit code that it seems to have; None: it seems to run."""

    pid, code = 1, None

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            raise TimeoutExpired("process", timeout or 0)
        return self.code

    def kill(self) -> None:
        self.code = self.code or -9
