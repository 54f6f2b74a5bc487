"""Every policy in the setting in which it is exactly another: FedAvg, SCAFFOLD, or plain gradient descent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.federated.quadratics import QuadraticCohort, clock
from weft.federated.policy import Differences
from weft.registry import names

OPTIMA = [1.0, 5.0, -2.0, 9.0]
SIZES = [3, 1, 2, 7]


def model(
    seconds: list[float],
    changes: int,
    start: Differences | None = None,
    optima: list[float] = OPTIMA,
    sizes: list[int] = SIZES,
    **settings: Any,
) -> torch.Tensor:
    simulated = clock(QuadraticCohort(optima, sizes), seconds, **settings)
    if start is not None:
        simulated.parameters = dict(start)
    simulated.run(changes)
    return simulated.parameters["x"]


@pytest.mark.parametrize("weights", ["samples", "equal"])
@pytest.mark.parametrize(("policy", "seconds", "settings"), [
    # a tick at the slowest client's time, or later
    ("fedfix", [1, 2, 3, 4], {"tick": 12}),
    ("fedfix", [1, 2, 3, 4], {"tick": 100}),
    # a buffer of all clients, which arrive together
    ("fedbuff", [1, 1, 1, 1], {"buffer": 4}),
    ("fedbuff", [1, 1, 1, 1], {"buffer": 4, "unbiased": True}),
    ("fedavg-m", [1, 2, 3, 4], {"beta": 1}),
])  # fmt: skip
def test_policy_is_fedavg(
    policy: str, seconds: list[float], settings: dict[str, Any], weights: str
) -> None:
    common = {"steps": 3, "weights": weights, "rate": 0.7}
    plain = model([1, 2, 3, 4], 5, policy="fedavg", **common)
    same = model(seconds, 5, policy=policy, **common, **settings)
    assert torch.equal(plain, same)
    # and the setting is what does it
    if policy != "fedbuff":
        changed = {"tick": 11.9} if policy == "fedfix" else {"beta": 0.5}
        assert not torch.equal(plain, model(seconds, 5, policy=policy, **common, **changed))  # fmt: skip


def test_fedcompass_at_equal_speeds_is_fedavg_after_the_first_round() -> None:
    """Of four clients the first updates are a change each; from then on a round is one group."""
    common: dict[str, Any] = {"rate": 0.9, "steps": 6}
    compass: dict[str, Any] = {"policy": "fedcompass", "min_steps": 2, "max_steps": 6}
    first = model([0.3] * 4, 4, **common, **compass)
    later = model([0.3] * 4, 7, **common, **compass)
    plain = model([0.3] * 4, 3, {"x": first}, policy="fedavg", **common)
    assert torch.equal(later, plain)
    # other speeds, other groups
    assert not torch.equal(later, model([0.3, 0.3, 0.3, 2], 7, **common, **compass))


def test_fedcompass_with_one_number_of_steps_is_fedavg() -> None:
    common: dict[str, Any] = {"steps": 5, "staleness": 2.0}
    compass: dict[str, Any] = {"policy": "fedcompass", "min_steps": 5, "max_steps": 5}
    first = model([1] * 4, 4, **common, **compass)
    later = model([1] * 4, 6, **common, **compass)
    assert torch.equal(later, model([1] * 4, 2, {"x": first}, policy="fedavg", **common))  # fmt: skip


def test_scaffold_m_without_momentum_is_scaffold() -> None:
    common: dict[str, Any] = {"steps": 3, "per_round": 2, "seed": 5}
    plain = model([1, 2, 3, 4], 8, policy="scaffold", **common)
    assert torch.equal(plain, model([1, 2, 3, 4], 8, policy="scaffold-m", beta=1, **common))  # fmt: skip
    assert not torch.equal(plain, model([1, 2, 3, 4], 8, policy="scaffold-m", beta=0.5, **common))  # fmt: skip
    assert not torch.equal(plain, model([1, 2, 3, 4], 8, policy="fedavg", **common))


@pytest.mark.parametrize("policy", names("federation-policy"))
def test_one_client_is_gradient_descent(policy: str) -> None:
    """With momentum it is gradient descent whose direction moves once in a round."""
    more: dict[str, Any] = {"tick": 4.0} if policy == "fedfix" else {}
    more |= {"buffer": 1} if policy == "fedbuff" else {}
    more |= {"beta": 1.0} if policy.endswith("-m") else {}
    more |= {"min_steps": 4, "max_steps": 4} if policy == "fedcompass" else {}
    x = model([1], 5, optima=[3.0], sizes=[1], policy=policy, steps=4, **more)
    plain = torch.zeros((), dtype=torch.float64)
    for _ in range(20):
        plain -= 0.1 * (plain - 3.0)
    assert float(x) == pytest.approx(float(plain), abs=1e-13)


def test_fedavg_m_with_one_local_step_is_momentum_at_the_server() -> None:
    """``g <- beta mean(gradient) + (1 - beta) g; x <- x - eta g``."""
    x = model([1, 1, 1, 1], 6, policy="fedavg-m", beta=0.2, steps=1, weights="equal")
    plain, direction = 0.0, 0.0
    for number in range(6):
        gradient = plain - sum(OPTIMA) / 4
        # the first round has no direction yet
        direction = 0.2 * gradient + 0.8 * (direction if number else 0.0)
        plain -= 0.1 * direction
    assert float(x) == pytest.approx(plain, abs=1e-12)


def test_fedavg_m_with_one_client_is_momentum() -> None:
    x = model([1], 4, optima=[3.0], sizes=[1], policy="fedavg-m", beta=0.5, steps=2)
    plain, direction = 0.0, 0.0
    for _ in range(4):
        before = plain
        for _ in range(2):
            plain -= 0.1 * (0.5 * (plain - 3.0) + 0.5 * direction)
        direction = (before - plain) / 0.2
    assert float(x) == pytest.approx(plain, abs=1e-12)


def test_scaffold_reaches_the_optimum_of_all() -> None:
    """Clients of different curvature: FedAvg ends elsewhere, SCAFFOLD at the optimum of the weighted objective."""

    class Curved(QuadraticCohort):
        def gradient(self, client: str, x: torch.Tensor) -> torch.Tensor:
            return (4.0 if client == "c0" else 1.0) * (x - self.optima[client])

    def end(policy: str) -> float:
        simulated = clock(Curved([0.0, 5.0]), [1, 1], policy=policy, steps=10)
        simulated.run(60)
        return float(simulated.parameters["x"])

    assert end("scaffold") == pytest.approx(1.0, abs=1e-6)
    assert abs(end("fedavg") - 1.0) > 0.3


@pytest.mark.parametrize("policy", names("federation-policy"))
def test_a_clock_goes_on_from_its_state(policy: str) -> None:
    """Policy, clients, what is in flight and what is buffered: saved in the midst, and gone on with as if never."""
    settings: dict[str, Any] = {"policy": policy, "steps": 3, "seed": 1}
    settings |= {"tick": 4.0} if policy == "fedfix" else {}
    settings |= {"min_steps": 1, "max_steps": 6} if policy == "fedcompass" else {}
    seconds = [1.0, 1.3, 2.1, 4.7]
    whole = clock(QuadraticCohort(OPTIMA, SIZES), seconds, **settings)
    whole.run(9)
    half = clock(QuadraticCohort(OPTIMA, SIZES), seconds, **settings)
    half.run(5)
    state = half.state_dict()
    assert state["doing"] or state["policy"]["own"]
    again = clock(QuadraticCohort(OPTIMA, SIZES), seconds, **settings)
    again.load_state_dict(state)
    again.run(9)
    assert torch.equal(again.parameters["x"], whole.parameters["x"])
    assert again.now == whole.now


@pytest.mark.parametrize("policy", names("federation-policy"))
def test_recorded_events_give_the_same_model(policy: str) -> None:
    """With losses and returns: what a server has recorded is computed again, to the last bit."""
    settings: dict[str, Any] = {"policy": policy, "steps": 3}
    settings |= {"tick": 4.0} if policy == "fedfix" else {}
    settings |= {"min_steps": 1, "max_steps": 6} if policy == "fedcompass" else {}
    seconds = [1.0, 1.3, 2.1, 4.7]
    lost = [("c1", 0), ("c3", 0), ("c2", 2)]
    simulated = clock(QuadraticCohort(OPTIMA, SIZES), seconds, lost, **settings)
    simulated.run(12)
    assert sum(event.kind == "leave" for event in simulated.events) >= 2
    again = clock(QuadraticCohort(OPTIMA, SIZES), seconds, **settings)
    again.replay(simulated.events)
    assert torch.equal(again.parameters["x"], simulated.parameters["x"])
    assert again.events == simulated.events
