"""Code of a model runs where it can reach nothing, within limits of time and memory."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.techniques.test_tasks import hostile_answers
from weft.errors import UsageError
from weft.recipe import Task
from weft.rl import code_sandbox
from weft.rl.build_task import reward_task
from weft.rl.code_sandbox import CodeSandbox
from weft.rl.reward_workers import RewardWorkers, task_words
from weft.rl.rollout import RewardQuestion

TESTS = ["assert double(2) == 4", "assert double('a') == 'aa'"]
RIGHT = "def double(x):\n    return x + x\n"
QUESTION = RewardQuestion("Write double(x).", facts={"tests": TESTS})


@pytest.fixture(scope="module")
def sandbox() -> Iterator[CodeSandbox]:
    try:
        sandbox = CodeSandbox(seconds=0.4, megabytes=128)
    except UsageError as refused:
        pytest.skip(str(refused))
    yield sandbox
    sandbox.close()


def test_tests_pass_or_fail(sandbox: CodeSandbox) -> None:
    assert sandbox.passes(RIGHT, TESTS) == [True, True]
    assert sandbox.passes("def double(x): return 2 * x if x > 1 else 0", TESTS) == [True, False]  # fmt: skip
    assert sandbox.passes("def double(x) return x", TESTS) == [False, False]
    assert sandbox.passes(RIGHT, ["assert double(n) == 6"], "n = 3") == [True]
    statistics = "import statistics, math\ndef double(x): return statistics.mean([x, 3 * x])"  # fmt: skip
    assert sandbox.passes(statistics, TESTS) == [True, False]


#: What code of a model may try; where it succeeds, it defines what the tests want.
ATTEMPTS = {
    "network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "socket": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('SOCKET')",
    "write": "open('FOLDER/new', 'w')",
    "append": "open('FOLDER/kept', 'a').write('x')",
    "delete": "import os\nos.unlink('FOLDER/kept')",
    "rename": "import os\nos.rename('FOLDER/kept', 'FOLDER/moved')",
    "process": "import os\nif os.fork() == 0: os._exit(0)",
    "program": "import subprocess\nsubprocess.run(['/bin/true'], check=True)",
    "thread": "import threading\nt = threading.Thread(target=int)\nt.start()",
    "kill": "import os, signal\nos.kill(PID, signal.SIGKILL)",
    "trace": "open('/proc/PID/mem', 'wb')",
    "environment": "open('/proc/PID/environ').read()",
    "unmount": "import ctypes\nassert ctypes.CDLL(None).umount2(b'/tmp', 2) == 0",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/mnt', b'tmpfs', 0, b'') == 0",
    "root": "import os\nos.setuid(0)",
    "memory": "x = bytearray(1 << 30)",
    "exit": "import os\nos._exit(0)",
    "leave": "raise SystemExit(0)",
    "result": "import os\nos.write(3, b'[true, true]')\nos._exit(0)",
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(60)",
    "ignore": "import signal\n[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]\nwhile True: pass",
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_nothing_can_be_reached(
    attempt: str, sandbox: CodeSandbox, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    tmp_path.chmod(0o777)
    kept.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        name = tmp_path / "s"
        with socket.socket(socket.AF_UNIX) as local:
            local.bind(str(name))
            local.listen()
            code = ATTEMPTS[attempt].replace("PORT", str(server.getsockname()[1]))
            code = code.replace("FOLDER", str(tmp_path)).replace("SOCKET", str(name))
            code = code.replace("PID", str(os.getpid()))
            start = time.monotonic()
            assert sandbox.passes(f"{code}\n{RIGHT}", TESTS) == [False, False]
            assert time.monotonic() - start < 5
    assert kept.read_text() == "as it was"
    assert sorted(os.listdir(tmp_path)) == ["kept", "s"]
    assert sandbox.passes(RIGHT, TESTS) == [True, True]


def test_the_process_is_started_again(sandbox: CodeSandbox) -> None:
    os.kill(sandbox._process.pid, signal.SIGKILL)
    assert sandbox.passes(RIGHT, TESTS) == [True, True]


def test_answers_are_blocks_of_code(sandbox: CodeSandbox) -> None:
    settings = {"run_seconds": 0.4, "partial": True}
    whole, partial = (
        reward_task(Task(reward="code", **more)) for more in ({}, settings)
    )
    half = "def double(x): return 4"
    for text, reward, share in (
        (RIGHT, 1, 1),
        (f"Here:\n```python\n{RIGHT}```\nDone.", 1, 1),
        (f"```\n{half}\n```\nNo:\n```py\n{RIGHT}```", 1, 1),
        (half, 0, 0.5),
        ("I cannot.", 0, 0),
    ):
        assert whole.score(QUESTION, text) == reward
        assert partial.score(QUESTION, text) == share
    with pytest.raises(UsageError, match=r"needs records with 'tests'"):
        whole.score(RewardQuestion("?"), RIGHT)
    whole.close()
    partial.close()
    with pytest.raises(UsageError, match=r"run_seconds = 20 is not below"):
        reward_task(Task(reward="code", run_seconds=20)).prepare()


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(8, marks=pytest.mark.slow(8)),
        pytest.param(1, marks=[pytest.mark.soak, pytest.mark.slow(40)]),
    ],
)
def test_hostile_answers_get_nothing(
    every: int, sandbox: CodeSandbox, tmp_path: Path
) -> None:
    """In processes that score, as in a run; nobody has executed anything outside afterwards."""
    tmp_path.chmod(0o777)
    sentinel = tmp_path / "executed"
    answers = hostile_answers(sentinel)[::every]
    words = task_words(Task(reward="code", run_seconds=0.2, run_megabytes=64))
    with RewardWorkers(words, 2, seconds=5) as workers:
        scored = workers.scores([QUESTION] * (len(answers) + 1), [*answers, RIGHT])
    assert [score.value for score in scored] == [0.0] * len(answers) + [1.0]
    assert not sentinel.exists()


def test_where_it_is_not_allowed_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Once, before any answer is run."""
    program = tmp_path / "program.py"
    text = code_sandbox.PROGRAM.read_text()
    broken = text.replace("NEWUSER | NEWNET", "3 | NEWNET")
    assert broken != text
    program.write_text(broken)
    monkeypatch.setattr(code_sandbox, "PROGRAM", program)
    with pytest.raises(UsageError, match=r"\[Errno 22\] unshare.* user namespaces"):
        CodeSandbox()
