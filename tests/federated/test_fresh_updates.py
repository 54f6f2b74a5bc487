"""Stale updates made fresh: nothing at no delay, exact with the true data, better than the stale one, and given up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from weft.federated.fresh_updates import (
    DummyData,
    EstimatedUpdate,
    FreshUpdates,
    KnownUpdate,
    invert_updates,
    local_steps,
)
from weft.federated.policy import ClientUpdate

T = torch.Tensor


def data() -> tuple[T, T]:
    """Eight samples of six values between 0 and 1, all of one class of three."""
    draw = torch.Generator().manual_seed(3)
    return torch.rand(8, 6, dtype=torch.float64, generator=draw), torch.full((8,), 2)


def plain_steps(
    start: dict[str, T], x: T, y: T, steps: int, rate: float
) -> dict[str, T]:
    w, b = start["weight"].clone(), start["bias"].clone()
    for _ in range(steps):
        away = (F.softmax(x @ w.T + b, 1) - F.one_hot(y, 3)) / len(x)
        w, b = w - rate * away.T @ x, b - rate * away.sum(0)
    return {"weight": w, "bias": b}


def models() -> tuple[dict[str, T], dict[str, T]]:
    """The model with which a client began, and the present one, which has forgotten the client's class."""
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(3, 6, dtype=torch.float64, generator=draw) * 0.1
    old = {"weight": weight, "bias": torch.zeros(3, dtype=torch.float64)}
    now = {"weight": old["weight"] + 0.3, "bias": torch.tensor([1.0, 0.5, -3.0]).double()}  # fmt: skip
    return old, now


def difference(end: dict[str, T], start: dict[str, T]) -> dict[str, T]:
    return {name: end[name] - start[name] for name in start}


def test_true_data_give_the_fresh_update() -> None:
    x, y = data()
    _, now = models()
    with torch.enable_grad():
        dummies = DummyData(x, 1e3 * F.one_hot(y, 3).double())
        end = local_steps(nn.Linear(6, 3).double(), now, dummies, 5, 0.3)
    fresh = plain_steps(now, x, y, 5, 0.3)
    assert all(torch.allclose(end[name], fresh[name], atol=1e-9) for name in fresh)


def test_an_estimate_is_nearer_to_the_true_update() -> None:
    """The model has changed; what the client would send now is estimated from what it has sent."""
    x, y = data()
    old, now = models()
    net = nn.Linear(6, 3).double()
    stale = difference(plain_steps(old, x, y, 4, 0.3), old)
    true = difference(plain_steps(now, x, y, 4, 0.3), now)
    update = ClientUpdate("c", 0, 4, 8, stale)
    fresh = FreshUpdates(net, after=3, rate=0.3, low=0.0, high=1.0, iterations=40)
    fresh.keep_model(0, old)
    assert fresh.refreshed(update, 2, now) is update  # not stale enough
    estimate = fresh.refreshed(update, 7, now).difference

    def cosine(values: dict[str, T]) -> float:
        flat = [torch.cat([v[n].flatten() for n in true]) for v in (values, true)]
        return float(F.cosine_similarity(flat[0], flat[1], 0))

    assert cosine(dict(estimate)) > cosine(stale)
    assert sum(float((estimate[n] - true[n]).abs().sum()) for n in true) < 0.9 * sum(
        float((stale[n] - true[n]).abs().sum()) for n in true
    )
    again = FreshUpdates(net, 3, 0.3, 0.0, 1.0, iterations=40)
    again.load_state_dict(fresh.state_dict())
    assert again.state_dict()["estimated"].keys() == {"c"}


