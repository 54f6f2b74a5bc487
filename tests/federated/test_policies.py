"""Policies: exact in their degenerate settings, weighted as their theory says, and deaf to what nobody asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.federated.quadratics import QuadraticCohort, clock
from weft.federated.policy import ClientUpdate
from weft.federated.weighted_sum import weighted_sum


def test_fedavg_is_the_weighted_mean_of_local_steps() -> None:
    """Of quadratics with equal curvature the mean of local steps is a step on the weighted objective."""
    simulated = clock(QuadraticCohort([1.0, 5.0], [3, 1]), [1, 1], steps=2, rounds=3)
    simulated.run(3)
    x = 0.0
    for _ in range(6):
        x -= 0.1 * (x - 2.0)
    assert float(simulated.parameters["x"]) == pytest.approx(x, abs=1e-12)
    assert simulated.now == 6.0


def test_one_client_is_gradient_descent() -> None:
    simulated = clock(QuadraticCohort([3.0]), [1], steps=4)
    simulated.run(5)
    x = torch.zeros((), dtype=torch.float64)
    for _ in range(20):
        x -= 0.1 * (x - 3.0)
    assert simulated.parameters["x"] == pytest.approx(float(x), abs=1e-14)


def test_what_nobody_asked_for_is_dropped() -> None:
    """A second answer, a forged version, a stranger, and an answer after the round's end change nothing."""
    simulated = clock(QuadraticCohort([1.0, 5.0]), [1, 1], steps=1, patience=10)
    policy = simulated.policy
    for client in ("c0", "c1"):
        policy.join(client, 0.0, 1)
    assert [work.client for work in policy.ready(0.0)] == ["c0", "c1"]
    update = ClientUpdate("c0", 0, 1, 1, {"x": torch.ones(())})
    assert policy.expects(update)
    for wrong in (replace(update, version=7), replace(update, client="stranger")):
        assert not policy.expects(wrong)
        assert policy.on_update(wrong, 0, 1.0) is None
    assert policy.on_update(update, 0, 1.0) is None
    assert not policy.expects(update)
    assert policy.on_update(update, 0, 1.0) is None
    assert policy.next_tick() == 10.0
    change = policy.on_tick(10.0)
    assert change is not None
    assert change.clients == ("c0",) and change.weights == (1.0,)
    late = replace(update, client="c1")
    assert not policy.expects(late)
    assert policy.on_update(late, 1, 11.0) is None
    assert policy.version == 1


def test_a_client_that_leaves_is_not_waited_for() -> None:
    simulated = clock(QuadraticCohort([1.0, 5.0]), [1, 2], lost=[("c1", 0)], steps=1, rounds=2)  # fmt: skip
    simulated.run(2)
    losses = [event for event in simulated.events if event.kind == "leave"]
    assert [event.client for event in losses] == ["c1"]
    starts = [(event.time, event.client) for event in simulated.events if event.kind == "start"]  # fmt: skip
    assert starts == [(0, "c0"), (0, "c1"), (1, "c0")]
    simulated.run(3)  # it has returned in the second round, and takes part in the third
    starts = [(event.time, event.client) for event in simulated.events if event.kind == "start"]  # fmt: skip
    assert starts[3:] == [(2, "c0"), (2, "c1")]


def test_recorded_events_give_the_same_model() -> None:
    cohort = QuadraticCohort([1.0, 5.0, 2.0], [3, 1, 2])
    simulated = clock(cohort, [1, 2, 3], lost=[("c2", 1)], steps=3)
    simulated.run(6)
    again = clock(QuadraticCohort([1.0, 5.0, 2.0], [3, 1, 2]), [1, 2, 3], steps=3)
    again.replay(simulated.events)
    assert torch.equal(again.parameters["x"], simulated.parameters["x"])
    assert again.events == simulated.events


def test_a_weighted_sum_adds_names() -> None:
    a, b = {"w": torch.ones(2)}, {"w": torch.full((2,), 3.0)}
    assert weighted_sum([a, b], [0.25, 0.5])["w"].tolist() == [1.75, 1.75]
    assert a["w"].tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="no update"):
        weighted_sum([], [])
