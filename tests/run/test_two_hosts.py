"""More than one machine: the README's command on two emulated hosts, stopped and resumed.

Every day its ranks are processes with the variables that torchrun sets; ``make soak`` runs torchrun itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, hosts, unavailable

from tests.cases import write_corpus
from tests.conftest import Command
from tests.started import Started
from weft.errors import WeftError
from weft.observe.run_metrics import read_metrics

ROOT = Path(__file__).parents[2]
SMALL = [
    "train.steps=12",
    "model.layers=2",
    "model.embed=48",
    "data.seq_len=32",
    "train.batch=8",
    "validation.every=0",
    "observe.split_every=0",
    "checkpoint.every=100",
    "generate.tokens=1",
    "data.tokenizer=bytes",
]

pytestmark = [
    pytest.mark.slow(40),
    pytest.mark.skipif(bool(why := unavailable()), reason=why),
]


def settings(corpus: str) -> list[str]:
    """The words of a small run."""
    data = [
        f"data.sources=[{{kind='jsonl',path='{corpus}'}}]",
        f"data.cache='{corpus}.cache'",
    ]
    return [word for setting in (*SMALL, *data) for word in ("--set", setting)]


def on_host(name: str, *words: str) -> None:
    """Be ``weft`` on this host."""
    from weft import __main__

    Host(name, "", "", "").enter()
    sys.argv = [__main__.__file__, *words]
    __main__.main()


def as_torchrun(
    on: tuple[Host, ...], host: int, out: Path, port: int, small: list[str]
) -> Started:
    """The rank of one host, of which each has one."""
    env = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "RANK": str(host),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": on[0].address,
        "MASTER_PORT": str(port),
    }
    words = ["train", str(ROOT / "recipes/quickstart.toml"), "--out", str(out)]
    more = ["--resume", "auto", "--layout", "dp=2", *small]
    return Started(
        on[host].name,
        *words,
        *more,
        cwd=out.parent,
        env=env,
        stderr=subprocess.STDOUT,
        main=on_host,
    )


def torchrun(
    on: tuple[Host, ...], host: int, out: Path, port: int, each: int, small: list[str]
) -> subprocess.Popen[str]:
    """The ranks of one host, ``each`` as many."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={each}",
             f"--node-rank={host}", "--rdzv-backend=c10d", f"--rdzv-endpoint={on[0].address}:{port}",
             f"--rdzv-conf=is_host={1 - host}", f"--local-addr={on[host].address}",
             "-m", "weft", "train", str(ROOT / "recipes/quickstart.toml"), "--out", str(out), "--resume", "auto",
             *(["--layout", "dp=2"] if each == 1 else []),
             *small]  # fmt: skip
    return subprocess.Popen(
        on[host].command(words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=out.parent,
    )


def losses(run: Path) -> dict[int, float]:
    try:
        return {r["step"]: r["loss"] for r in read_metrics(run).get("train", [])}
    except WeftError:  # nothing written yet
        return {}


@pytest.fixture
def started() -> Iterator[list[Any]]:
    """Processes that must not outlive the test."""
    processes = list[Any]()
    yield processes
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(120)


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_two_hosts_train_stop_resume_like_one(
    tmp_path: Path, started: list[Any], launched: Command, each: int
) -> None:
    """So many ranks on each host, after the stop one on each, or (every day) one alone; and one from the beginning."""
    small = settings(write_corpus(tmp_path))
    code, _, err = launched(
        "train", ROOT / "recipes/quickstart.toml", "--out", tmp_path / "one", *small
    )
    assert code == 0, err

    run = tmp_path / "two"
    with hosts(2, rate="1gbit") as two:
        first: list[Any] = [
            as_torchrun(two, i, run, 29501, small)
            if each == 1
            else torchrun(two, i, run, 29501, each, small)
            for i in range(2)
        ]
        started += first
        until = time.monotonic() + 300
        while (
            len(losses(run)) < 4
            and time.monotonic() < until
            and first[0].poll() is None
        ):
            time.sleep(0.05)
        # one host is told to stop; both save and stop
        first[0].send_signal(signal.SIGTERM)
        said = [p.communicate(timeout=300)[0] for p in first]
        stopped = len(losses(run))
        assert 4 <= stopped < 12, said
        assert f"step-{stopped:06d}" in {
            p.name for p in (run / "checkpoints").iterdir()
        }, said

        if each > 1:
            second = [torchrun(two, i, run, 29502, 1, small) for i in range(2)]
            started += second
            said = [p.communicate(timeout=400)[0] for p in second]
            assert [p.returncode for p in second] == [0, 0], said
    if each == 1:
        quickstart = ROOT / "recipes/quickstart.toml"
        code, out, err = launched(
            "train",
            quickstart,
            "--out",
            run,
            "--resume",
            "auto",
            "--layout",
            "",
            *small,
        )
        assert code == 0, err
        said = [out]
    assert f"resumed from {run}/checkpoints/step-{stopped:06d}" in said[0]
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert list(losses(run)) == list(range(1, 13))
