"""Starting ranks, ending them, and the one line that says why they failed."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from tests.run.rank import launch_forks, launch_interpreters
from tests.started import Started
from weft.errors import UsageError, WeftError
from weft.run import signals
from weft.run.failure import (
    Failure,
    Grade,
    is_secondary,
    oom_kills,
    report_failure,
    root_cause,
)
from weft.run.launch import _cause, launch
from weft.run.rank_processes import in_ranks, slurm_ranks

ROOT = Path(__file__).parents[2]
LAUNCHERS = {"forks": launch_forks, "interpreters": launch_interpreters}

both = pytest.mark.parametrize("how", LAUNCHERS)


@pytest.fixture
def script(tmp_path: Path) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("rank.py")), str(tmp_path)]


def launch_ranks(folder: Path, how: str, deed: str, ranks: int = 2) -> Started:
    """A launcher of ranks that do ``deed``; they are forks of it, or interpreters of their own."""
    # one that is killed leaves its folder behind
    env = os.environ | {"TMPDIR": str(folder)}
    return Started(ranks, folder, deed, cwd=ROOT, env=env, main=LAUNCHERS[how])


def wait_for(folder: Path, pattern: str, count: int) -> list[str]:
    """Contents of files that ranks write when they are ready."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in sorted(folder.glob(pattern))]
        if len(texts) == count and all(texts):
            return texts
        time.sleep(0.05)
    raise AssertionError(f"{count} files {pattern} did not appear in {folder}")


def assert_gone(pids: list[str]) -> None:
    deadline = time.monotonic() + 60
    while left := [
        p
        for p in pids
        if psutil.pid_exists(int(p)) and psutil.Process(int(p)).status() != "zombie"
    ]:
        assert time.monotonic() < deadline, f"orphans: {left}"
        time.sleep(0.05)


@pytest.mark.slow
def test_ranks_run_and_get_their_arguments_as_written(
    script: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # it would count more
    before = signal.getsignal(signal.SIGINT)
    assert launch([], 2, [*script, "print", "$$ ${local_rank}"], threads=3) == 0
    assert signal.getsignal(signal.SIGINT) is before
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [
        f"{rank} 2.0 3 $$ ${{local_rank}}" for rank in (0, 1)
    ]
    assert err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "code", "line"),
    [
        ("usage", 2, "weft: error: layout axis 'tq' is unknown\n"),
        ("killed", 1, "weft: error: rank 1 was killed by SIGKILL"),
        pytest.param(
            "stuck",
            1,
            "weft: error: rank 0 has not answered for 60 s: rank 1 waited for it (traceback in ",
            marks=pytest.mark.soak,
        ),
        (
            "stopped",
            1,
            "weft: error: rank 0 has not answered for 60 s and is stopped (SIGSTOP or a debugger): rank 1",
        ),
        pytest.param(
            "aborted",
            1,
            "weft: error: rank 0 is stopped (SIGSTOP or a debugger) and the others have given up waiting",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "bug",
            1,
            "weft: error: rank 1: ValueError: an oversight (traceback in ",
            marks=pytest.mark.soak,
        ),
    ],
)
@pytest.mark.sampled(2)
@both
def test_one_failing_rank_ends_all_with_one_line(
    tmp_path: Path, how: str, deed: str, code: int, line: str
) -> None:
    parent = launch_ranks(tmp_path, how, deed)
    _, err = parent.communicate(timeout=240)
    assert parent.returncode == code, err
    ready = max(path.stat().st_mtime for path in tmp_path.glob("pid-*"))
    assert time.time() - ready < 40, "they were not waited for until the limit of 60 s"
    assert err.startswith(line)
    assert err.count("\n") == 1
    if oom_kills() is not None:
        assert "out of memory" not in err
    if deed in ("bug", "stuck", "stopped"):
        log = Path(err.split("traceback in ")[1].rstrip(")\n"))
        assert ("with details" if deed == "bug" else "Timed out") in log.read_text()
        log.unlink()
    assert_gone(wait_for(tmp_path, "pid-*", 2))


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@both
def test_a_signal_lets_ranks_finish(
    tmp_path: Path, how: str, number: signal.Signals
) -> None:
    parent = launch_ranks(tmp_path, how, "wait")
    pids = wait_for(tmp_path, "pid-*", 2)
    same = psutil.Process(parent.pid).cmdline() == parent.ranks()[0].cmdline()
    assert same == (how == "forks")
    parent.send_signal(number)
    _, err = parent.communicate(timeout=120)
    assert (parent.returncode, err) == (128 + number, "")
    assert wait_for(tmp_path, "saved-*", 2) == [number.name] * 2
    assert_gone(pids)


