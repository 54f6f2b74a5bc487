"""Roles of a cluster's engines that follow the load: on the simulator's clock, and with engines in this process."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.cluster.inprocess import Cluster, alone, asked, until, written_by
from weft.cluster.role_counts import RecentRequest, RoleCounts, RoleQuestion
from weft.generate.backend import TokenEvent
from weft.generate.sampling import Sampling
from weft.serve.placement_search import ServiceLimits
from weft.serve.role_watch import RoleWatch

#: Seconds per step, token and text: a long prompt makes everybody wait, a token takes hardly longer with others.
RATES = [0.01, 0.0005, 0.0001, 0.0, 0.0, 0.0]


def window(rate: float, prompt: int, tokens: int) -> RoleQuestion:
    draw, now, requests = random.Random(7), 1000.0, []
    for _ in range(30):
        now += draw.expovariate(rate)
        ids = [draw.randrange(1000) for _ in range(round(prompt * draw.uniform(0.5, 1.5)))]  # fmt: skip
        requests.append(RecentRequest(now, ids, round(tokens * draw.uniform(0.5, 1.5))))
    return RoleQuestion(requests, 3, RoleCounts(0, 0), RATES, 20_000, 0.001)


@pytest.mark.slow(3)
def test_roles_follow_a_load_that_drifts_and_no_peak() -> None:
    light, heavy = window(0.2, 100, 20), window(1.5, 800, 40)
    watch = RoleWatch(ServiceLimits(1.5, 0.02), margin=0.05)
    assert [watch(light), watch(light)] == [None, None]
    # a peak is not enough, and what is quiet in between begins anew
    assert [watch(heavy), watch(light), watch(heavy)] == [None, None, None]
    chosen = watch(heavy)
    assert chosen is not None and chosen.prefill and sum(chosen) == 3
    # they stay while the load is so, and what the router has in truth counts
    assert [watch(heavy._replace(current=chosen)) for _ in range(2)] == [None, None]
    assert [watch(heavy), watch(heavy)] == [None, chosen]


@pytest.mark.parametrize(
    "change", [{"requests": []}, {"engines": 1}, {"rates": ()}, {"cache": 8}]
)
def test_nothing_is_chosen_from_too_little(change: dict[str, object]) -> None:
    watch = RoleWatch(ServiceLimits(1.5, 0.02), windows=1)
    assert watch(window(1.5, 8, 2)._replace(**change)) is None  # type: ignore[arg-type]


@pytest.mark.soak
def test_engines_change_their_roles_while_they_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers move to the engines that write from then on, and their texts stay."""
    monkeypatch.setattr("weft.cluster.engine_router.CHOICE_S", 0.1)
    requests = [asked([i + 1] * 9, 60, Sampling(i % 2, seed=i)) for i in range(6)]
    plain = [alone(request)[0].written for request in requests]
    questions: list[RoleQuestion] = []

    def choose(question: RoleQuestion) -> RoleCounts | None:
        questions.append(question)
        return RoleCounts(1, 2) if question.current == (0, 0) and events > 40 else None

    events = 0
    with Cluster(3, slow=0.01, router={"roles": choose}) as cluster:
        router = cluster.router

        def seen(event: TokenEvent) -> None:
            nonlocal events
            events += 1

        assert asyncio.run(written_by(router, requests, seen)) == plain
        assert router.moves.moved and router.counts()["roles_chosen"] == 1
        (line,) = [said for said in cluster.said if said.startswith("roles")]
        assert line == (
            "roles of engines: 1 for prompts, 2 for writing, as the recent load needs; were 3 for both"
        )
        assert sorted(load.role for load in router.loads().values()) == [1, 2, 2]
        # new prompts go to the engine for prompts, and are written elsewhere
        moved = router.moves.moved
        assert asyncio.run(written_by(router, requests[:2])) == plain[:2]
        assert router.moves.moved == moved + 2
        question = questions[-1]
        assert question.current == (1, 2) and question.engines == 3
        assert [len(each.prompt) for each in question.requests[:6]] == [9] * 6
        assert len(question.rates) == 6 and question.cache == 4096
        # what the router knows is what the watch plays
        many = question._replace(requests=[*question.requests] * 4)
        assert RoleWatch(ServiceLimits(60, 60), windows=1)(many) is None
        router.set_roles(RoleCounts(0, 0))
        assert [load.role for load in router.loads().values()] == [0, 0, 0]
        until(lambda: all(engine.empty() for engine in cluster.engines))
