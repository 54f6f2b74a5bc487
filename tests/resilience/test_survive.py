"""A run goes on when ranks are lost: the same losses, every step once, and no survivor ends."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.cases import recipe, write_corpus
from tests.resilience.survivors import HUNG, losses, ranks, recorded_once
from tests.resilience.trials import KINDS, OF_REPLICAS, WHOLE, trial
from weft.api import be_rank
from weft.checkpoint.run_state import Progress
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.net.lost import PeerLost
from weft.recipe import Recipe
from weft.resilience.life import Life, LifeMove
from weft.resilience.rank_guard import FROM_START, RankGuard
from weft.resilience.rank_life import LEAVE, RankParty
from weft.resilience.roster import ask_to_leave, read_roster
from weft.resilience.views import View
from weft.train.guard import Regroup
from weft.train.runs import Resumed
from weft.train.setup import prepare
from weft.train.training import train_job

STEPS = 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("survive"))


def job(corpus: str, layout: str, **change: Any) -> Recipe:
    settings = {
        # what is dropped follows the samples through every loss
        "model__dropout": 0.2,
        "train__steps": STEPS,
        "train__timeout": 60,
        "validation__every": 5,
        "validation__batches": 1,
    } | change
    return recipe(corpus, **settings).model_copy(
        update={"layout": Layout.parse(layout)}
    )


@pytest.fixture(scope="module")
def whole(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run of one rank that nobody disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train_job(prepare(job(corpus, "")), Mesh.single(), out)
    return losses(out)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "rank", "number"), [
    ("shard=2,tp=2", 2, signal.SIGKILL),
    # who leads the agreement, writes the records and holds the lease
    ("dp=2,pp=2", 0, signal.SIGKILL),
    ("shard=2,cp=2", 1, signal.SIGSTOP),
])  # fmt: skip
def test_a_lost_rank_costs_a_step_and_nothing_else(
    corpus: str,
    whole: dict[int, float],
    tmp_path: Path,
    layout: str,
    rank: int,
    number: int,
) -> None:
    out = tmp_path / "run"
    with ranks(job(corpus, layout), out) as run:
        run.step(4)
        run.signal(rank, number)
        run.end(lost=[rank])
        views = run.records("view")
    assert losses(out) == pytest.approx(whole, rel=1e-10)
    assert recorded_once(out) == list(range(1, STEPS + 1))
    assert [view["ranks"] for view in views] == [4, 3]
    assert [lost["number"] for lost in views[1]["lost"]] == [rank]


@pytest.mark.sampled(1)
@pytest.mark.slow(15)
@pytest.mark.parametrize(("layout", "gone", "made"), [
    ("dp=4", [1], []),
    # the sums over replicas, in the group of each place in a replica, and nothing within a replica
    ("dp=3,tp=2", [2, 3], ["mesh_dp 0 4"]),
])  # fmt: skip
def test_a_lost_replica_leaves_all_other_groups_and_the_model(
    corpus: str,
    whole: dict[int, float],
    tmp_path: Path,
    layout: str,
    gone: list[int],
    made: list[str],
) -> None:
    out = tmp_path / "run"
    with ranks(job(corpus, layout), out) as run:
        run.step(3)
        # as one loss, however long this process waits for its core: who is stopped agrees on no view between
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for rank in gone:
                run.signal(rank, number)
        run.end(lost=gone)
        views = run.records("view")
    assert losses(out) == pytest.approx(whole, rel=1e-10)
    assert recorded_once(out) == list(range(1, STEPS + 1))
    first, *later = views
    assert not first["edited"] and later[-1]["edited"]
    assert [key for key in later[-1]["groups_made"] if "dp" not in key] == []
    assert later[0]["groups_made"] == made, later


@pytest.mark.slow
def test_ranks_join_and_leave(corpus: str, tmp_path: Path) -> None:
    """Two ranks become four, three, by a file, and two, by a scheduler's signal; all that are left end well."""
    out, alone, steps = tmp_path / "run", tmp_path / "alone", 50
    train_job(
        prepare(job(corpus, "", train__steps=steps, validation__every=0)),
        Mesh.single(),
        alone,
    )
    with ranks(
        job(corpus, "dp=2", train__steps=steps, validation__every=0), out, (0.005,)
    ) as run:
        run.step(1)
        run.start(2)
        # one by one, if they start far apart
        run.wait_for(lambda: run.records("view")[-1]["ranks"] == 4)
        ask_to_leave(out, [0])
        run.wait_for(lambda: run.records("view")[-1]["ranks"] == 3)
        number = read_roster(out).members[-1].number
        run.signal(number, LEAVE)
        run.end()
        views = run.records("view")
    assert losses(out) == pytest.approx(losses(alone), rel=1e-10)
    assert recorded_once(out) == list(range(1, steps + 1))
    assert [view["ranks"] for view in views][-3:] == [4, 3, 2]
    assert views[-2]["lost"] == [{"number": 0, "rank": 0, "why": "left"}]