@pytest.mark.slow
@both
def test_a_repeated_signal_is_one_wish_and_a_later_one_ends_ranks_at_once(
    tmp_path: Path, how: str
) -> None:
    parent = launch_ranks(tmp_path, how, "stubborn")
    pids = wait_for(tmp_path, "pid-*", 2)
    for _ in range(2):
        parent.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert all(map(psutil.pid_exists, map(int, pids))) and parent.poll() is None
    time.sleep(signals.REPEAT_S)
    parent.send_signal(signal.SIGTERM)
    _, err = parent.communicate(timeout=120)
    assert (parent.returncode, err) == (
        130,
        "weft: ended at once, by another SIGTERM\n",
    )
    assert_gone(pids)


def test_a_rank_that_the_kernel_does_not_let_end_is_believed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said why it ends, but a thread of it waits for a dead disk: the launcher waited for it without a word."""
    monkeypatch.setattr("weft.run.launch.END_S", 0.3)
    path = tmp_path / "rank.py"
    path.write_text(
        textwrap.dedent("""
        import json, os, time
        failure = {"rank": 0, "message": "the disk does not answer", "exit_code": 1, "grade": 0, "when": time.time()}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"weft": failure}, file)
        time.sleep(30)
    """)
    )
    begun = time.monotonic()
    assert launch([], 1, [sys.executable, str(path)]) == 1
    assert time.monotonic() - begun < 60
    assert "weft: error: the disk does not answer" in capfd.readouterr().err


def test_when_one_rank_ends_with_an_error_after_ctrl_c_the_others_do_not_have_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose import has swallowed Ctrl-C would wait for those that are gone."""
    monkeypatch.setattr("weft.run.launch.AFTER_FAILURE_S", 0.5)
    monkeypatch.setattr("weft.run.launch.GRACE_S", 3600)
    deaf = f'trap "" INT; echo $$ > {tmp_path}/pid-0; while :; do sleep 0.1; done'
    ends = (
        f'trap "exit 130" INT; echo $$ > {tmp_path}/pid-1; while :; do sleep 0.1; done'
    )

    def interrupt() -> None:
        wait_for(tmp_path, "pid-*", 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert (
        launch(
            [], 2, ["/bin/sh", "-c", f"if [ $RANK = 0 ]; then {deaf}; else {ends}; fi"]
        )
        == 130
    )
    thread.join()
    assert_gone(wait_for(tmp_path, "pid-*", 2))


@pytest.mark.parametrize(
    ("own", "grace", "code"), [(0, 30.0, 0), (0, None, 143), (3, 30.0, 143)]
)
def test_a_signal_is_the_usual_end_of_what_serves(
    tmp_path: Path, own: int, grace: float | None, code: int
) -> None:
    """The exit code says whether all ranks have ended well, where ``grace`` is given."""
    ends = f'trap "exit $((RANK * {own}))" TERM; echo $$ > {tmp_path}/pid-$RANK; while :; do sleep 0.05; done'

    def stop() -> None:
        wait_for(tmp_path, "pid-*", 2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert launch([], 2, ["/bin/sh", "-c", ends], grace=grace) == code
    thread.join()


def test_ctrl_c_waits_until_a_rank_has_started() -> None:
    """Python would print a traceback if it came while the interpreter starts."""
    words = [sys.executable, "-m", "weft", "recipes"]
    # the launcher says that it was interrupted
    env = os.environ | {"WEFT_LAUNCHED": "1", "RANK": "0"}
    with signals.ctrl_c_held_back():
        process = subprocess.Popen(
            words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        process.send_signal(signal.SIGINT)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert (*process.communicate(timeout=240), process.returncode) == ("", "", 130)


def test_other_programs_get_ctrl_c_from_the_launcher_on() -> None:
    code = "import signal, sys; sys.exit(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    assert launch([], 1, [sys.executable, "-c", code]) == 0


def test_after_a_swallowed_ctrl_c_no_rank_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals.requests, "asked", signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch([], 1, ["/bin/sh", "-c", f"echo > {tmp_path}/started"])
    assert not list(tmp_path.iterdir())


def test_a_rank_that_cannot_be_killed_is_left_behind_and_named(
    script: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As one is that waits in the kernel for a disk that does not answer."""
    monkeypatch.setattr("weft.run.launch.END_S", 0.2)
    monkeypatch.setattr("weft.run.launch.KILLED_S", 0.2)
    monkeypatch.setattr(psutil.Popen, "kill", lambda process: None, raising=False)
    pid_0 = tmp_path / "pid-0"
    one = f"while ! [ -s {pid_0} ]; do sleep 0.05; done; exit 3"
    other = f'trap "" TERM; echo $$ > {pid_0}; while :; do sleep 1; done'
    assert (
        launch(
            [], 2, ["/bin/sh", "-c", f"if [ $RANK = 1 ]; then {one}; else {other}; fi"]
        )
        == 1
    )
    (pid,) = wait_for(tmp_path, "pid-*", 1)
    assert psutil.pid_exists(int(pid))
    os.kill(int(pid), signal.SIGKILL)
    assert (
        f"rank 0 (process {pid.strip()}) was killed, but the kernel has not ended it"
        in capfd.readouterr().err
    )


@pytest.mark.slow
@both
def test_killing_the_launcher_leaves_no_orphans(tmp_path: Path, how: str) -> None:
    parent = launch_ranks(tmp_path, how, "wait")
    pids = wait_for(tmp_path, "pid-*", 2)
    parent.kill()
    parent.communicate()
    assert_gone(pids)


@pytest.mark.soak
@both
def test_two_launches_do_not_meet(tmp_path: Path, how: str) -> None:
    ranks = {tmp_path / "a": 2, tmp_path / "b": 1}
    for folder in ranks:
        folder.mkdir()
    parents = [
        launch_ranks(folder, how, "meet", count) for folder, count in ranks.items()
    ]
    pids = [
        pid
        for folder, count in ranks.items()
        for pid in wait_for(folder, "pid-*", count)
    ]
    for parent in parents:
        parent.terminate()
    assert [parent.wait(120) for parent in parents] == [143, 143]
    assert_gone(pids)


def test_root_cause_is_the_error_that_explains_the_others() -> None:
    peer = Failure(0, "Connection closed by peer", 1, Grade.LOST, when=1.0)
    named = Failure(3, "rank 2 has not answered", 1, Grade.NAMED, when=6.0)
    bug = Failure(1, "KeyError: 'x'", 1, Grade.UNEXPECTED, when=3.0)
    wish = Failure(2, "no such file", 1, Grade.WEFT_ERROR, when=5.0)
    assert root_cause([peer, named], {}) == named
    assert root_cause([peer, bug, wish], {}) == wish
    assert root_cause([peer, bug], {2: (-signal.SIGTERM, 0.0)}) == bug
    killed = root_cause(
        [peer], {0: (1, 2.0), 1: (-signal.SIGKILL, 2.0), 2: (-signal.SIGTERM, 1.0)}
    )
    assert killed is not None
    assert killed.rank == 1
    assert root_cause([peer], {}) == peer
    assert root_cause([], {}) is None


@pytest.mark.parametrize(
    ("oom", "said"),
    [
        (True, ": out of memory; try a smaller train.micro_batch"),
        (False, ", but not by the kernel for want of memory"),
        (None, "; whether for want of memory the kernel does not say here"),
    ],
)
def test_out_of_memory_is_said_on_evidence(oom: bool | None, said: str) -> None:
    cause = root_cause([], {1: (-signal.SIGKILL, 2.0)}, oom)
    assert cause is not None
    assert (
        cause.message.removesuffix(' or train.recompute = "full"')
        == f"rank 1 was killed by SIGKILL{said}"
    )


def test_a_rank_that_was_stopped_is_not_called_gone(tmp_path: Path) -> None:
    """The launcher kills it, and others may miss it before the launcher has said why."""
    missed = Failure(0, "rank 1 is gone: rank 0 waited for it", 1, Grade.NAMED, 101.0)
    (tmp_path / "0.json").write_text(json.dumps({"weft": asdict(missed)}))
    cause = _cause(tmp_path, {}, {1: 100.0}, None)
    assert cause is not None and cause.message.startswith("rank 1 is stopped (SIGSTOP")


def test_kills_for_want_of_memory_are_counted(tmp_path: Path) -> None:
    """In the group of version 2, else of version 1, else of the machine, else not at all."""
    assert oom_kills(tmp_path) is None

    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/vmstat", "pgfault 12\noom_kill 4\nnuma_hit 3\n")
    assert oom_kills(tmp_path) == 4
    write("proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/a/b\n0::/c\n")
    assert oom_kills(tmp_path) == 4
    write(
        "sys/fs/cgroup/memory/a/b/memory.oom_control",
        "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
    )
    assert oom_kills(tmp_path) == 7
    write("proc/self/cgroup", "0::/c\n")
    write(
        "sys/fs/cgroup/c/memory.events", "low 0\noom 1\noom_kill 9\noom_group_kill 1\n"
    )
    assert oom_kills(tmp_path) == 9


def test_errors_of_other_ranks_are_secondary() -> None:
    gloo = RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4"
    )
    assert is_secondary(gloo)
    assert is_secondary(KeyboardInterrupt())
    assert not is_secondary(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_secondary(
        ValueError("gloo/ is in this text, but it is no runtime error")
    )
    # what gloo says of a second wait on a connection, once the first has ended
    assert is_secondary(RuntimeError("Application timeout caused pair closure"))
    assert not is_secondary(WeftError("Connection closed by peer"))


def test_report_outside_of_launch_prints_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in (
        "RANK",
        "WORLD_SIZE",
        "WEFT_LAUNCHED",
        "TORCHELASTIC_ERROR_FILE",
        "WEFT_DEBUG",
    ):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report_failure(UsageError("unknown key 'lr_rate'")) == 2
    assert capsys.readouterr().err == "weft: error: unknown key 'lr_rate'\n"
    assert (
        report_failure(PermissionError(errno.EACCES, "Permission denied", "dark/model"))
        == 1
    )
    said = "weft: error: dark/model: Permission denied; give this user access to it, or name another\n"
    assert capsys.readouterr().err == said
    with pytest.raises(OSError) as long:
        Path("a" * 300).stat()
    assert report_failure(long.value) == 1
    said = f"weft: error: {'a' * 300}: File name too long; name another\n"
    assert capsys.readouterr().err == said
    full = OSError(errno.ENOSPC, "No space left on device")
    assert report_failure(full) == 1
    assert capsys.readouterr().err.endswith("device; make room on its disk\n")
    with monkeypatch.context() as within:
        # as on a full disk
        within.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
        assert report_failure(ZeroDivisionError()) == 1
    said = "ZeroDivisionError (its traceback cannot be kept: No such file or directory; WEFT_DEBUG=1 prints it)\n"
    assert capsys.readouterr().err == f"weft: error: {said}"
    monkeypatch.setenv("WEFT_DEBUG", "1")
    assert report_failure(ZeroDivisionError()) == 1
    assert "weft: error: ZeroDivisionError (traceback in" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    assert report_failure(WeftError("disk full")) == 1
    record = json.loads((tmp_path / "error.json").read_text())
    assert record["message"]["message"] == record["weft"]["message"] == "disk full"
    assert record["weft"]["rank"] == 3


def slurm(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in textwrap.dedent(text).split())


def test_slurm_steps_are_ranks_and_batch_scripts_are_not() -> None:
    batch = slurm(
        "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=5 SLURM_JOB_NODELIST=gpu[007-009,12] SLURM_JOB_ID=123456"
    )
    assert slurm_ranks(batch) == {}
    step = batch | slurm(
        "SLURM_PROCID=4 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_STEP_NUM_TASKS=5"
    )
    step |= slurm(
        "SLURM_STEP_TASKS_PER_NODE=1(x1),2(x2) SLURM_STEP_NODELIST=gpu[007-009,12]-ib,old3"
    )
    assert slurm_ranks(step) == {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu007-ib",
        "MASTER_PORT": "23456",
    }
    assert slurm_ranks(step | {"SLURM_STEP_NODELIST": "a1,a2"})["MASTER_ADDR"] == "a1"
    assert slurm_ranks(step | {"SLURM_STEP_NUM_TASKS": "1"}) == {}


def test_torchrun_and_slurm_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(key, "")  # so that what in_ranks sets is undone
        monkeypatch.delenv(key)
    assert not in_ranks()
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert in_ranks()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    monkeypatch.delenv("SLURM_PROCID")
    assert in_ranks()
