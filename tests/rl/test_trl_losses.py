"""Advantages, losses and gradients of every method equal TRL's on recorded answers (tests/rl/record_trl.py)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl import record_trl as recorded
from tests.train import trl_peer
from weft.data.loader import Loader
from weft.data.policy_rows import PolicySample, policy_rows
from weft.layout.dims import Box, Logical, whole_box
from weft.layout.mesh import Mesh
from weft.models.hooks import Hooks
from weft.models.policy_loss import PolicyObjective
from weft.recipe import ModelShape, PolicyLoss, Train, policy_loss
from weft.rl.advantages import ScoredAnswer, token_advantages
from weft.rl.log_probabilities import token_log_probabilities
from weft.shapes.foreign_names import hf_name
from weft.train.step import accumulate

RECORDED = json.loads(recorded.RECORDED.read_text())
SHAPE = trl_peer.SHAPE


def mixed(base: int = 1, **shares: float) -> Any:
    """Values of a model: those of a seed plus shares of those of other seeds."""

    def of(name: str, logical: Logical, box: Box) -> torch.Tensor:
        total = trl_peer.values(base)(name, logical, box)
        for seed, share in shares.items():
            total = total + share * trl_peer.values(int(seed[1:]))(name, logical, box)
        return total

    return of


def model_of(
    values: Any, objective: PolicyObjective | None = None, shape: ModelShape = SHAPE
) -> Any:
    """A model with these values, and its state."""
    from weft.parallel.build import parallelize
    from weft.recipe import Memory

    mesh = Mesh.single(torch.device("cpu"))
    return parallelize(
        shape, mesh, Train(dtype="float64"), values, 64, Memory(), hooks=Hooks(objective=objective)
    )  # fmt: skip


def texts() -> list[tuple[list[int], list[bool]]]:
    pairs = []
    for i, answer in enumerate(recorded.ANSWERS):
        prompt = recorded.PROMPTS[i // recorded.GROUP]
        learns = [False] * len(prompt) + [True] * len(answer)
        pairs.append((prompt + answer, learns))
    return pairs


@cache
def known() -> list[list[np.ndarray]]:
    """Log-probabilities of the answers under the policy that sampled them, and under the reference model."""
    mesh = Mesh.single(torch.device("cpu"))
    columns = []
    for values in (mixed(), mixed(s2=recorded.AWAY)):
        model, state = model_of(values)
        columns.append(token_log_probabilities(model, state, mesh, texts(), room=64))
    return columns


def settings_of(name: str) -> PolicyLoss:
    method, changes, _ = recorded.CASES[name]
    return policy_loss(method, changes)


def tokens_of(name: str) -> list[PolicySample]:
    """The recorded answers as samples, with Weft's advantages."""
    settings, (old, reference) = settings_of(name), known()
    flat = []
    for i, (ids, learns) in enumerate(texts()):
        rewards = [column[i] for column in recorded.REWARDS]
        judged = [np.nan if reward is None else reward for reward in rewards]
        flat.append(ScoredAnswer(judged, np.array(learns), old[i], reference[i]))
        assert len(ids) == len(learns)
    groups = [flat[: recorded.GROUP], flat[recorded.GROUP :]]
    found = token_advantages(groups, settings, recorded.WEIGHTS)
    samples = []
    for i, tokens in enumerate(t for group in found for t in group):
        ids, learns = texts()[i]
        sampler = np.zeros(len(ids))
        sampler[np.array(learns)] = RECORDED[name]["sampled"][i]
        if recorded.CASES[name][0] == "rloo":
            sampler = old[i]
        samples.append(
            PolicySample(np.array(ids), np.array(learns), tokens.advantage, sampler, old[i], reference[i])
        )  # fmt: skip
    return samples


@pytest.mark.parametrize("name", recorded.CASES)
def test_advantages_losses_and_gradients_are_trls(name: str) -> None:
    given, settings, samples = RECORDED[name], settings_of(name), tokens_of(name)
    ours = [sample.advantage[-1] for sample in samples]
    assert ours == pytest.approx(given["advantages"], rel=1e-5, abs=1e-6)
    mesh = Mesh.single(torch.device("cpu"))
    objective = PolicyObjective(settings)
    model, state = model_of(mixed(s3=recorded.MOVED), objective)
    rows = policy_rows(samples, 40, settings)
    loader = Loader(rows, mesh.layout, 0, 0, rows.total, 1, rows.total, 40)
    loss = accumulate(model, state, loader.step(0) or [], mesh)
    assert loss.item() == pytest.approx(given["loss"], rel=1e-5, abs=1e-6)
    direction, logical = trl_peer.values(recorded.DIRECTION), dict(model.logical_parameters())  # fmt: skip
    norms, products = {}, {}
    for key, grad in state.gradients().items():
        theirs = hf_name(key, SHAPE)
        norms[theirs] = grad.norm().item()
        along = direction(key, logical[key], whole_box(grad.shape))
        products[theirs] = (grad * along).sum().item()
    assert norms.keys() == given["norms"].keys()
    scale = max(given["norms"].values())
    for key, norm in given["norms"].items():
        assert norms[key] == pytest.approx(norm, rel=1e-5, abs=1e-7 * scale), key
        assert products[key] == pytest.approx(
            given["products"][key], rel=1e-5, abs=1e-5 * norm + 1e-7 * scale
        ), key


def test_the_cases_reach_what_they_are_about() -> None:
    """Some tokens are clipped and some corrected, not all, or equality would say little."""
    for name in recorded.CASES:
        settings = settings_of(name)
        mesh, objective = Mesh.single(torch.device("cpu")), PolicyObjective(settings)
        model, state = model_of(mixed(s3=recorded.MOVED), objective)
        rows = policy_rows(tokens_of(name), 40, settings)
        loader = Loader(rows, mesh.layout, 0, 0, rows.total, rows.total, 1, 40)
        accumulate(model, state, loader.step(0) or [], mesh)
        figures = objective.figures.take(mesh)
        clipped = figures["policy.clipped_low"] + figures["policy.clipped_high"]
        assert 0 < clipped < 1, (name, figures)
        if settings.correction.weight != "none":
            assert 0 < figures["policy.corrected"] < 1, (name, figures)
        if settings.needs_reference:
            assert figures["policy.kl"] != 0


@pytest.mark.slow
def test_the_record_is_what_trl_says_today() -> None:
    pytest.importorskip("trl")
    again = recorded.record()
    for name, given in RECORDED.items():
        assert again[name]["loss"] == pytest.approx(given["loss"], rel=1e-6), name
