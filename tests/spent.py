"""Counts the processor time of every test: its process, the ranks and commands that it started, and what was killed.

``python -m tests.spent [-o FILE] [words of pytest]`` runs tests and prints the thirty dearest, or those of an earlier
FILE with ``--print``. A control group of the kernel counts, which needs the right to make one (root, on most machines).
Each process of ``--workers`` has a group of its own. What a rank of the pool or a process left behind does after its
test is counted for a later one; the sum is exact.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

#: The file to which each process adds a line per test.
RECORDS = "WEFT_TESTS_SPENT"
CONTROL = Path("/sys/fs/cgroup")


class Group:
    """A control group of this process and of all that it starts from now on."""

    def __init__(self, name: str) -> None:
        """Make the group and enter it. Raises OSError where the kernel does not let us."""
        unified = (CONTROL / "cgroup.controllers").exists()
        self.folder = (CONTROL if unified else CONTROL / "cpuacct") / name
        self.usage = self.folder / ("cpu.stat" if unified else "cpuacct.usage")
        self.folder.mkdir()
        self.entered = sum(os.times()[:2])
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def seconds(self) -> float:
        """Processor time in seconds, of processes that have ended too."""
        text = self.usage.read_text()
        if self.usage.name == "cpu.stat":
            # the first row is usage_usec
            return self.entered + int(text.split()[1]) / 1e6
        return self.entered + int(text) / 1e9


def remove_groups() -> None:
    """Remove the groups of processes that have all ended."""
    for folder in [
        *CONTROL.glob("weft-tests-*"),
        *CONTROL.glob("cpuacct/weft-tests-*"),
    ]:
        with suppress(OSError):
            folder.rmdir()


class Account:
    """Writes what each test costs to the file of :data:`RECORDS`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.group = Group(f"weft-tests-{os.getpid()}")
        self.written = 0.0

    def charge(self, name: str) -> None:
        now = self.group.seconds()
        with self.path.open("a") as file:
            file.write(
                json.dumps({"test": name, "seconds": round(now - self.written, 3)})
                + "\n"
            )
        self.written = now

    def pytest_collection_finish(self) -> None:
        self.charge("(imports and collection)")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        result = yield
        self.charge(item.nodeid)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.charge("(end of the session)")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Account(Path(os.environ[RECORDS])), "account")


@pytest.hookimpl(optionalhook=True)
def pytest_worker_begins(config: pytest.Config) -> None:
    """Count anew in a process that runs tests."""
    config.pluginmanager.unregister(name="account")
    pytest_configure(config)


@pytest.hookimpl(optionalhook=True)
def pytest_worker_ends(config: pytest.Config) -> None:
    config.pluginmanager.get_plugin("account").pytest_sessionfinish()


def table(path: Path, rows: int = 30) -> str:
    """The dearest tests and the sum of all, in seconds."""
    costs: dict[str, float] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        costs[row["test"]] = costs.get(row["test"], 0.0) + row["seconds"]
    dearest = sorted(costs, key=lambda name: -costs[name])[:rows]
    lines = [f"{costs[name]:8.1f} s  {name}" for name in dearest]
    total = sum(costs.values())
    return "\n".join(
        [
            *lines,
            f"{total:8.1f} s  all {len(costs):,} rows, {total / 60:.1f} minutes of one core",
        ]
    )


def main() -> int:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("spent.jsonl"),
        help="the file to write, a line a test",
    )
    parser.add_argument("--rows", type=int, default=30, help="how many tests to print")
    parser.add_argument(
        "--print", action="store_true", help="run nothing, print what FILE has"
    )
    options, words = parser.parse_known_args()
    path, code = options.output.resolve(), 0
    if not options.print:
        path.write_text("")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.workers",
            "-p",
            "tests.spent",
            "-m",
            "not soak",
            *(words or ["tests"]),
        ]
        code = subprocess.run(
            command, env={**os.environ, RECORDS: str(path)}
        ).returncode
        remove_groups()
    print(table(path, options.rows))
    return code


if __name__ == "__main__":
    sys.exit(main())
