"""DADAO: fewer exchanges than synchronous gossip; processes that send messages are the simulation to the last bit."""

from itertools import pairwise

import numpy as np
import pytest

from examples.dadao import Method, X, extra, problem, ring, run, simulate


def setting() -> tuple[Method, list[float]]:
    gradients, _ = problem()
    smooth = max(one.smooth for one in gradients)
    return Method(gradients[0].decay, smooth, ring(8)), [
        1 / smooth,
        1.25 / smooth,
        1.4 / smooth,
    ]


@pytest.mark.slow
def test_fewer_exchanges_than_synchronous_gossip() -> None:
    """To 1e-6 of suboptimality on 8 nodes, with no more gradients than gossip needs at the best of its steps."""
    (gradients, apart), (method, steps) = problem(), setting()
    _, course = simulate(method, gradients, 10, seed=0, horizon=1700, apart=apart)
    computed, exchanged = course.until(1e-6)
    gossip = [extra(gradients, method.graph, 10, step, 4000, apart) for step in steps]
    there = [found.until(1e-6) for found in gossip if found.apart[-1] < 1e-6]
    assert there, "synchronous gossip gets there, too"
    assert computed < 0.7 * min(count for count, _ in there)
    assert exchanged < 0.8 * min(count for _, count in there)


def test_processes_are_the_simulation() -> None:
    """8 processes that only talk to their neighbours, each at its own pace: the same states, and so many bytes."""
    (gradients, _), (method, _) = problem(), setting()
    wanted, _ = simulate(method, gradients, 10, seed=3, horizon=20)
    found, sent = run(method, gradients, 10, seed=3, horizon=20)
    assert np.array_equal(found, wanted) and np.ptp(found[:, X, 0]) > 0
    exchanges = sum(len(event.nodes) == 2 for event in method.events(3, 20))
    assert sent == exchanges * 2 * 10 * 8


def test_states_between_events_follow_their_equation() -> None:
    """The flow of a time is that of its parts, and begins as the published equation says."""
    method, _ = setting()
    assert np.allclose(
        method.flow(0.3) @ method.flow(1.2), method.flow(1.5), atol=1e-12
    )
    root, small = (method.strong / 2 / method.smooth) ** 0.5, 1e-6
    state = np.arange(1.0, 7.0)
    x, far_x, y, far_y, z, far_z = state
    rates = [root / 8 * (far_x - x), root / 8 * (x - far_x), root / 4 * (far_y - y),
             -(y + z + method.shift * far_x) / (2 * root), root / 4 * (far_z - z), root / 8 * (z - far_z)]  # fmt: skip
    assert np.allclose((method.flow(small) @ state - state) / small, rates, atol=1e-4)


def test_clocks_tick_as_often_as_they_should() -> None:
    method, _ = setting()
    events = list(method.events(1, 500))
    computed = sum(len(event.nodes) == 1 for event in events)
    assert computed == pytest.approx(8 * 500, rel=0.05)
    assert len(events) - computed == pytest.approx(method.exchanges * 500, rel=0.05)
    assert all(a.time < b.time for a, b in pairwise(events))
