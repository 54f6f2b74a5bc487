"""PPO with a critic: advantages, both losses and all gradients equal TRL's (tests/rl/record_trl_ppo.py)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.rl import record_trl_ppo as recorded
from tests.rl.test_trl_losses import mixed, model_of
from tests.train import trl_peer
from weft.data.loader import Loader
from weft.data.order import RowList
from weft.data.policy_rows import PolicySample, policy_rows
from weft.layout.mesh import Mesh
from weft.models.policy_loss import PolicyObjective
from weft.recipe import PolicyLoss, policy_loss
from weft.rl.advantages import ScoredAnswer, token_advantages
from weft.rl.log_probabilities import token_readings
from weft.shapes.foreign_names import hf_name
from weft.train.step import accumulate

RECORDED = json.loads(recorded.RECORDED.read_text())
MESH = Mesh.single(torch.device("cpu"))
SETTINGS = policy_loss(
    "ppo",
    {
        "discount": recorded.SETTINGS["gamma"],
        "trace": recorded.SETTINGS["lam"],
        "kl_weight": recorded.SETTINGS["kl_coef"],
        "clip_low": recorded.SETTINGS["cliprange"],
        "clip_high": recorded.SETTINGS["cliprange"],
        "value_clip": recorded.SETTINGS["cliprange_value"],
        "value_weight": recorded.SETTINGS["vf_coef"],
    },
)


def texts() -> list[tuple[list[int], list[bool]]]:
    both = zip(recorded.PROMPTS, recorded.ANSWERS, strict=True)
    return [(p + a, [False] * len(p) + [True] * len(a)) for p, a in both]


def samples(settings: PolicyLoss = SETTINGS) -> list[PolicySample]:
    """The recorded answers, with log-probabilities, values, advantages and returns by Weft."""
    old, reference = (
        token_readings(*model_of(values), MESH, texts()).log_probabilities
        for values in (mixed(), mixed(s2=recorded.AWAY))
    )
    critic = model_of(mixed(4), shape=recorded.SCORER)
    values = token_readings(*critic, MESH, texts()).values
    answers = [
        ScoredAnswer(score, np.array(learns), *numbers)
        for score, (_, learns), *numbers in zip(
            recorded.SCORES, texts(), old, reference, values, strict=True
        )
    ]
    (tokens,) = token_advantages([answers], settings)
    return [
        PolicySample(
            np.array(ids), np.array(learns), t.advantage, None, o, r, t.returns, v
        )
        for (ids, learns), t, o, r, v in zip(
            texts(), tokens, old, reference, values, strict=True
        )
    ]


def step(model: Any, state: Any, rows: RowList) -> tuple[float, dict[str, float]]:
    """The loss of a step of passes with a row each, and the norms of gradients by Hugging Face's names."""
    loader = Loader(rows, MESH.layout, 0, 0, rows.total, 1, rows.total, 16)
    loss = accumulate(model, state, loader.step(0) or [], MESH).item()
    shape = model.shape
    grads = state.gradients().items()
    return loss, {hf_name(name, shape): grad.norm().item() for name, grad in grads}


def test_policy_and_critic_are_trls() -> None:
    rows = policy_rows(samples(), 16, SETTINGS)
    objective = PolicyObjective(SETTINGS)
    metrics = RECORDED["metrics"]
    policy = model_of(mixed(s3=recorded.MOVED), objective)
    critic = model_of(
        mixed(4, s6=recorded.MOVED_CRITIC), objective, shape=recorded.SCORER
    )
    of_policy, norms = step(*policy, rows)
    of_critic, critic_norms = step(*critic, rows)
    assert of_policy == pytest.approx(metrics["loss/policy_avg"], rel=1e-5)
    weight = SETTINGS.value_weight
    assert of_critic == pytest.approx(weight * metrics["loss/value_avg"], rel=1e-5)
    for ours, theirs in ((norms, RECORDED["policy"]), (critic_norms, RECORDED["critic"])):  # fmt: skip
        assert ours.keys() == theirs.keys()
        for name, norm in theirs.items():
            assert ours[name] == pytest.approx(norm, rel=1e-5), name
    figures = objective.figures.take(MESH)
    clipped = figures["policy.clipped_low"] + figures["policy.clipped_high"]
    assert clipped == pytest.approx(metrics["policy/clipfrac_avg"])
    assert 0 < figures["policy.value_clipped"] < 1
    assert 0 < metrics["val/clipfrac_avg"] < 1


def test_a_shared_trunk_learns_from_both() -> None:
    """Its gradients are the sums of those of the policy and of a critic that has the same trunk and head."""
    rows = policy_rows(samples(), 16, SETTINGS)
    objective = PolicyObjective(SETTINGS)

    def grads(shape: Any, values: Any) -> tuple[float, dict[str, torch.Tensor]]:
        model, state = model_of(values, objective, shape=shape)
        loader = Loader(rows, MESH.layout, 0, 0, rows.total, 1, rows.total, 16)
        loss = accumulate(model, state, loader.step(0) or [], MESH).item()
        return loss, {n: g.clone() for n, g in state.gradients().items()}

    values = mixed(s3=recorded.MOVED)

    def with_head(name: str, *place: Any) -> torch.Tensor:
        return values("head" if name == "value_head" else name, *place)

    both = trl_peer.SHAPE.model_copy(update={"value_head": True})
    loss, together = grads(both, with_head)
    of_policy, first = grads(trl_peer.SHAPE, values)
    of_critic, second = grads(recorded.SCORER, values)
    assert loss == pytest.approx(of_policy + of_critic, rel=1e-12)
    for name, grad in together.items():
        parts = [first[name]] if name in first else []
        if name == "value_head":
            parts = [second["head"]]
        elif name != "head":
            parts = [first[name], second[name]]
        torch.testing.assert_close(grad, sum(parts), rtol=1e-10, atol=1e-13, msg=name)
