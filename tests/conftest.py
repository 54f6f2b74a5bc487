"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

# Before PyTorch is there: threads of OpenMP that wait for work sleep, here and in what tests start. Spinning, they took
# most of the processor time of a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Those of NumPy's and SciPy's BLAS do not sleep: half a second's regression took a minute beside other processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch

from tests import forked_writers, started  # noqa: F401  # the first changes how checkpoints are written
from tests.forked_python import SERVER, forking, server_address
from tests.started import Started
from weft import plugins, registry
from weft.cli import run_command_line
from weft.memory.heap import keep_heap
from weft.prove.pool import ProcessPool
from weft.run.signals import requests

# Also before tests are collected: threads that have computed once do not outlive a fork, and would be waited for.
torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # once there is a folder for files
def pytest_configure(config: pytest.Config) -> None:
    """Save time: no circles are looked for while tests are collected, and the server of ranks starts beside that.

    One server is for all processes of tests, unless each counts its processor time.
    """
    gc.disable()
    counts = config.pluginmanager.hasplugin("tests.spent")
    if config.getoption("workers", 0) and not counts and not config.option.collectonly:
        started.start_server(ranks_print(config))


def ranks_print(config: pytest.Config) -> Path:
    """The file to which ranks of the pool print, if all processes of tests have one server."""
    folder: Path = config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    return folder / "ranks.txt"


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Most cases of campaigns are left to soak, and half of the others to the tests that are not quick.

    Files with the most slow tests go first, so that none ends alone.
    """
    cases = defaultdict[tuple[Path, str, int], list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and (
            mark := item.get_closest_marker("sampled")
        ):
            cases[item.path, item.originalname, mark.args[0]].append(item)
    for (_, _, count), found in cases.items():
        daily = [item for item in found if not item.get_closest_marker("soak")]
        daily.sort(
            key=lambda item: (
                item.get_closest_marker("slow") is not None,
                crc32(item.name.encode()),
            )
        )
        for item in daily[count:]:
            item.add_marker("soak")
        kept = daily[:count]
        for item in kept[(len(kept) + 1) // 2 :]:
            if not item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.slow(1))
    weight = Counter[Path]()
    for item in items:
        if not item.get_closest_marker("soak"):
            slow = item.get_closest_marker("slow")
            weight[item.path] += (slow.args or (10,))[0] if slow else 1
    items.sort(key=lambda item: -weight[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[Any]:
    """Skip what an older PyTorch cannot do and Weft refuses on it: that is an answer, and no failure."""
    report = yield
    if call.excinfo is not None and torch.__version__ < "2.13":
        refusal = "layout.ep needs PyTorch 2.13"
        if report.outcome == "failed" and refusal in str(call.excinfo.value):
            report.outcome, report.longrepr = "skipped", (*item.location[:2], refusal)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say why tests were run again: what a second run hides is a fault that shows seldom."""
    config = terminalreporter.config
    if config.getoption("workers", 0) and terminalreporter.stats.get("failed"):
        terminalreporter.line(f"what ranks printed: {ranks_print(config)}")
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"why {report.nodeid} was run again", "-")
        terminalreporter.line("\n".join(report.longreprtext.splitlines()[-60:]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What tests are made of stays; processes of tests share the cores, and threads that wait for one only spin."""
    option = session.config.option
    if session.config.getoption("workers", 0) and not option.collectonly:
        for name in (*started.USUAL, *started.PRELOAD):  # once for all of them
            import_module(name)
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000)  # as commands do
    torch.set_num_threads(1)
    keep_heap()  # as ranks do
    # A job in the background ignores Ctrl-C, and so would all that it starts, of which tests expect that it stops.
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A run in this process takes all cores; the tests after it would take ten times as long with these threads."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    """A command that runs in this process handles signals to the process's end, which is not that of the test."""
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    yield
    requests.reset()
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


#: Exit code, standard output and standard error of ``weft`` with these words.
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """The worker processes of this session, or of this process of it; see :mod:`weft.prove.pool`."""
    pool = ProcessPool(started.PRELOAD)
    yield pool
    pool.close()


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    """Runs ``weft`` in this process, which no mistake may end with a traceback."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, words)])
        threads = torch.get_num_threads()
        with pytest.raises(SystemExit) as ended:
            run_command_line()
        torch.set_num_threads(threads)  # a run takes all cores
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int) and "Traceback" not in out + err
        return ended.value.code, out, err

    return run


@pytest.fixture
def launched() -> Command:
    """Runs ``weft`` in a process of its own, which may start ranks; see :mod:`tests.started`."""

    def run(*words: object) -> tuple[int, str, str]:
        done = started.run(*words)
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    """Interpreters that the test starts are forks; see :mod:`tests.forked_python`. Returns those of this process."""
    interpreters = list[Started]()
    monkeypatch.setenv(SERVER, server_address())
    monkeypatch.setattr(subprocess, "Popen", forking(interpreters.append))
    return interpreters


@pytest.fixture
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that plugins have registered, neither by tests before nor by this one once it is over."""
    registered = registry._REGISTERED
    monkeypatch.setattr(plugins, "loaded", set[str]())

    def take_out() -> dict[Any, registry.Registered]:
        plugged = [
            key for key, t in registered.items() if not t.module.startswith("weft.")
        ]
        return {key: registered.pop(key) for key in plugged}

    before = take_out()
    yield
    take_out()
    registered.update(before)


@pytest.fixture
def own_techniques() -> Iterator[None]:
    """What a test itself registers is gone after it."""
    registered = registry._REGISTERED
    before = dict(registered)
    yield
    # Weft's own stay, as their files are imported once
    for key, technique in [*registered.items()]:
        if key not in before and not technique.module.startswith("weft."):
            del registered[key]
    registered.update(before)
