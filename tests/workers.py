"""Runs files of tests in several processes that are forks of pytest's own: ``-p tests.workers --workers 3``.

PyTorch, Weft and 500 files of tests are imported once and not per process, which took each 15 seconds. A file's tests
run in one process, in order, so what its fixtures hold is computed once; so do those of files with the same
``TOGETHER``. The next file goes to the process that is the first to begin the last test of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
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
from typing import Any, NoReturn, cast

import pytest

#: Seconds that processes get to end in, once the run is interrupted, and after which the tests that run are named.
END_S, NAMED_S = 20, 600


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
    if option.workers < 0 or (option.workers and option.usepdb):
        raise pytest.UsageError("--workers needs 0 or more, and 0 with --pdb")
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
        self.crashed = set[int]()
        self.started = 0

    def run(self, count: int) -> None:
        """Run all tests in ``count`` processes."""
        try:
            for _ in range(min(count, len(self.files))):
                self.start(self.files.popleft())
            while self.workers:
                ready = wait([each.connection for each in self.workers], NAMED_S)
                if not ready:
                    self.name_those_that_run()
                for worker in list(self.workers):
                    if worker.connection in ready:
                        self.hear(worker)
        finally:
            self.stop()

    def name_those_that_run(self) -> None:
        """Say which tests have run for long, so that a run that hangs says in what."""
        for worker in self.workers:
            if worker.runs is not None:
                name = self.session.items[worker.runs].nodeid
                print(f"\n{name} has run for over {NAMED_S} s", file=sys.__stderr__)

    def start(self, places: list[int]) -> None:
        """Fork a process that begins with these tests."""
        ours, theirs = Pipe()
        # once for all: whoever asks first removes what is there, and makes it
        self.session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
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
            if message is None:
                places = self.files.popleft() if self.files else []
                worker.left += places
                worker.connection.send(places)
        except (EOFError, OSError):
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
            # what has failed so far is still printed
            why = f"a process of tests ended between tests: code {code}"
            raise self.session.Interrupted(why)
        item = self.session.items[worker.runs]
        reruns = getattr(self.session.config.option, "reruns", 0)
        again = bool(reruns) and worker.runs not in self.crashed
        self.crashed.add(worker.runs)
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome=cast(Any, "rerun" if again else "failed"),
            longrepr=f"the process ended within this test, with exit code {code}",
            when="call",
        )
        data = self.hook.pytest_report_to_serializable(
            config=self.session.config, report=report
        )
        if not again:
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
    if sys.platform == "linux":  # 1 is PR_SET_PDEATHSIG: no process outlives the run
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes
        config.pluginmanager.get_plugin("runner").pytest_sessionfinish(session)
    except BaseException:
        connection.send(f"a process of tests failed: {traceback.format_exc()}")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(END_S)  # for exit functions that block
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
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        stream = getattr(handler, "stream", None)
        if isinstance(handler, logging.StreamHandler) and getattr(stream, "closed", 0):
            # it was made while tests were collected, and transformers keeps a flush of that time
            handler.stream = sys.__stderr__
            vars(handler).pop("flush", None)
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
