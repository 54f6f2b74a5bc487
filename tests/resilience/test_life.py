"""Lives of ranks from view to view, under losses that hypothesis draws: no process, no socket, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.resilience.test_agreement import World
from weft.checkpoint.run_state import Progress
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.net.lost import PeerLost
from weft.plugins import PluginError
from weft.resilience.agreement import Agreement
from weft.resilience.life import ALONE, ATTEMPTS, ENDED, Life, LifeMove, ViewEntry, live
from weft.resilience.recover import FACT, newest_recovery
from weft.resilience.slow_ranks import SlowRanks
from weft.resilience.views import Address, Fatal, LeftOut, Lost, Member, TooFew, View
from weft.train.guard import Regroup

LAST = 10
CLOSED = "the connection is closed"
MEMBERS = (Member(0, "127.0.0.1", 1, "", 1, 0.0), Member(1, "127.0.0.1", 2, "", 2, 0.0))
FINE = ViewEntry()
VIEW = View(2, MEMBERS[:1], ({},), (), {})


@dataclass
class Rank:
    """A rank that holds all of the state; ``held``: what it says of its copies, those of the present view last."""

    node: Agreement
    life: Life
    step: int = 0
    held: list[dict[str, Any]] = field(default_factory=list)

    def enter(self, view: View) -> None:
        ranks = list(range(len(view.members)))
        own = view.members.index(self.node.me)
        self.held.append(
            {
                "epoch": view.epoch,
                "rank": own,
                "world": len(ranks),
                "segments": [ranks],
                "copies": [],
            }
        )

    def copy(self, step: int) -> None:
        copies = self.held[-1]["copies"]
        if all(copy["step"] != step for copy in copies):
            about = {"owner": self.held[-1]["rank"], "progress": asdict(Progress(step))}
            self.held[-1]["copies"] = [
                *copies[-1:],
                about | {"step": step, "digests": {"0": f"of {step}"}},
            ]


class Lives(World):
    """Ranks that train: a step is done when all members of a view have come to it, each with a copy of the state."""

    def __init__(self, members: int, seed: int) -> None:
        self.ranks: dict[Address, Rank] = {}
        super().__init__(members, seed)
        for rank in self.ranks.values():
            assert rank.node.seen is not None
            rank.enter(rank.node.seen)

    def add(self, number: int) -> Agreement:
        node = super().add(number)
        self.ranks[node.me.address] = Rank(
            node, Life(LifeMove.AGREE if number < 0 else LifeMove.STAY)
        )
        return node

    def step(self, node: Agreement) -> None:
        node.step()
        self.check()

    def want(self) -> None:
        for node in self.living():
            if self.random.random() < 0.3:
                self.move(self.ranks[node.me.address])

    def move(self, rank: Rank) -> None:
        """What one rank does next, as :func:`live` would have it, but without waiting."""
        node, life = rank.node, rank.life
        if life.move is LifeMove.JOIN:
            rank.held = []
            node.start_over(
                [address for address in self.nodes if address != node.me.address]
            )
            life.regroup()
        elif life.move is LifeMove.AGREE:
            if node._facts is None and node.outcome is None:
                node.want({FACT: rank.held, "step": rank.step}, 1e9)
            elif isinstance(node.outcome, View):
                self.take(rank, node.outcome)
            elif node.outcome is not None:
                error = node.take()
                assert isinstance(error, LeftOut | TooFew | Fatal)
                life.refuse(error)
        elif life.move is LifeMove.STAY and node.census.why:
            assert not life.fail(PeerLost(CLOSED), True, rank.step)
        elif life.move is LifeMove.STAY and node.census.called:
            life.regroup()
        elif life.move is LifeMove.STAY:
            self.train(rank)

    def take(self, rank: Rank, view: View) -> None:
        rank.node.take()
        recovery = newest_recovery(view.facts)
        # when they agreed, as a rank that was stopped may hear of a view that the others have left long ago
        steps = [said["step"] for said in view.facts if said[FACT]]
        rank.step = recovery.progress.step if recovery else 0
        assert rank.step >= max(steps, default=0) - 1, "a step is lost that was done"
        rank.enter(view)
        rank.life.enter(view, ViewEntry())

    def train(self, rank: Rank) -> None:
        view = rank.node.seen
        assert view is not None
        group = [self.ranks[member.address] for member in view.members]
        here = {node.me.address for node in self.living()}
        for other in group:
            there = (
                other.node.me.address in here
                and other.life.move is LifeMove.STAY
                and other.node.seen is not None
            )
            if (
                not there
                or other.node.seen.epoch != view.epoch
                or other.step < rank.step
            ):  # type: ignore[union-attr]
                return
        if rank.step < LAST:
            for other in group:
                other.copy(rank.step)
            rank.step += 1
            rank.held = rank.held[-1:]
            rank.life.advance(rank.step)


def come_to_the_end(members: int, seed: int) -> None:
    """Disturb ranks gently for a while, then leave them alone: all that are there do the last step, in one view."""
    lives = Lives(members, seed)
    lives.run(500, lambda: lives.disturb(gently=True))
    lives.loss, lives.sides = 0.0, dict.fromkeys(lives.nodes, 0)
    if seed % 2:
        lives.thaw()
    here = [rank for rank in lives.ranks.values() if rank.node in lives.living()]
    for _ in range(100):
        lives.run(100, None)
        if all(rank.step == LAST and rank.life.move is LifeMove.STAY for rank in here):
            break
    assert [(rank.step, rank.life.move) for rank in here] == [
        (LAST, LifeMove.STAY)
    ] * len(here)
    assert len({rank.node.census.epoch for rank in here}) == 1


@settings(max_examples=40, deadline=None)
@given(members=st.integers(3, 8), seed=st.integers(0, 1_000_000))
def test_whoever_lives_comes_to_the_end(members: int, seed: int) -> None:
    """Whatever is lost, stopped or late: no step is lost that was done, and all that are there do the last step."""
    come_to_the_end(members, seed)


# a newcomer that thought another stopped refused it for ever; one rank asked for a view, the others heard nothing of it
@pytest.mark.parametrize(("members", "seed"), [(4, 244), (5, 90198)])
def test_nobody_waits_alone_around_a_stopped_rank(members: int, seed: int) -> None:
    come_to_the_end(members, seed)


@pytest.mark.soak
def test_long_lives() -> None:
    for seed in range(2_000_000, 2_004_000):
        come_to_the_end(3 + seed % 6, seed)


class Fake:
    """A scripted agent and party in one: what joining, agreeing and staying do in turn. ``calls``: what was called."""

    step, why = 3, ""

    def __init__(self, script: Sequence[Any], entry: ViewEntry = FINE) -> None:
        self.script, self.entry, self.calls = list(script), entry, list[str]()

    def _next(self, call: str) -> Any:
        self.calls.append(call)
        result = self.script.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    def join(self, contacts: Sequence[Address], limit: float) -> None:
        self._next("join")

    def next(
        self, facts: dict[str, Any], limit: float, patience: float | None = None
    ) -> View:
        view: View = self._next("agree")
        return view

    def stay(self) -> str:
        result: str = self._next("stay")
        return result

    def report(self, text: str) -> None:
        self.calls.append(f"report {text}")

    def leave(self) -> None:
        self.calls.append("leave")

    def fatal(self, text: str) -> None:
        self.calls.append(f"fatal {text}")

    def start_over(self) -> Sequence[Address]:
        return ()

    def facts(self) -> dict[str, Any]:
        return {}

    def patience(self) -> float:
        return 1.0

    def enter(self, view: View) -> ViewEntry:
        return self.entry

    def part(self, broken: bool) -> None:
        self.calls.append("part" if broken else "part well")


def lived(
    script: Sequence[Any],
    move: LifeMove = LifeMove.STAY,
    of_island: bool = False,
    entry: ViewEntry = FINE,
) -> Any:
    """How a life ends, as text, and what was called meanwhile."""
    fake = Fake(script, entry)
    try:
        ending = live(Life(move, of_island), fake, fake, 1.0)
    except Exception as error:
        return f"{type(error).__name__}: {error}", fake.calls
    return ending, fake.calls


OWN = UsageError("no such file")
ABSENT = LeftOut("it was late")
ASKED = LeftOut("it was asked to leave", asked=True)
FEW = TooFew("1 of 4 ranks")


@pytest.mark.parametrize(("script", "ending", "calls"), [
    (["done"], "done", ["stay", "part well"]),
    ([Regroup(), VIEW, "done"], "done", ["stay", "part", "agree", "stay", "part well"]),
    ([PeerLost(CLOSED), VIEW, "done"], "done", ["stay", f"report {CLOSED}", "part", "agree", "stay", "part well"]),
    ([OWN], f"UsageError: {OWN}", ["stay", f"fatal UsageError: {OWN}", "part"]),
    ([Regroup(), ASKED], None, ["stay", "part", "agree"]),
    ([Regroup(), Fatal(ENDED)], None, ["stay", "part", "agree"]),
    ([Regroup(), Fatal("a disk is full")], "Fatal: a disk is full", ["stay", "part", "agree"]),
    ([Regroup(), FEW], f"TooFew: {FEW}", ["stay", "part", "agree"]),
    ([Regroup(), ABSENT, None, VIEW, "done"], "done",
     ["stay", "part", "agree", "join", "agree", "stay", "part well"]),
    ([Regroup(), ABSENT, FEW], f"LeftOut: {ALONE}", ["stay", "part", "agree", "join"]),
    ([Regroup(), ABSENT, None, FEW], f"LeftOut: {ALONE}", ["stay", "part", "agree", "join", "agree"]),
])  # fmt: skip
def test_what_follows_what(script: list[Any], ending: Any, calls: list[str]) -> None:
    assert lived(script) == (ending, calls)


@pytest.mark.parametrize(("script", "ending"), [
    ([Regroup(), ABSENT], f"LeftOut: {ABSENT}"),
    ([Regroup(), ASKED], f"LeftOut: {ASKED}"),
    ([Regroup(), FEW], f"TooFew: {FEW}"),
    ([OWN], f"UsageError: {OWN}"),
])  # fmt: skip
def test_a_rank_of_an_island_ends_where_others_join_again(
    script: list[Any], ending: str
) -> None:
    """It is started again as a part of its island, and the other islands go on."""
    got, calls = lived(script, of_island=True)
    assert got == ending and not any(
        call.startswith(("fatal", "join")) for call in calls
    )


def test_a_rank_with_another_state_leaves() -> None:
    text = "rank 1 has another state than the others"
    assert lived([Regroup(), VIEW], entry=ViewEntry(text)) == (
        f"LeftOut: {text}",
        ["stay", "part", "agree", "leave"],
    )


def test_a_newcomer_joins_first() -> None:
    assert lived([None, VIEW, "done"], LifeMove.JOIN) == (
        "done",
        ["join", "agree", "stay", "part well"],
    )
    assert lived([FEW], LifeMove.JOIN) == (f"TooFew: {FEW}", ["join"])


def test_a_plugin_that_only_saw_the_loss_of_others_is_no_cause() -> None:
    failure = PluginError("callback mine")
    failure.__cause__ = PeerLost(CLOSED)
    assert lived([failure, VIEW, "done"])[0] == "done"
    failure = PluginError("callback mine")
    failure.__cause__ = ValueError("it is odd")
    assert lived([failure])[1][1] == "fatal PluginError: callback mine"


def test_attempts_count_while_nobody_is_lost() -> None:
    """Whose run went back from step 119 to a checkpoint may lose ranks more often than a step may fail, until 119."""
    life = Life(LifeMove.STAY, step=119)
    lost = replace(VIEW, lost=(Lost(MEMBERS[1], 1, "is gone"),))
    for view in [lost] * 2 * ATTEMPTS + [VIEW] * ATTEMPTS:
        life.fail(PeerLost(CLOSED), True, 48)
        assert life.move is LifeMove.AGREE
        life.enter(view, ViewEntry())
    life.fail(PeerLost(CLOSED), True, 48)
    assert (
        life.move is LifeMove.END
        and life.farewell == f"step 49 has failed {ATTEMPTS} times: {CLOSED}"
    )


@pytest.mark.parametrize(
    ("layout", "equal"),
    [
        (Layout(dp=2, ep=2), {"pieces": 1}),
        (Layout(dp=2, ep=2, pieces=3, tp=2, overlap="domino", parts=3),
         {"overlap": "", "parts": 0}),
        (Layout(dp=2, overlap="domino", tp=2), {}),
    ],
)  # fmt: skip
def test_ranks_with_unequal_rows_exchange_tokens_equally_often(
    layout: Layout, equal: dict[str, Any]
) -> None:
    members: list[Any] = [SimpleNamespace(number=number) for number in (3, 4)]
    slow = SlowRanks("rebalance")
    assert slow.layout_for(layout, members) == layout
    slow.factors = {4: 2.0}
    assert slow.layout_for(layout, members) == layout.model_copy(update=equal)
