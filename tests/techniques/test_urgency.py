"""The urgency policy: earliest deadline first at equal estimates, nobody waits without end, times are learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.generate.block_pool import BlockPool
from weft.generate.policies import policy_of
from weft.generate.request import Request
from weft.generate.scheduler import Scheduler
from weft.generate.stage_times import LABELS, StageTokens
from weft.generate.workflow import Workflow
from weft.techniques.policies.urgency import Urgency

SECOND = 1.0  # of every step


class Bench:
    """An engine of steps of a second, without a model, that notes the order in which requests begin and end."""

    def __init__(self, policy: Urgency, limit: int = 1, blocks: int = 10**6, budget: int = 512) -> None:  # fmt: skip
        self.now, self.policy = 0.0, policy
        policy.read_time(lambda: self.now)
        self.scheduler = Scheduler(BlockPool(blocks, 4), budget, limit, policy)
        self.began: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.names: dict[Request, str] = {}

    def ask(self, name: str, prompt: int, tokens: int, workflow: Workflow | None = None) -> Request:  # fmt: skip
        ids = [len(self.names)] * prompt
        request = Request(
            ids, prompt + tokens - 1, workflow=workflow, asked_at=self.now
        )
        self.names[request] = name
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        planned = self.scheduler.plan()
        for request in planned.work:
            self.began.setdefault(self.names[request], self.now)
        self.now += SECOND
        self.scheduler.advance(planned)
        for request in planned.work:
            if not request.wanted:
                request.ids.append(0)
                if len(request.ids) > request.most:
                    self.scheduler.remove(request)
                    self.ended[self.names[request]] = self.now

    def run(self, until: float = math.inf) -> None:
        while self.now < until and (self.scheduler.running or self.scheduler.waiting):
            self.step()


def due(name: str, at: float, stage: str = "", remaining: Sequence[str] = ()) -> Workflow:  # fmt: skip
    return Workflow(name, stage, tuple(remaining), at)


@settings(deadline=None, max_examples=60)
@given(st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 500), st.integers(1, 4)), min_size=1, max_size=12,
))  # fmt: skip
def test_with_equal_estimates_the_earliest_deadline_is_first(jobs: list[tuple[int, int, int]]) -> None:  # fmt: skip
    """As a queue that is always sorted by deadline; times that a test of equal estimates must not learn are ones."""
    policy = Urgency(patience=10**6)
    policy.times.seconds = lambda stage: 1.0  # type: ignore[method-assign]
    bench = Bench(policy)
    # deadlines that differ, and none that passes while the others run
    jobs = [(at, 1000 * due_ + i, tokens) for i, (at, due_, tokens) in enumerate(jobs)]
    coming = sorted(range(len(jobs)), key=lambda i: jobs[i][0])
    expected, queue, clock, left = list[int](), list[int](), 0.0, list(coming)
    while left or queue:
        if not queue:
            clock = max(clock, jobs[left[0]][0])
        while left and jobs[left[0]][0] <= clock:
            queue.append(left.pop(0))
        queue.sort(key=lambda i: jobs[i][1])
        expected.append(queue.pop(0))
        clock += jobs[expected[-1]][2] * SECOND
    while coming or bench.scheduler.running or bench.scheduler.waiting:
        if not (bench.scheduler.running or bench.scheduler.waiting):
            bench.now = max(bench.now, jobs[coming[0]][0])
        while coming and jobs[coming[0]][0] <= bench.now:
            i = coming.pop(0)
            bench.ask(str(i), 3, jobs[i][2], due(str(i), jobs[i][1]))
        bench.step()
    assert list(bench.ended) == [str(i) for i in expected]


def test_the_longer_stage_goes_first_at_equal_deadlines() -> None:
    bench = Bench(Urgency())
    for stage, tokens in (("short", 1), ("long", 9)):
        bench.policy.times.tokens.note(stage, 1, tokens)
    bench.policy.times.written_second.add(1.0)
    bench.ask("a", 1, 1, due("a", 50, "short"))
    bench.ask("b", 1, 9, due("b", 50, "long"))
    bench.run()
    assert list(bench.ended) == ["b", "a"]


@settings(deadline=None, max_examples=30)
@given(st.integers(5, 60), st.integers(1, 3), st.booleans())
def test_nobody_waits_without_end(patience: int, limit: int, lost: bool) -> None:
    """Urgent requests never cease; one without a deadline, or with one that has passed, still begins in time."""
    bench = Bench(Urgency(patience), limit)
    older = [bench.ask(f"older {i}", 2, 3, due("o", 9)) for i in range(2)]
    bench.ask("patient", 2, 3, due("p", -1.0) if lost else None)
    while "patient" not in bench.began:
        name = f"urgent {bench.now}"
        bench.ask(name, 2, 3, due(name, bench.now + 1.0))
        bench.step()
        # all that came before, and those that run when its patience ends
        assert bench.now <= patience + 1 + 3 * (len(older) + 2)
    assert bench.began["patient"] > 6 or limit > 1  # it did wait


def test_without_deadlines_the_order_is_that_of_arrival() -> None:
    bench = Bench(Urgency())
    for name in "abc":
        bench.ask(name, 2, 2)
    bench.run()
    assert list(bench.ended) == ["a", "b", "c"]


def test_a_deadline_that_has_passed_counts_no_more() -> None:
    """Whoever is late in any case takes no time from those that can still be in time."""
    bench = Bench(Urgency())
    bench.now = 10
    bench.ask("late", 2, 5, due("late", 9.0))
    bench.ask("timely", 2, 5, due("timely", 30.0))
    bench.run()
    assert list(bench.ended) == ["timely", "late"]


def test_while_the_most_urgent_does_not_fit_others_go_on() -> None:
    """The reference's queue stands still until the memory for its head is free."""
    bench = Bench(Urgency(), limit=4, blocks=8)
    bench.ask("small", 8, 12)
    bench.step()
    bench.ask("large", 28, 4, due("large", 20.0))
    while "small" not in bench.ended:
        before = bench.scheduler.running[0].computed
        bench.step()
        assert "small" in bench.ended or bench.scheduler.running[0].computed > before
    assert "large" not in bench.began
    bench.run()
    assert bench.began["large"] == bench.ended["small"]


