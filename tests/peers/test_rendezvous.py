"""Islands that meet over peers: no port is mapped by hand, and the loss of an island costs nobody else a step."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.cases import write_corpus
from tests.measured import eventually
from tests.peers.conftest import RunningRelay
from weft.errors import UsageError
from weft.observe.run_metrics import read_metrics
from weft.peers.rendezvous import meet_over_peers

pytest.importorskip("iroh")
ROOT = Path(__file__).parents[2]
STEPS = 40


@contextmanager
def islands(
    relay: RunningRelay, folder: Path, count: int
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start a process for each island, with nothing but the invitation and the name of the first one's peer."""
    corpus = write_corpus(folder)
    settings = ["model.layers=1", "model.embed=16", "data.seq_len=32", "train.batch=6", f"train.steps={STEPS}",
                "validation.every=0", "checkpoint.every=0", "observe.split_every=0", "sync.every=2",
                "sync.order=numbered", f'data.sources=[{{kind="jsonl", path="{corpus}"}}]', f"data.cache={folder}",
                "data.tokenizer=bytes", "train.threads=1", "train.timeout=60", "resilience.detect=3"]  # fmt: skip
    words = [sys.executable, "-m", "weft", "train", str(ROOT / "recipes/quickstart.toml"), "--layout",
             f"island={count}", "--out", str(folder / "run")]  # fmt: skip
    words += [word for setting in settings for word in ("--set", setting)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {
        "WEFT_INVITATION": str(relay.invitation), "MASTER_ADDR": "peer://home", "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
    }  # fmt: skip
    with ExitStack() as stack:
        started = []
        for rank in range(count):
            said = stack.enter_context((folder / f"said-{rank}").open("w"))
            started.append(
                subprocess.Popen(
                    words,
                    env=os.environ | given | {"RANK": str(rank)},
                    stdout=said,
                    stderr=said,
                    text=True,
                )
            )
        try:
            yield started
        finally:
            for process in started:
                process.kill()
                process.wait()


def step_of(run: Path) -> int:
    """The last step in a run's records."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if '"train"' in line]
    return max((record.get("step", 0) for record in records), default=0)


@pytest.mark.soak
def test_an_island_that_is_lost_over_peers_costs_nobody_else_a_step(
    relay: RunningRelay, tmp_path: Path
) -> None:
    with islands(relay, tmp_path, 3) as started:
        lost = tmp_path / "run/island-2"
        eventually(lambda: step_of(lost) >= 4, 120)
        started[2].send_signal(signal.SIGKILL)
        said = lambda rank: (tmp_path / f"said-{rank}").read_text()  # noqa: E731
        for rank in (0, 1):
            assert started[rank].wait(120) == 0, said(rank)
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records["train"]] == list(range(1, STEPS + 1))
    assert [one["island"] for r in records["islands"] for one in r["lost"]] == [2]
    with (tmp_path / "run/ranks/members.json").open() as file:
        hosts = {member["host"] for member in json.load(file)["members"]}
    assert len(hosts) == 2 and all(host.startswith("peer:") for host in hosts)


def test_a_meeting_without_a_name_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "peer://")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="peer://NAME, with the same name"):
        meet_over_peers()