@pytest.mark.slow
def test_too_few_ranks_save_what_they_have(
    corpus: str, tmp_path: Path, whole: dict[int, float]
) -> None:
    """Below ``min_ranks`` the run ends with the reason; what it has saved from memory goes on under any layout."""
    out = tmp_path / "run"
    with ranks(job(corpus, "shard=2,tp=2", resilience__min_ranks=4), out) as run:
        run.step(4)
        run.signal(1, signal.SIGKILL)
        for rank in (0, 2, 3):
            run.processes[rank].join(HUNG)
        said = run.words()
    assert (
        "3 ranks are left, and resilience.min_ranks = 4; the state after step" in said
    )
    step = max(losses(out))
    train_job(prepare(job(corpus, "")), Mesh.single(), out, "auto")
    assert losses(out) == pytest.approx(whole, rel=1e-10) and step < STEPS


@pytest.mark.soak
@pytest.mark.sampled(1)
@pytest.mark.slow(20)
@pytest.mark.parametrize(
    "actions",
    ["rebalance", "leave-out", pytest.param("ladder", marks=pytest.mark.soak)],
)
def test_a_slow_rank_gets_less_to_do_or_is_left_out(
    corpus: str, tmp_path: Path, actions: str
) -> None:
    """A rank that takes three times as long: who stays, who has how many rows, and the losses of one device.

    The ladder gives a rank that takes twelve times as long less to do, and then leaves it out.
    """
    climbs = actions == "ladder"
    out, alone, steps = tmp_path / "run", tmp_path / "alone", 60 if climbs else 40
    change = {
        "train__steps": steps,
        "train__batch": 16,
        "train__micro_batch": 16,
        "validation__every": 0,
    }
    train_job(prepare(job(corpus, "", **change)), Mesh.single(), alone)
    with ranks(
        job(corpus, "dp=4", **change, resilience__actions=actions),
        out,
        (0.02, 0.02, 0.24 if climbs else 0.06, 0.02),
    ) as run:
        run.end(lost=[] if actions == "rebalance" else [2])
        views, rows = run.records("view"), [run.rows(rank) for rank in range(4)]
    assert losses(out) == pytest.approx(losses(alone), rel=1e-10)
    assert recorded_once(out) == list(range(1, steps + 1))
    assert len(views) > 1
    if climbs:
        assert [view["ranks"] for view in views][:2] == [4, 4] and len(views) > 2
    if actions != "rebalance":
        assert (views[-1]["ranks"], views[-1]["layout"]) == (3, "dp=3")
        assert [
            (gone["number"], gone["why"]) for view in views for gone in view["lost"]
        ] == [(2, "left")]
        return
    assert all(view["ranks"] == 4 and not view["lost"] for view in views)
    assert all(own[0] == 4 for own in rows)
    # By speeds of 3, 3, 1 and 3 of 10 its share is one or two rows of 16, which it has in one pass.
    assert rows[2][-1] <= 2 and all(
        sum(rows[2]) < 0.8 * sum(rows[rank]) for rank in (0, 1, 3)
    )