def test_a_stage_gets_its_share_of_what_is_left() -> None:
    times = {"a": 1.0, "b": 3.0}
    job = Workflow("q", "a", ("b", "b", "a"), 116.0)
    assert job.stage_deadline(100.0, times.__getitem__) == 102.0
    assert Workflow("q", "b", (), 116.0).stage_deadline(100.0, times.__getitem__) == 116
    assert Workflow("q", "b").stage_deadline(100.0, times.__getitem__) == math.inf


def test_a_workflow_travels_with_the_time_that_is_left() -> None:
    job = Workflow("q", "a", ("b",), 107.5)
    assert job.frame(100.0)["deadline_ms"] == 7500
    assert Workflow.of_frame(job.frame(100.0), 1.0) == Workflow("q", "a", ("b",), 8.5)
    assert Workflow.of_frame(Workflow("q").frame(3.0), 9.0) == Workflow("q")


def test_times_are_learned_from_requests_and_do_not_pile_up() -> None:
    bench = Bench(Urgency(), limit=4)
    for number in range(3):
        bench.ask(f"a {number}", 4, 7, due("a", 1e9, "a"))
        bench.ask(f"b {number}", 8, 2, due("b", 1e9, "b"))
        bench.run()
        bench.now += 100  # in which nothing runs and nothing is measured
    bench.ask("c", 4, 1)
    bench.run()
    times = bench.policy.times
    assert times.tokens.mean("a") == (4, 7) and times.tokens.mean("b") == (8, 2)
    assert times.tokens.mean("unknown") == (6, 4.5)
    assert times.written_second.value == pytest.approx(SECOND)
    # a step reads either prompt as a whole
    assert SECOND / 8 < times.prompt_second.value < SECOND / 4
    assert times.seconds("a") > times.seconds("b")
    bench.ask("d", 4, 1)
    bench.step()
    assert len(bench.policy._watched) == 1


def test_labels_are_forgotten_beyond_so_many() -> None:
    tokens = StageTokens()
    for number in range(LABELS + 5):
        tokens.note(str(number), number, 1)
    assert tokens.mean("4") == tokens.mean("unknown")
    assert tokens.mean("5") == (5, 1)


@pytest.mark.parametrize("word", ["urgency:", "urgency:0", "urgency:-1", "urgency:x"])
def test_its_argument_is_seconds(word: str) -> None:
    assert policy_of("urgency:7").patience == 7  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="--policy cannot be"):
        policy_of(word)
