"""A rank that stops, in whatever group, ends the run within the recipe's timeout and is named; nothing is left."""

from __future__ import annotations

import re
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.cases import recipe, start, write_corpus
from tests.started import Started
from weft.layout.layout import Layout
from weft.net.groups import limit
from weft.net.lost import PeerLost, peer_lost
from weft.train.step import train_step

ROOT = Path(__file__).parents[2]
TIMEOUT = 12

#: Layouts with groups of every kind that is made.
LAYOUTS = (
    "dp=2,shard=2,zero=1", "shard=4,secondary=2", "shard=2,tp=2", "cp=4,ulysses=2", "cp=2,context=ulysses,dp=2",
    "dp=2,shard=2,zero=1,balance=greedy", "pp=2,dp=2,schedule=dualpipe", "pp=2,tp=2,vocab_barriers=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def limits(values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The limit of the default group, and by description those of all groups that a step has left."""
    job = start(values)
    batches = job.loader.step(0)
    assert batches is not None
    train_step(job.model, job.state, batches, job.mesh, lr=1e-3, clip=1.0)
    groups = dist.distributed_c10d._world.pg_map
    return limit(), {
        g.group_desc: g._get_backend(torch.device("cpu")).options._timeout
        for g in groups
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_group_waits_longer_than_the_default_one(
    pool: Any, corpus: str, layout: str
) -> None:
    change = {"model__tied": True, "model__layers": 4, "train__micro_batch": 1}
    values = (
        recipe(corpus, **change)
        .model_copy(update={"layout": Layout.parse(layout)})
        .model_dump(mode="json")
    )
    for given, found in pool.run(4, limits, values, timeout=120):
        assert given == timedelta(seconds=130)  # what the pool gives its default group
        assert len(found) > 1 and set(found.values()) == {given}, found


def test_groups_are_made_in_one_place() -> None:
    made = re.compile(
        r"\b(new_group|new_subgroups|init_device_mesh|DeviceMesh)\(|split_group|\._flatten\("
    )
    for path in (ROOT / "weft").rglob("*.py"):
        calls = [line for line in path.read_text().splitlines() if made.search(line)]
        own = [line for line in calls if not re.search(r"(def|=|:) new_group\(", line)]
        assert path.name == "groups.py" or not own, (
            f"{path}: {own}; use weft.net.groups"
        )


def waiting(seconds: float) -> str:
    """What each of four ranks says while rank 1 sleeps: 0 needs it, 2 and 3 need 0 and are the first to give up."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1], timedelta(seconds=2))
    others = dist.new_group([0, 2, 3], timedelta(seconds=1))
    if rank == 1:
        time.sleep(seconds)
        return ""
    try:
        dist.all_reduce(torch.ones(1), group=others if rank else pair)
    except RuntimeError as error:
        found = peer_lost(error, seconds=9)
        time.sleep(1)  # the others still look who has given up
        return str(found)
    raise AssertionError("a collective without one of its ranks has ended")


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_by_those_that_wait_for_others(
    pool: Any,
) -> None:
    found = pool.run(4, waiting, 5.0)
    for rank in (0, 2, 3):
        assert (
            found[rank] == f"rank 1 has not answered for 9 s: rank {rank} waited for it"
        ), found


def test_peer_lost_is_told_from_other_errors() -> None:
    from weft.run.failure import is_secondary

    assert is_secondary(PeerLost("rank 1 is gone"))


def small(folder: Path, layout: str, *more: str) -> list[str]:
    """Words of ``weft`` that train a tiny model, whose ranks end with each other."""
    values = (
        "model.layers=4", "model.embed=16", "model.heads=4", "model.kv_heads=2", "model.head_dim=4", "model.ffn=21",
        "data.seq_len=16", f"data.sources=[{{kind='jsonl',path='{write_corpus(folder)}'}}]", "data.tokenizer='bytes'",
        f"data.cache='{folder}/cache'", "train.batch=8", "train.micro_batch=1", "observe.split_every=0",
        "observe.trackers=[]", "validation.every=0", "generate.tokens=1", f"train.timeout={TIMEOUT}",
        "resilience.survive=false", *more,
    )  # fmt: skip
    return [
        "train",
        str(ROOT / "recipes/quickstart.toml"),
        "--layout",
        layout,
        "--out",
        str(folder / "run"),
        *(word for value in values for word in ("--set", value)),
    ]


def freeze(folder: Path, layout: str, victim: int) -> None:
    folder.mkdir(exist_ok=True)
    command = small(folder, layout, "train.steps=1000000", "checkpoint.every=5")
    said, metrics = folder / "stderr", folder / "run/metrics.jsonl"
    with said.open("w") as stderr:
        parent = Started(*command, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)
    deadline = time.monotonic() + 300
    while parent.poll() is None and not (
        metrics.exists() and metrics.read_text().count('"train"') > 3
    ):
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.2)
    assert parent.poll() is None, said.read_text()
    everyone = psutil.Process(parent.pid).children(recursive=True)
    parent.ranks()[victim].suspend()
    begun = time.monotonic()
    parent.wait(10 * TIMEOUT)
    took, err = time.monotonic() - begun, said.read_text()
    print(f"{layout}, rank {victim}: {took:.0f} s; {err}")
    assert parent.returncode == 1
    assert (
        f"rank {victim} has not answered for {TIMEOUT} s and is stopped" in err
        and err.count("\n") == 1
    ), err
    assert TIMEOUT - 5 < took < TIMEOUT + 60
    deadline = time.monotonic() + 60
    while left := [p for p in everyone if lives(p)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.soak
@pytest.mark.slow(30)
@pytest.mark.parametrize(
    ("layout", "victim"),
    [("shard=2", 1), pytest.param("pp=2", 0, marks=pytest.mark.soak)],
)
def test_a_stopped_rank_ends_the_run_and_is_named(
    tmp_path: Path, layout: str, victim: int
) -> None:
    freeze(tmp_path, layout, victim)


@pytest.mark.soak
@pytest.mark.parametrize(
    "layout",
    [
        "shard=2,tp=2",
        "dp=2,shard=2,zero=1",
        "cp=4,ulysses=2",
        "pp=2,dp=2",
        "pp=2,tp=2,schedule=zb-v",
        "pp=4",
    ],
)
def test_any_stopped_rank_of_any_layout(tmp_path: Path, layout: str) -> None:
    for victim in range(Layout.parse(layout).world):
        freeze(tmp_path / str(victim), layout, victim)
