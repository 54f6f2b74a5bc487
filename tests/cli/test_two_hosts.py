"""More than one machine: the README's torchrun command on two emulated hosts, stopped and resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hosts
from weft.errors import WeftError
from weft.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
SMALL = [
    "train.steps=12",
    "model.embed=64",
    "data.seq_len=64",
    "validation.every=0",
    "observe.split_every=0",
    "checkpoint.every=100",
]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hosts.available(), reason="needs root and network namespaces")]


def torchrun(prefix: list[str], host: int, out: Path, port: int) -> subprocess.Popen[str]:
    words = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
             f"--node-rank={host}", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.ADDRESSES[0]}:{port}",
             f"--rdzv-conf=is_host={1 - host}", f"--local-addr={hosts.ADDRESSES[host]}",
             "-m", "weft", "train", str(ROOT / "recipes/quickstart.toml"), "--out", str(out), "--resume", "auto",
             *(w for s in SMALL for w in ("--set", s))]  # fmt: skip
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=out.parent)


def losses(run: Path) -> dict[int, float]:
    try:
        return {r["step"]: r["loss"] for r in read_metrics(run).get("train", [])}
    except WeftError:  # nothing written yet
        return {}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that must not outlive the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def test_two_hosts_train_stop_resume_like_one(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    one = [sys.executable, "-m", "weft", "train", str(ROOT / "recipes/quickstart.toml"), "--out", str(tmp_path / "one")]
    subprocess.run([*one, *(w for s in SMALL for w in ("--set", s))], check=True, capture_output=True, timeout=240)

    run = tmp_path / "two"
    with hosts.two_hosts() as prefixes:
        first = [torchrun(prefix, i, run, 29501) for i, prefix in enumerate(prefixes)]
        started += first
        until = time.monotonic() + 180
        while len(losses(run)) < 4 and time.monotonic() < until and first[0].poll() is None:
            time.sleep(0.05)
        first[0].send_signal(signal.SIGTERM)  # one host is told to stop; both save and stop
        said = [p.communicate(timeout=120)[0] for p in first]
        stopped = len(losses(run))
        assert 4 <= stopped < 12, said
        assert f"step-{stopped:06d}" in {p.name for p in (run / "checkpoints").iterdir()}, said

        second = [torchrun(prefix, i, run, 29502) for i, prefix in enumerate(prefixes)]
        started += second
        said = [p.communicate(timeout=240)[0] for p in second]
        assert [p.returncode for p in second] == [0, 0], said
        assert f"resumed from {run}/checkpoints/step-{stopped:06d}" in said[0]
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert list(losses(run)) == list(range(1, 13))
