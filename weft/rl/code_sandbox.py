"""Runs Python code that a model has written in a process that has no network and can write no file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from weft.encodable import encodable
from weft.errors import UsageError, WeftError

#: The program of the process, which is started by its path, so that it imports nothing of Weft's.
PROGRAM = Path(__file__).with_name("sandbox_process.py")


class CodeSandbox:
    """Sandbox: a process that runs code, each time in a new child process without network and file access.

    ``modules``: modules that the code may import beside the standard library. ``seconds``, ``megabytes``: limits of
    each run. Raises :class:`UsageError` if the system does not permit this isolation.
    """

    def __init__(
        self, modules: Sequence[str] = (), seconds: float = 3.0, megabytes: int = 256
    ) -> None:
        self.modules, self.seconds, self.megabytes = modules, seconds, megabytes
        self._process = self._start()

    def passes(self, code: str, tests: Sequence[str], setup: str = "") -> list[bool]:
        """Run ``code``, then ``setup``, then each of ``tests``; return for each test whether it raises no error.

        If the code does not end in time, or ends its process, no test passes. Raises :class:`WeftError` if the
        sandbox's own process ends twice.
        """
        request = {
            "code": encodable(code),
            "tests": [*tests],
            "setup": setup,
            "seconds": self.seconds,
            "megabytes": self.megabytes,
        }
        for _ in range(2):
            reply = self._ask(json.dumps(request))
            if reply:
                passed = json.loads(reply)
                return passed or [False] * len(tests)
            self.close()  # killed from outside
            self._process = self._start()
        raise WeftError("the process that runs code ended twice; see its lines above")

    def close(self) -> None:
        """End the sandbox's process; code cannot be run in it any more."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            try:
                pipe.close()
            except OSError:  # of a process that is gone
                continue

    def _ask(self, line: str) -> str:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:
            return ""
        return self._process.stdout.readline()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM), *self.modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
            text=True,
        )
        assert process.stdout
        line = process.stdout.readline()
        reply = json.loads(line) if line else {"error": "it ended"}
        if "error" in reply:
            process.kill()
            process.wait()
            raise UsageError(
                f"no sandbox for code here ({reply['error']}); code of a model runs only where a process may leave the "
                "network and make files read-only: Linux 5.12 with user namespaces "
                "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; "
                "in Docker --security-opt seccomp=unconfined)"
            )
        return process
