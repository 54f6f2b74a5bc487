"""The simulated cluster: as the simulator of an engine where there is one, and by the formulas where there are more."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from weft.cluster.balance import REST_S
from weft.cluster.dispatch_policy import DispatchRequest, EngineView, freest
from weft.errors import WeftError
from weft.generate.block_pool import BlockPool
from weft.generate.policies import policy_of
from weft.generate.scheduler import ScheduledStep, Scheduler
from weft.generate.step_work import work_of
from weft.generate.workflow import Workflow
from weft.serve import cluster_simulation
from weft.serve.block_link import BlockLink
from weft.serve.cluster_simulation import (
    NOTICED,
    ORDERED_STEPS,
    ClusterRequest,
    ClusterSimulation,
    Role,
    ServiceDelays,
    SimulatedEngine,
    simulate_cluster,
)
from weft.serve.load_simulation import TimedRequest, simulate_load
from weft.techniques.dispatch_policies.balanced import ByWorkload

SIZE = 4


def curve(speed: float = 1.0) -> Callable[[ScheduledStep], float]:
    """Seconds of a step: 1 and a tenth of a second per token and text, on an engine of this speed."""
    return lambda step: (1 + 0.1 * sum(work_of(step)[1:3])) / speed


def engine(
    name: str, role: Role = "any", speed: float = 1.0, blocks: int = 1000, policy: str = "exact-fill",
    fails: float = float("inf"), limit: int = 8, budget: int = 16,
) -> SimulatedEngine:  # fmt: skip
    scheduler = Scheduler(BlockPool(blocks, SIZE), budget, limit, policy_of(policy))
    return SimulatedEngine(name, scheduler, curve(speed), role, fails)


def load(seed: int, count: int = 30, rate: float = 0.3) -> list[ClusterRequest]:
    draw, time, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        time += draw.expovariate(rate)
        prompt = [draw.randrange(31) for _ in range(draw.choice([3, 20, 60]))]
        requests.append(ClusterRequest(time, prompt, draw.choice([1, 5, 25])))
    return requests


@pytest.mark.parametrize("blocks", [1000, 40])
def test_a_single_engine_is_the_simulator_of_an_engine(blocks: int) -> None:
    requests = load(1)
    alone = simulate_load(
        engine("a", blocks=blocks).scheduler, [TimedRequest(*each[:3]) for each in requests], curve()
    )  # fmt: skip
    assert simulate_cluster([engine("a", blocks=blocks)], requests) == alone


def test_a_request_is_handed_over_and_waits_for_its_last_part_only() -> None:
    """Bytes are those of all computed tokens, and the stall is that of what the last step computed."""
    link = BlockLink(latency=0.5, rate=100.0, token_bytes=10.0)
    ((played,), prompt) = (
        ClusterSimulation(
            [engine("p", "prefill"), engine("d", "decode")],
            [ClusterRequest(0.0, list(range(61)), 5)],
            freest,
            link,
        ).run(),
        61,
    )
    assert played.engines == ["p", "d"] and played.moved == prompt * link.token_bytes
    # steps of 16, 16, 16 and 13 tokens; earlier blocks travel faster than they are computed
    first, *later = played.outcome.times
    assert first == pytest.approx(4 * 1.1 + 6.1)
    assert played.stall == pytest.approx(0.5 + 13 * 10 / 100)
    assert later == pytest.approx(
        [first + played.stall + 1.2 * i for i in (1, 2, 3, 4)]
    )


def test_delays_of_a_service_are_seen_by_clients_and_later_stages() -> None:
    """A step of one text takes 1.2 s and 0.1 for each further token; each stage is on its way there and back."""
    delays = ServiceDelays(ask=0.25, tell=0.5, step=0.125)
    requests = [
        ClusterRequest(1.0, [1] * 5, 3),
        ClusterRequest(0.0, [2] * 5, 2, after=[0]),
    ]
    first, later = simulate_cluster([engine("a")], requests, delays=delays)
    begun, read, written = 1.0 + 0.25, 1.6 + 0.125, 1.2 + 0.125
    assert first.began == 1.0 and first.end == first.times[-1]
    assert first.times == pytest.approx([begun + read + i * written + 0.5 for i in range(3)])  # fmt: skip
    assert later.began == first.end
    asked = later.began + 0.25
    assert later.times == pytest.approx([asked + read + i * written + 0.5 for i in range(2)])  # fmt: skip


def test_two_requests_that_are_handed_over_go_to_two_engines() -> None:
    """The choice counts what is on its way, and is made when a request comes: before any of them has moved."""
    engines = [engine("p", "prefill"), engine("d0", "decode"), engine("d1", "decode")]
    requests = [ClusterRequest(0.0, [i] * 8, 9) for i in range(2)]
    played = ClusterSimulation(engines, requests, freest, BlockLink(0, 1e9, 1)).run()
    assert sorted(each.engines for each in played) == [["p", "d0"], ["p", "d1"]]


def test_a_slow_link_makes_others_wait_too() -> None:
    slow = BlockLink(0.0, 16.0, 1.0)
    requests = [ClusterRequest(0.0, [i] * 8, 2) for i in range(3)]
    played = ClusterSimulation(
        [engine("p", "prefill"), engine("d", "decode")], requests, freest, slow
    ).run()
    assert all(each.moved == 8 for each in played)
    arrivals = [each.outcome.times[0] + each.stall for each in played]
    # those whose prompts end together, one after the other over one link
    first, second, third = (each.outcome.times[0] for each in played)
    assert second == third
    assert arrivals == pytest.approx([first + 0.5, second + 0.5, second + 1.0])


def test_blocks_that_lag_by_more_than_a_step_leave_after_a_further_one() -> None:
    requests = [ClusterRequest(0.0, [1] * 8, 9)]
    (played,) = ClusterSimulation(
        [engine("p", "prefill"), engine("d", "decode")], requests, freest, BlockLink(0.0, 4.0, 1.0)
    ).run()  # fmt: skip
    # two seconds of blocks after a step of 1.8 s; the token that another step writes has blocks, too
    assert played.moved == 9 and played.stall < 1.8
    assert played.engines == ["p", "d"]


def test_without_room_where_they_go_requests_go_on_where_they_are_until_there_is() -> None:  # fmt: skip
    requests = [ClusterRequest(0.01 * i, [i] * 12, tokens) for i, tokens in enumerate((4, 90, 20, 20))]  # fmt: skip
    played = ClusterSimulation(
        [engine("p", "prefill"), engine("d", "decode", limit=1)], requests, freest, BlockLink(0, 1e9, 1)
    ).run()  # fmt: skip
    # the second goes on where the first has ended; the others have no room there before they end
    assert [each.engines for each in played] == [["p", "d"]] * 2 + [["p"]] * 2
    assert [len(each.outcome.times) for each in played] == [4, 90, 20, 20]


def test_an_answer_that_stays_leaves_on_order_after_two_ends_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the first its full blocks leave, in the second the rest; those with a first token to come need no order."""
    happened = list[str]()

    def noting(name: str, said: Callable[..., str]) -> None:
        method = getattr(ClusterSimulation, name)

        def noted(self: ClusterSimulation, *given: Any) -> Any:
            happened.append(said(*given))
            return method(self, *given)

        monkeypatch.setattr(ClusterSimulation, name, noted)

    noting("_finish", lambda engine, step: f"{engine.setup.name} ends a step")
    noting("_leave", lambda engine, request: f"{request.prompt or len(request.ids)} leaves")  # fmt: skip
    noting("_end", lambda number: f"{number} ends")
    requests = [ClusterRequest(0.1 * i, [i] * 12, tokens) for i, tokens in enumerate((4, 30))]  # fmt: skip
    played = ClusterSimulation(
        [engine("p", "prefill"), engine("d", "decode", limit=1)], requests, freest, BlockLink(0, 1e9, 1)
    ).run()  # fmt: skip
    assert [each.engines for each in played] == [["p", "d"]] * 2
    begun = happened.index("0 ends")
    after = happened[begun : next(i for i, what in enumerate(happened) if "leaves" in what and i > begun)]  # fmt: skip
    assert after.count("p ends a step") == ORDERED_STEPS == 2
    # the prompt and three of the four tokens that were written there
    assert played[1].moved == 12 + 3


