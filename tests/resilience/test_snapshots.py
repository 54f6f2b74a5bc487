"""What ranks keep of each other: who keeps it, that it is whole or does not count, and that nobody waits in vain."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cases import recipe, start, write_corpus
from tests.resilience.rejoin import fill, said, wrong
from weft.checkpoint.run_state import Progress
from weft.layout.dims import Tensor
from weft.layout.mesh import from_all
from weft.net.endpoint import process_endpoint
from weft.net.lost import PeerLost
from weft.resilience.recover import FACT, newest_recovery, restore
from weft.resilience.snapshots import Snapshots, buddies, segments_of, why_none

A, B, C = "a", "b", "c"


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ([A], [0]),
        ([A, A, A, A], [1, 2, 3, 0]),
        ([A, A, B, B], [2, 3, 0, 1]),
        ([A, B, A, B], [1, 0, 3, 2]),
        ([A, A, B, B, C, C], [2, 3, 4, 5, 0, 1]),
        ([A, A, A, B], [3, 3, 3, 0]),
    ],
)
def test_who_keeps_whose_part(machines: list[str], expected: list[int]) -> None:
    assert buddies(machines) == expected


def test_nobody_keeps_a_part_that_is_about_to_leave() -> None:
    assert buddies([A] * 4, leaving={1, 2}) == [3, 3, 3, 0]
    assert buddies([A, A, B, B], leaving={2}) == [3, 3, 0, 1]


def test_what_is_on_another_machine_already_is_not_sent() -> None:
    whole, half, rest = ((0, 8),), ((0, 4),), ((4, 8),)
    about = Tensor((8,), "F32")

    def table(box: Any) -> Any:
        return {
            "w": (about, box, False),
            "norm": (about, whole, False),
            "frozen": (about, whole, True),
        }

    tables = [table(half), table(rest), table(half), table(rest)]

    def senders(
        machines: list[str], leaving: tuple[int, ...] = ()
    ) -> dict[tuple[bool, tuple[int, ...]], int]:
        return {
            (s.fixed, s.holders): s.sender
            for s in segments_of(tables, machines, leaving)
        }

    everyone = (0, 1, 2, 3)
    nobody = {
        (False, (0, 2)): -1,
        (False, (1, 3)): -1,
        (False, everyone): -1,
        (True, everyone): -1,
    }
    assert senders([A, A, A, A]) == senders([A, A, B, B]) == nobody
    assert senders([A, B, A, B]) == nobody | {(False, (0, 2)): 0, (False, (1, 3)): 1}
    assert senders([A] * 4, leaving=(1, 3)) == nobody | {(False, (1, 3)): 1}


def keeps_two(tree: dict[str, Any]) -> None:
    """Two whole copies at most are here; one that is not whole at the buddy sends all back to the one before."""
    job = start(tree)
    mine = Snapshots(
        job.state, ["here"] * 4, process_endpoint("127.0.0.1"), "token", every=2
    )
    for step in range(7):  # the first, and then every second
        fill(job.state.tensors(), step)
        mine.begin(Progress(step=step, updates=step))
        mine.complete()
    if job.mesh.batch_rank == 1:  # the others are not so far when the view breaks
        fill(job.state.tensors(), 8)
        mine.begin(Progress(step=8, updates=8))
        mine.complete()
    from_all(None)
    facts = from_all(said([mine]))
    steps = [
        {(one["owner"], one["step"]) for one in fact[FACT][0]["copies"]}
        for fact in facts
    ]
    me = job.mesh.batch_rank
    assert steps[me] >= {(me, 6), ((me - 1) % 4, 6)} and (me, 2) not in steps[me]
    recovery = newest_recovery(facts)
    assert recovery is not None and recovery.progress.step == 6
    restore(recovery, [mine], job.state)
    assert not wrong(job.state.tensors(), 6)


def test_a_copy_that_not_all_have_does_not_count(pool: Any, tmp_path: Path) -> None:
    pool.run(
        4,
        keeps_two,
        recipe(write_corpus(tmp_path), layout__shard=4).model_dump(mode="json"),
    )


def loses_buddy(tree: dict[str, Any], how: str) -> str:
    """What rank 0 says when its buddy, rank 1, is gone or does nothing; the seconds until then."""
    job = start(tree)
    rank = job.mesh.batch_rank
    # who is gone itself waits for nothing
    short = how == "is frozen" or (how == "is gone" and rank == 1)
    mine = Snapshots(
        job.state,
        ["here"] * 2,
        process_endpoint("127.0.0.1"),
        "token",
        limit=1 if short else 60,
    )
    if rank == 1 and how == "is gone":
        mine.stop()
    if rank == 1 and how != "is gone":
        mine._keep = lambda sender, head: time.sleep(30) or False  # type: ignore[method-assign]
    from_all(None)
    begun = time.monotonic()
    if how == "is given up":
        threading.Timer(0.5, mine.break_off).start()
    try:
        mine.begin(Progress(step=1))
        mine.complete()
    except PeerLost as error:
        assert time.monotonic() - begun < 40
        return str(error)
    finally:
        if how != "is given up":
            from_all(None)
        mine.stop()
    return ""


BROKEN = "ended|reset|refused|Broken pipe"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "said"),
    [("is gone", BROKEN), ("is frozen", "answered"), ("is given up", BROKEN)],
)
def test_nobody_waits_for_a_lost_buddy(
    pool: Any, tmp_path: Path, how: str, said: str
) -> None:
    tree = recipe(write_corpus(tmp_path), layout__shard=2).model_dump(mode="json")
    first, _ = pool.run(2, loses_buddy, tree, how)
    assert first.startswith("rank 1 has not kept the state of rank 0")
    assert any(word in first for word in said.split("|")), first


def disagree(tree: dict[str, Any], odd: list[int]) -> tuple[Any, ...]:
    """Replicas of which some have another state: what all go back to, and who is named."""
    job = start(tree)
    mine = Snapshots(
        job.state,
        ["here"] * job.mesh.layout.world,
        process_endpoint("127.0.0.1"),
        "token",
    )
    for step in (1, 2):
        fill(job.state.tensors(), step)
        if step == 2 and job.mesh.batch_rank in odd:
            next(iter(job.state.tensors().values())).values.view(-1)[0] += 1e-9
        mine.begin(Progress(step=step))
        mine.complete()
    from_all(None)
    recovery = newest_recovery(from_all(json.loads(json.dumps(said([mine])))))
    assert recovery is not None
    restore(recovery, [mine], job.state)
    assert not wrong(job.state.tensors(), recovery.progress.step)
    return recovery.progress.step, recovery.differing, str(recovery)


def test_a_replica_with_another_state_is_named_and_not_used(
    pool: Any, tmp_path: Path
) -> None:
    tree = recipe(write_corpus(tmp_path), layout__dp=4).model_dump(mode="json")
    text = "back to step 2; rank 2 has another state than the others"
    assert set(pool.run(4, disagree, tree, [2])) == {(2, (2,), text)}
    # Two against two: nobody can tell which is right, but of the step before all say the same.
    assert set(pool.run(4, disagree, tree, [0, 1])) == {(1, (), "back to step 1")}


def test_nothing_is_held_of_two_that_are_lost() -> None:
    copy = {"step": 4, "progress": {"step": 4}, "digests": {"0": "x"}}
    one = {"epoch": 0, "rank": 0, "world": 2, "segments": [[0], [1]]}
    both = copy | {"digests": {"1": "y"}}
    assert newest_recovery([{FACT: [one | {"copies": [copy | {"owner": 0}]}]}]) is None
    found = newest_recovery(
        [{FACT: [one | {"copies": [copy | {"owner": 0}, both | {"owner": 1}]}]}]
    )
    assert (
        found is not None
        and found.helpers == ((0, 1),)
        and "what rank 1 had is in the memory of the present rank 0" in str(found)
    )
    assert newest_recovery([{}, {}]) is None


def moved_experts(tree: dict[str, Any]) -> int:
    """Experts that are not where their boxes say come back, too; how many tensors there were of such."""
    job = start(tree)
    mine = Snapshots(job.state, ["here"] * 4, process_endpoint("127.0.0.1"), "token")
    rows = {0: (3, 0), 1: (1, 2), 2: (6, 5), 3: (4, 7)}[job.mesh.batch_rank]
    experts = [h for h in job.state.held if h.logical.cut_by("ep")]
    for h in experts:
        h.rows = rows
        h.slots = {
            name: part.__class__(**(vars(part) | {"rows": rows}))
            for name, part in h.slots.items()
        }
    fill(job.state.parts(), 1)
    mine.begin(Progress(step=1))
    mine.complete()
    from_all(None)
    facts = from_all(said([mine]))
    job = start(tree)  # where all are at home
    recovery = newest_recovery(facts)
    assert recovery is not None
    restore(recovery, [mine], job.state)
    assert not wrong(job.state.tensors(), 1)
    return len(experts)


def test_experts_that_have_moved(pool: Any, tmp_path: Path) -> None:
    change = {
        "model__experts": 8,
        "model__expert_ffn": 9,
        "layout__shard": 4,
        "layout__ep": 4,
    }
    tree = recipe(
        write_corpus(tmp_path), layout__placement="moving", **change
    ).model_dump(mode="json")
    assert min(pool.run(4, moved_experts, tree)) > 0


def test_what_rests_in_files_has_no_copies(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    assert (
        why_none(recipe(corpus))
        == why_none(recipe(corpus, memory__weights="host"))
        == ""
    )
    assert "memory.moments = 'file'" in why_none(recipe(corpus, memory__moments="file"))
