"""Simulated clients with classifiers: computed at once as one by one, and what the policies are worth on digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from weft.federated import classifier_cohort
from weft.federated.classifier_cohort import ClassifierCohort
from weft.federated.client_partition import draw_partition
from weft.federated.labelled_samples import LabelledSamples
from weft.federated.policy import AssignedWork, ClientStep

T = torch.Tensor


def cohort(clients: int = 3, seed: int = 0) -> ClassifierCohort:
    draw = np.random.default_rng(0)
    samples = LabelledSamples(draw.normal(size=(40, 5)).astype(np.float32), np.arange(40) % 4)  # fmt: skip
    partition = draw_partition("dirichlet", clients, samples.labels)
    return ClassifierCohort(nn.Linear(5, 4).double(), samples, partition, 6, 0.1, seed)


def start() -> dict[str, T]:
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(4, 5, dtype=torch.float64, generator=draw)
    return {"weight": weight, "bias": torch.zeros(4, dtype=torch.float64)}


def test_local_steps_are_those_of_a_plain_program() -> None:
    """SCAFFOLD-M's corrected gradients, with a control variate from the work before."""
    clients, parameters = cohort(), start()
    step = ClientStep(0.3, control=True)
    sent = {
        "direction": {n: torch.full_like(p, 0.1) for n, p in parameters.items()},
        "control": {n: torch.full_like(p, -0.2) for n, p in parameters.items()},
    }
    own = {n: torch.zeros_like(p) for n, p in parameters.items()}
    for version in (4, 5):
        (result,) = clients.train([AssignedWork("client-1", 3)], version, parameters, sent, step)  # fmt: skip
        rows = clients._draw(["client-1"], version, 3)[0]
        w, b = (parameters[n].clone() for n in ("weight", "bias"))
        sums = {n: torch.zeros_like(p) for n, p in parameters.items()}
        for number in range(3):
            x, y = clients.features[rows[number]], clients.labels[rows[number]]
            away = (torch.softmax(x @ w.T + b, 1) - torch.eye(4).double()[y]) / 6
            gradients = {"weight": away.T @ x, "bias": away.sum(0)}
            for name, tensor in (("weight", w), ("bias", b)):
                sums[name] += gradients[name]
                corrected = gradients[name] - own[name] - 0.2
                tensor -= 0.1 * (0.3 * corrected + 0.7 * 0.1)
        assert torch.allclose(result.difference["weight"], w - parameters["weight"], atol=1e-12)  # fmt: skip
        assert torch.allclose(result.difference["bias"], b - parameters["bias"], atol=1e-12)  # fmt: skip
        moved = sums["weight"] / 3 - own["weight"]
        assert torch.allclose(result.extra["control"]["weight"], moved, atol=1e-12)
        assert result.rates == pytest.approx(0.3)
        clients.settle("client-1", accepted=True)
        own = {n: s / 3 for n, s in sums.items()}
        assert set(rows.flatten()) <= set(clients.rows["client-1"])


def test_an_update_that_is_not_taken_leaves_no_trace() -> None:
    clients, parameters = cohort(), start()
    step = ClientStep(control=True)
    (first,) = clients.train([AssignedWork("client-0", 2)], 0, parameters, {}, step)
    clients.settle("client-0", accepted=False)
    (again,) = clients.train([AssignedWork("client-0", 2)], 0, parameters, {}, step)
    assert torch.equal(first.difference["weight"], again.difference["weight"])
    assert not clients.controls


@pytest.mark.slow(5)
def test_many_clients_at_once_are_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = [AssignedWork(client, 4) for client in cohort().names()]
    plain = cohort().train(work, 2, start(), {}, ClientStep())
    monkeypatch.setattr(classifier_cohort, "FEW", 0)
    monkeypatch.setattr(classifier_cohort, "TOGETHER", 2)
    together = cohort().train(work, 2, start(), {}, ClientStep())
    for one_by_one, at_once in zip(plain, together, strict=True):
        for name in start():
            assert torch.allclose(one_by_one.difference[name], at_once.difference[name], atol=1e-12)  # fmt: skip
        assert one_by_one.loss == pytest.approx(at_once.loss)