@pytest.mark.parametrize("blind", [False, True])
def test_requests_whose_blocks_have_no_room_rest(
    blind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that knows how full the cache is sends none; another one hears of the refusal, and waits."""
    refusals, go_back = list[float](), ClusterSimulation._go_back

    def noting(self: ClusterSimulation, travel: cluster_simulation._Travel) -> None:
        refusals.append(self.now)
        go_back(self, travel)

    monkeypatch.setattr(ClusterSimulation, "_go_back", noting)
    if blind:
        monkeypatch.setattr(cluster_simulation._Engine, "has_room", lambda *_: True)
    # the second needs 37 of 40 blocks, of which the first has at least 4; each short one that ends lets all look again
    requests = [ClusterRequest(0.0, [1] * 12, 140), ClusterRequest(2.0, [2] * 148, 12)]
    requests += [ClusterRequest(6.0 + 0.2 * i, [3, 3, i], 1) for i in range(60)]
    played = ClusterSimulation(
        [engine("p", "prefill", 4.0), engine("d", "decode", 4.0, blocks=40)],
        requests,
        freest,
        BlockLink(0, 1e9, 1),
    ).run()
    assert [each.outcome.written for each in played] == [140, 12] + [1] * 60
    assert played[0].engines == ["p", "d"] and played[1].engines == ["p"]
    gaps = [after - before for before, after in pairwise(refusals)]
    assert len(refusals) >= 2 if blind else not refusals
    assert all(gap >= REST_S for gap in gaps)


def test_the_router_knows_what_it_has_sent_and_what_engines_said() -> None:
    """A text's blocks count as cached from the moment when it was sent, and so does the room that it needs."""
    seen = list[dict[str, tuple[int, float]]]()

    def first(views: Sequence[EngineView], request: DispatchRequest) -> str:
        seen.append({view.name: (view.known, view.usage) for view in views})
        return "a"

    alike = [ClusterRequest(0.001 * i, [*range(24), 40 + i], 2) for i in range(2)]
    ClusterSimulation([engine("a"), engine("b")], alike, first).run()
    assert seen == [{"a": (0, 0), "b": (0, 0)}, {"a": (24, 7), "b": (0, 0)}]
    others = [ClusterRequest(0.001 * i, [i] * 24, 2) for i in range(4)]
    played = ClusterSimulation([engine("a"), engine("b")], others, freest).run()
    assert sorted(each.engines[0] for each in played) == ["a", "a", "b", "b"]


def test_the_router_hears_with_the_tokens_how_full_an_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(cluster_simulation, "BEAT_S", 1e6)
    seen = list[float]()

    def first(views: Sequence[EngineView], request: DispatchRequest) -> str:
        seen.append(views[0].usage)
        return views[0].name

    # steps of 1.8 and 1.2 s; the third token needs a third block of four
    requests = [ClusterRequest(at, [1] * 8, 9) for at in (0.0, 1.0, 3.1)]
    ClusterSimulation([engine("a", limit=1)], requests, first).run()
    assert seen == [0, 2, 3 + 2]


@pytest.mark.parametrize("roles", [("any", "any"), ("prefill", "decode", "decode")])
def test_every_request_ends_whole_though_an_engine_fails(roles: tuple[Role, ...]) -> None:  # fmt: skip
    """None is lost and no token comes twice; those of the failed engine go on when the failure is noticed."""
    requests, at = load(3, 60, 2.0), 60.0
    link = BlockLink(0.01, 1e4, 1.0)
    engines = [
        engine(f"e{i}", role, speed=4.0 if role == "prefill" else 1.0)
        for i, role in enumerate(roles)
    ]
    engines[-1] = engine(engines[-1].name, roles[-1], fails=at)
    played = ClusterSimulation(engines, requests, freest, link).run()
    assert [each.outcome.written for each in played] == [r.tokens for r in requests]
    for each in played:
        assert each.outcome.times == sorted(each.outcome.times)
        assert len(each.outcome.times) == each.outcome.written
    hit = [each for each in played if engines[-1].name in each.engines[:-1]]
    assert hit
    for each in hit:
        late = [time for time in each.outcome.times if time > at]
        assert late and late[0] > at + NOTICED


def test_a_stage_begins_when_those_before_it_have_ended() -> None:
    requests = [
        ClusterRequest(1.0, [1] * 5, 3),
        ClusterRequest(1.0, [2] * 5, 9),
        ClusterRequest(1.0, [3] * 5, 2, after=[0, 1]),
    ]
    outcomes = simulate_cluster([engine("a"), engine("b")], requests)
    assert outcomes[2].began == max(outcomes[0].end, outcomes[1].end)
    assert outcomes[2].times[0] > outcomes[2].began


def test_urgency_meets_deadlines_in_the_time_of_the_simulation() -> None:
    """Two jobs that come later are shorter of time; first come, first served, is too late for them."""
    jobs = [
        ClusterRequest(0.1 * i, [i] * 9, 6, Workflow(str(i), "x", (), deadline))
        for i, deadline in enumerate([900.0, 900.0, 900.0, 25.0, 17.0])
    ]
    met = {}
    for policy in ("exact-fill", "urgency"):
        outcomes = simulate_cluster([engine("a", policy=policy, limit=1)], jobs)
        met[policy] = [
            outcome.end <= job.workflow.deadline
            for outcome, job in zip(outcomes, jobs, strict=True)
            if job.workflow
        ]
    assert met["exact-fill"] == [True, True, True, False, False]
    assert all(met["urgency"])


def test_balanced_dispatch_learns_which_engine_is_fast() -> None:
    requests = load(5, 120, 0.5)
    engines = [engine("fast", speed=4.0), engine("slow")]
    played = ClusterSimulation(engines, requests, ByWorkload(0.5)).run()
    later = [each.engines[0] for each in played[40:]]
    assert later.count("fast") > 2 * later.count("slow") > 0


def test_what_cannot_be_played_is_said() -> None:
    with pytest.raises(WeftError, match="give the simulation a link"):
        simulate_cluster([engine("p", "prefill"), engine("d", "decode")], load(1, 1))
    with pytest.raises(WeftError, match="have failed"):
        simulate_cluster([engine("a", fails=1.0)], [ClusterRequest(2.0, [1], 1)])
