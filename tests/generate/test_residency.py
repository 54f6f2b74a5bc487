"""Models that come and go in memory, on a simulated clock: few switches, and nobody waits beyond the bound."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest

from weft.generate.residency import Residency, Switch


class Ask(NamedTuple):
    at: float
    model: str
    lasts: float


def load(rate: float, seconds: float, models: int, seed: int) -> list[Ask]:
    """Requests to models as likely as Zipf's law with exponent 1 has them."""
    drawn, asks, at = random.Random(seed), list[Ask](), 0.0
    weights = [1 / (i + 1) for i in range(models)]
    while at < seconds:
        at += drawn.expovariate(rate)
        (model,) = drawn.choices(range(models), weights)
        asks.append(Ask(at, f"m{model}", drawn.uniform(0.1, 0.6)))
    return asks


def misses(asks: list[Ask], limit: int) -> int:
    """How often a model is read if requests run in the order of their arrival, the least recently used going."""
    here, count = OrderedDict[str, None](), 0
    for ask in asks:
        count += ask.model not in here
        here[ask.model] = None
        here.move_to_end(ask.model)
        if len(here) > limit:
            here.popitem(last=False)
    return count


def waits(policy: Residency, asks: list[Ask], reading: float) -> list[float]:
    """Run ``asks`` on a simulated clock; seconds that each waited. A model takes ``reading`` seconds to be read."""
    waited, queues = list[float](), defaultdict[str, list[Ask]](list)
    events: list[tuple[float, int, str, Ask | str]] = []
    number = iter(range(10**9))

    def post(at: float, kind: str, what: Ask | str) -> None:
        heapq.heappush(events, (at, next(number), kind, what))

    def start(ask: Ask, now: float) -> None:
        waited.append(now - ask.at)
        post(now + ask.lasts, "end", ask)

    def admit(model: str, now: float) -> None:
        ready = queues.pop(model, [])
        assert policy.admit(model) == len(ready)
        for each in ready:
            start(each, now)

    for ask in asks:
        post(ask.at, "ask", ask)
    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "ask" and isinstance(what, Ask):
            if policy.enter(what.model, now):
                start(what, now)
            else:
                queues[what.model].append(what)
                post(now + policy.bound / 2, "look", "")
        elif kind == "end" and isinstance(what, Ask):
            policy.leave(what.model)
        elif kind == "read" and isinstance(what, str):
            admit(what, now)
        while (switch := policy.switch(now)) is not None:
            assert sum(map(policy.cost, policy.running)) <= policy.limit
            if switch.name in policy.running:
                admit(switch.name, now)
            else:
                post(now + reading, "read", switch.name)
    assert not policy.waiting and len(waited) == len(asks)
    return waited


@pytest.mark.parametrize(("rate", "limit"), [(10.0, 4), (20.0, 4), (30.0, 6), (8.0, 1)])
def test_half_the_switches_of_arrival_order_and_no_long_wait(
    rate: float, limit: int
) -> None:
    for seed in range(3):
        models = 20 if limit > 1 else 6
        asks = load(rate, 200, models, seed)
        policy = Residency(limit, bound=15)
        waited = sorted(waits(policy, asks, reading=0.2))
        assert policy.switches * 2 <= misses(asks, limit)
        assert waited[int(len(waited) * 0.99)] <= 15


def test_an_idle_service_reads_at_once() -> None:
    policy = Residency(2, bound=10)
    assert not policy.enter("a", 0) and policy.switch(0) == Switch("a", [])
    assert policy.switch(0) is None, "it is on its way"
    assert policy.admit("a") == 1 and policy.enter("a", 1)
    assert not policy.enter("b", 1)
    assert policy.switch(2) is None, "something is computed"
    assert policy.due() == 6 and policy.switch(6) == Switch("b", [])
    policy.admit("b")
    assert not policy.enter("c", 7) and policy.switch(12) is None
    assert not policy.enter("a", 12), "it makes room"
    policy.leave("a")
    assert policy.switch(12) is None
    policy.leave("a")
    assert policy.switch(12) == Switch("c", ["a"])


def test_requests_that_go_away_free_their_model() -> None:
    policy = Residency(1, bound=2)
    policy.enter("a", 0)
    policy.switch(0)
    policy.admit("a")
    assert not policy.enter("b", 1) and policy.switch(2) is None
    assert not policy.enter("a", 3), "closed for b"
    policy.give_up("b", 1)
    assert policy.switch(4) == Switch("a", []) and policy.admit("a") == 1
    assert policy.enter("a", 4) and policy.switches == 1
    policy.enter("b", 5)
    for _ in range(3):
        policy.leave("a")
    assert policy.switch(5) == Switch("b", ["a"])
    policy.fail("b")
    assert policy.due() is None and not policy.enter("b", 6)


def test_a_model_larger_than_the_room_is_alone() -> None:
    sizes = {"a": 3.0, "b": 3.0, "huge": 20.0}
    policy = Residency(7, 10, sizes.__getitem__)
    for name in ("a", "b"):
        policy.enter(name, 0)
        assert policy.switch(0) == Switch(name, [])
        policy.admit(name)
        policy.leave(name)
    policy.enter("huge", 1)
    assert policy.switch(1) == Switch("huge", ["a", "b"])