def test_estimates_end_when_they_do_not_help() -> None:
    fresh = FreshUpdates(nn.Linear(6, 3).double(), 1, 0.3, 0.0, 1.0, iterations=1)
    old, now = models()
    x, y = data()
    zero = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
    # samples of another class, which would give an update where the true one is nothing
    wrong = DummyData(x, 1e3 * F.one_hot(1 - y // 2, 3).double())
    fresh._estimated["c"] = EstimatedUpdate(7, zero, wrong)
    true = ClientUpdate("c", 7, 1, 8, zero)
    fresh.keep_model(7, old)
    # older work than the estimate's says nothing about it
    fresh.keep_model(6, old)
    assert fresh.refreshed(replace(true, version=6), 0, now).version == 6
    assert not fresh.errors
    assert fresh.refreshed(true, 9, now) is true
    assert fresh.given_up == {"c"} and fresh.errors["c"][0][0] == 0.0


def test_comparisons_add_up() -> None:
    """One update that the model left nothing to do does not outweigh an estimate that was far better before."""
    fresh = FreshUpdates(nn.Linear(6, 3).double(), 1, 0.3, 0.0, 1.0, iterations=1)
    old, now = models()
    x, y = data()
    zero = {name: torch.zeros_like(tensor) for name, tensor in now.items()}
    fresh.errors["c"] = [(9.0, 0.5)]
    wrong = DummyData(x, 1e3 * F.one_hot(1 - y // 2, 3).double())
    fresh._estimated["c"] = EstimatedUpdate(7, zero, wrong)
    fresh.keep_model(7, old)
    fresh.refreshed(ClientUpdate("c", 7, 1, 8, zero), 0, now)
    assert len(fresh.errors["c"]) == 2 and not fresh.given_up


def test_an_update_of_nearly_nothing_leaves_what_was_known() -> None:
    """A client that began with a model that knew its data tells nothing; its earlier update does."""
    x, y = data()
    old, now = models()
    net = nn.Linear(6, 3).double()
    knew = {"weight": old["weight"], "bias": torch.tensor([0.0, 0.0, 9.0]).double()}
    fresh = FreshUpdates(net, after=1, rate=0.3, low=0.0, high=1.0, iterations=40)
    true = difference(plain_steps(now, x, y, 4, 0.3), now)
    for version, start in enumerate((old, knew)):
        fresh.keep_model(version, start)
        sent = difference(plain_steps(start, x, y, 4, 0.3), start)
        update = fresh.refreshed(ClientUpdate("c", version, 4, 8, sent), 5, now)
    assert sum(float(t.abs().sum()) for t in sent.values()) < 0.01
    off = sum(float((update.difference[n] - true[n]).abs().sum()) for n in true)
    assert off < 0.3 * sum(float(t.abs().sum()) for t in true.values())


def test_an_inversion_gives_the_update_back() -> None:
    x, y = data()
    old, _ = models()
    net = nn.Linear(6, 3).double()
    stale = difference(plain_steps(old, x, y, 3, 0.3), old)
    known = KnownUpdate(old, stale, 3)
    dummies = invert_updates(net, [known], 0.3, 0.0, 1.0, iterations=120)
    with torch.enable_grad():
        reached = local_steps(net, old, dummies, 3, 0.3)
    end = {name: tensor.detach() for name, tensor in reached.items()}
    off = sum(float((end[n] - old[n] - stale[n]).abs().sum()) for n in stale)
    assert off < 0.2 * sum(float(t.abs().sum()) for t in stale.values())
    assert float(dummies.inputs.min()) >= 0 and float(dummies.inputs.max()) <= 1
    assert np.isfinite(dummies.logits.numpy()).all()


def test_a_run_that_goes_on_with_fresh_updates_learns_anew() -> None:
    """What began before is left as it came, because nobody has kept the model with which it began."""
    fresh = FreshUpdates(nn.Linear(6, 3).double(), 1, 0.3, 0.0, 1.0, iterations=1)
    earlier = {"models": [], "estimated": {"c": [1, {}, {}]}, "errors": {}, "given_up": []}  # fmt: skip
    for state in ({}, earlier):
        fresh.load_state_dict(state)
        old, now = models()
        update = ClientUpdate("c", 1, 1, 8, difference(old, now))
        assert fresh.refreshed(update, 5, now) is update