@pytest.mark.soak
def test_a_slow_stage_gets_fewer_layers(corpus: str, tmp_path: Path) -> None:
    """The first stage takes three times as long for a layer, and gets fewer; losses are those of one device.

    Layers that move have come before the steps stop: nothing but the copies of this rank is left to be moved.
    """
    out, alone = tmp_path / "run", tmp_path / "alone"
    change = {
        "train__steps": 36,
        "train__micro_batch": 1,
        "validation__every": 0,
        "model__layers": 12,
    }
    train_job(prepare(job(corpus, "", **change)), Mesh.single(), alone)
    wished = job(corpus, "pp=4", **change, resilience__actions="rebalance")
    with ranks(wished, out, layer_s=(0.03, 0.01, 0.01, 0.01)) as run:
        run.end()
        views = run.records("view")
    assert losses(out) == pytest.approx(losses(alone), rel=1e-10)
    assert recorded_once(out) == list(range(1, 37))
    assert len(views) > 1 and views[-1]["stage_speeds"][0] < 0.6
    assert views[1]["bytes_ahead"] > 0 == views[1]["bytes"], views[1]


@pytest.mark.soak
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name
)
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_a_rank_is_lost_while_layers_travel(
    corpus: str, tmp_path: Path, lost: int, number: signal.Signals
) -> None:
    """It sends them, receives them, or does neither: the others go on without it and without what has come."""
    out, alone = tmp_path / "run", tmp_path / "alone"
    change = {"train__steps": 24, "train__micro_batch": 1, "validation__every": 0, "model__layers": 12}  # fmt: skip
    train_job(prepare(job(corpus, "", **change)), Mesh.single(), alone)
    wished = job(corpus, "pp=4", **change, resilience__actions="rebalance")
    with ranks(wished, out, layer_s=(0.03, 0.01, 0.01, 0.01), ahead_s=0.2) as run:
        run.wait_for(Path(f"{out}.0.ahead").exists)
        run.signal(lost, number)
        run.end(lost=[lost])
        views = run.records("view")
    assert losses(out) == pytest.approx(losses(alone), rel=1e-10)
    assert recorded_once(out) == list(range(1, 25))
    assert [gone["number"] for view in views for gone in view["lost"]] == [lost]


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_faults_at_random_instants(
    corpus: str, tmp_path: Path, kind: str, seed: int
) -> None:
    """Whatever a rank does when it is lost: forward, a collective, saving, or recovering from another loss."""
    assert not trial(kind, 1000 + seed, corpus, tmp_path)["wrong"]


@pytest.mark.soak
@pytest.mark.parametrize("kind", (*KINDS, *OF_REPLICAS))
@pytest.mark.parametrize("seed", range(10))
def test_faults_of_whole_replicas(
    corpus: str, tmp_path: Path, kind: str, seed: int
) -> None:
    """Groups and models are edited, under dropout and adapters, while ranks are lost, frozen, or come back."""
    assert not trial(kind, 3000 + seed, corpus, tmp_path, WHOLE)["wrong"]


@pytest.mark.parametrize("layout", ["dp=2,shard=2", "island=4"])
def test_too_few_started_ranks_are_refused_before_they_wait(
    corpus: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UsageError,
        match=r"has 4 places but 2 ranks were started; start 4 ranks or change --layout",
    ):
        be_rank(job(corpus, layout), None, None, lambda *given: None)


@pytest.mark.parametrize(
    ("why", "called", "error"),
    [("rank 1 is gone", False, PeerLost), ("", True, Regroup)],
)
def test_a_rank_without_a_place_comes_when_the_others_agree(
    corpus: str, why: str, called: bool, error: type[Exception]
) -> None:
    """They wait for it before they let anybody in, and it sees nothing of the steps after which they do so."""
    party = RankParty(RankGuard(job(corpus, ""), None, None, [], Life(LifeMove.STAY)))
    looks = iter([False, called])
    agent = type("Agent", (), {"why": why, "called": property(lambda _: next(looks))})
    party.membership = cast(Any, agent())
    with pytest.raises(error):
        party.wait_for_place()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_run_that_begins_again_says_so(
    corpus: str, later: bool, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rank and its buddy are lost together, and there is no checkpoint yet."""
    monkeypatch.setattr(
        "weft.train.guard.resume_run", lambda *given: Resumed(Progress(), ["resumed"])
    )
    guard = RankGuard(job(corpus, ""), None, None, [], Life(LifeMove.STAY))
    guard.view = cast(View, SimpleNamespace(first=not later))
    given = cast(Any, SimpleNamespace(fresh=fresh, folder=Path()))
    notes = guard.fill(given, cast(Any, None), cast(Any, None), cast(Any, None)).notes
    assert notes == ["resumed", *([FROM_START] if later and fresh else [])]
