"""Runs files of tests in several processes that are forks of pytest's own: ``-p tests.workers --workers 3``.

PyTorch, Weft and 500 files of tests are imported once and not per process, which took each 15 seconds. A file's tests
run in one process, in order, so what its fixtures hold is computed once; so do those of files with the same
``TOGETHER``. The next file goes to the process that is the first to begin the last test of its own.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import Pipe, active_children, forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest

#: What processes get to end in, once the run is interrupted.
END_S = 20


class Hooks:
    """What other plugins may do in each process that runs tests."""

    def pytest_worker_begins(self, config: pytest.Config) -> None:
        """Called in a process before its first test."""

    def pytest_worker_ends(self, config: pytest.Config) -> None:
        """Called in a process after its last test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers",
        type=int,
        default=0,
        help="run whole files of tests in so many processes, forks of this one",
    )


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    failed = session.testsfailed and not option.continue_on_collection_errors
    if not option.workers or option.collectonly or failed:
        return None
    Workers(session).run(option.workers)
    return True


@dataclass
class Outcome:
    """What a test came to.

    ``place``: its place among the session's tests; ``reports`` and ``warnings``: the arguments of pytest's hooks, as
    they can be sent.
    """

    place: int
    reports: list[Any] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Worker:
    """A process that runs tests: ``left`` are the places of those that it has and has not finished."""

    pid: int
    connection: Connection
    left: deque[int]
    runs: int | None = None


class Workers:
    """The processes of a session, and the files that wait for one."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session
        self.hook = session.config.hook
        files = dict[object, list[int]]()
        for place, item in enumerate(session.items):
            module = getattr(item, "module", None)
            key = getattr(module, "TOGETHER", item.path)
            files.setdefault(key, []).append(place)
        self.files = deque(files.values())
        self.workers = list[Worker]()
        self.started = 0

    def run(self, count: int) -> None:
        """Run all tests in ``count`` processes."""
        try:
            for _ in range(min(count, len(self.files))):
                self.start(self.files.popleft())
            while self.workers:
                ready = wait([worker.connection for worker in self.workers])
                for worker in list(self.workers):
                    if worker.connection in ready:
                        self.hear(worker)
        finally:
            self.stop()

    def start(self, places: list[int]) -> None:
        """Fork a process that begins with these tests."""
        ours, theirs = Pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if (pid := os.fork()) == 0:
            for connection in (ours, *(worker.connection for worker in self.workers)):
                connection.close()
            be_worker(self.session, self.started, theirs, places)
        theirs.close()
        self.started += 1
        self.workers.append(Worker(pid, ours, deque(places)))

    def hear(self, worker: Worker) -> None:
        """Take a message: a test has begun or ended, or the process wants more to do, or it has ended itself."""
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            self.bury(worker)
            return
        match message:
            case int():
                worker.runs = message
            case Outcome():
                worker.left.remove(message.place)
                worker.runs = None
                self.report(message)
            case str():
                raise self.session.Interrupted(message)
            case None:
                places = self.files.popleft() if self.files else []
                worker.left += places
                worker.connection.send(places)

    def report(self, outcome: Outcome) -> None:
        """Tell pytest what a test came to, as if it had run here."""
        session, item = self.session, self.session.items[outcome.place]
        for warning in outcome.warnings:
            said = _warning(**warning.pop("said"))
            self.hook.pytest_warning_recorded.call_historic(
                kwargs={**warning, "warning_message": said}
            )
        self.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in outcome.reports:
            report = self.hook.pytest_report_from_serializable(
                config=session.config, data=data
            )
            self.hook.pytest_runtest_logreport(report=report)
        self.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def bury(self, worker: Worker) -> None:
        """A process has ended. If a test is to blame, it has failed, and another process goes on after it."""
        self.workers.remove(worker)
        worker.connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if code == 0 and not worker.left:
            return
        if worker.runs is None:
            raise RuntimeError(f"a process of tests ended between tests: code {code}")
        item = self.session.items[worker.runs]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the process ended within this test, with exit code {code}",
            when="call",
        )
        data = self.hook.pytest_report_to_serializable(
            config=self.session.config, report=report
        )
        worker.left.remove(worker.runs)
        self.report(Outcome(worker.runs, [data]))
        if worker.left:
            self.start(list(worker.left))

    def stop(self) -> None:
        """End the processes that still run: the session ends early."""
        for number in (signal.SIGINT, signal.SIGKILL):
            for worker in self.workers:
                os.kill(worker.pid, number)
            limit = time.monotonic() + END_S
            while self.workers and time.monotonic() < limit:
                self.workers = [
                    worker
                    for worker in self.workers
                    if not os.waitpid(worker.pid, os.WNOHANG)[0]
                ]
                time.sleep(0.05)


class Recorder:
    """Collects what pytest reports of the test that runs, in place of what prints it."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.outcome = Outcome(-1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcome.reports.append(
            self.config.hook.pytest_report_to_serializable(
                config=self.config, report=report
            )
        )

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        said = {
            "text": str(warning_message.message),
            "category": warning_message.category.__name__,
            "filename": warning_message.filename,
            "lineno": warning_message.lineno,
        }
        self.outcome.warnings.append(
            {"said": said, "when": when, "nodeid": nodeid, "location": location}
        )


def _warning(
    text: str, category: str, filename: str, lineno: int
) -> warnings.WarningMessage:
    """Return a warning as it was, but for its class, which has the name alone."""
    kind = type(category, (Warning,), {})
    return warnings.WarningMessage(text, kind, filename, lineno)


def be_worker(
    session: pytest.Session, number: int, connection: Connection, places: list[int]
) -> NoReturn:
    """Run tests until there are no more, and end this process."""
    config, code = session.config, 1
    atexit._clear()  # what the other process leaves at its end is not for this one to remove
    try:
        recorder = _prepare(config, number)
        config.hook.pytest_worker_begins(config=config)
        left = deque(places)
        while left:
            place = left.popleft()
            if not left:  # pytest wants to know what comes next, to close fixtures
                connection.send(None)
                left.extend(connection.recv())
            connection.send(place)
            recorder.outcome = Outcome(place)
            config.hook.pytest_runtest_protocol(
                item=session.items[place],
                nextitem=session.items[left[0]] if left else None,
            )
            connection.send(recorder.outcome)
        config.hook.pytest_worker_ends(config=config)
        code = 0
    except (KeyboardInterrupt, EOFError, ConnectionError):
        config.pluginmanager.get_plugin("runner").pytest_sessionfinish(session)
    except BaseException:
        connection.send(f"a process of tests failed: {traceback.format_exc()}")
    finally:
        for process in active_children():
            process.kill()
        atexit._run_exitfuncs()  # a browser is ended there
        os._exit(code)


def _prepare(config: pytest.Config, number: int) -> Recorder:
    """Part this process from the one that it is a fork of: what it prints, files that it makes, whom it reports to."""
    for name in ("terminalreporter", "terminalprogress-plugin"):
        if plugin := config.pluginmanager.get_plugin(name):
            config.pluginmanager.unregister(plugin)
    capture = config.pluginmanager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"worker-{number}"
    factory._basetemp.mkdir()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    # it is no child of this process, which is what would be looked for
    if server._forkserver_pid:
        server.ensure_running = lambda: None
    recorder = Recorder(config)
    config.pluginmanager.register(recorder)
    recorder.outcome = Outcome(-1)  # warnings of before, which come again
    return recorder
