"""Prompts that answers share are computed once: fewer tokens, and the same loss and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.cases import recipe, write_corpus
from tests.rl.test_rl_loader import recipe as rl_recipe
from weft.data.batch import Batch
from weft.data.loader import Loader
from weft.data.order import RowList
from weft.data.policy_rows import PolicySample, policy_rows
from weft.data.shared_prompts import share_prompts
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models import prompt_attention
from weft.models.hooks import Hooks
from weft.models.policy_loss import PolicyObjective
from weft.recipe import PolicyLoss, Recipe
from weft.rl.recorded_loader import row_batches, shares_prompts
from weft.train.setup import build_for_training, prepare
from weft.train.step import accumulate

#: Lengths of prompts, and of the answers to each; the first prompt is computed with its only answer.
GROUPS = ((4, (5,)), (6, (3, 3, 8)), (1, (2, 2)), (9, (1, 4)))
#: The layout of one device.
ALONE = Layout()
#: Tokens that the prompts but the last of each group would compute again. A prompt's last token is computed anyway.
SPARED = 5 * 2 + 0 + 8


def samples() -> list[PolicySample]:
    """Answers of all groups in mixed order, one of two turns, and one from which nothing is learned."""
    rng = np.random.default_rng(5)
    listed = list[PolicySample]()
    for prompt, answers in GROUPS:
        ids = rng.integers(0, 257, prompt)
        for length in answers:
            n = prompt + length
            learns = np.arange(n) >= prompt
            if length == 8:
                learns[-2] = False
            near = -5.5 + 0.1 * rng.standard_normal((5, n))
            listed.append(
                PolicySample(
                    np.concatenate([ids, rng.integers(0, 257, length)]),
                    learns,
                    np.full(n, rng.standard_normal()),
                    *near[:3],
                    returns=near[3],
                    values=0.4 * near[4],
                )
            )
    listed[4] = replace(listed[4], learns=np.zeros_like(listed[4].learns))
    return [listed[i] for i in rng.permutation(len(listed))]


def joined(settings: PolicyLoss) -> Batch:
    rows = [row for s in samples() for row in policy_rows([s], 99, settings).rows]
    count, mesh = len(rows), Mesh.single()
    loader = Loader(
        RowList(rows), mesh.layout, 0, 0, count, count, 1, 99, joined=True
    )  # fmt: skip
    (batch,) = loader.step(0) or []
    return batch


def learned(batch: Batch, values: Recipe, settings: PolicyLoss) -> dict[str, Any]:
    """Loss, gradients and figures of a pass over ``batch``."""
    mesh, job = Mesh.single(torch.device("cpu")), prepare(values)
    shape = job.shape.model_copy(update={"value_head": True})
    objective = PolicyObjective(settings)
    with mock.patch("weft.train.setup.hooks_of", lambda *_: Hooks(objective=objective)):
        model, state = build_for_training(shape, mesh, values)
    loss = accumulate(model, state, [batch], mesh)
    grads = {name: grad.clone() for name, grad in state.gradients().items()}
    return {"loss": loss, **grads, **objective.figures.take(mesh)}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return recipe(write_corpus(tmp_path_factory.mktemp("prompts")))


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize(
    "loss", [{"normaliser": "sequence", "kl": "k3", "kl_weight": 0.1},
             {"ratio": "sequence", "entropy": 0.05, "advantage": "gae", "value_weight": 0.5}],
    ids=["grpo", "critic"],
)  # fmt: skip
def test_loss_and_gradients_are_the_same(
    values: Recipe, loss: dict[str, Any], multiple: int
) -> None:
    settings = PolicyLoss(**loss)
    whole = joined(settings)
    shared = share_prompts(whole, multiple)
    fewer = whole.tokens.numel() - SPARED
    assert shared.document_tokens == fewer
    assert shared.tokens.shape == (1, -(-fewer // multiple) * multiple)
    assert shared.real_tokens == whole.real_tokens
    expected, ours = (learned(each, values, settings) for each in (whole, shared))
    for key, value in expected.items():
        torch.testing.assert_close(
            torch.as_tensor(ours[key]), torch.as_tensor(value), rtol=1e-10, atol=1e-14, msg=key
        )  # fmt: skip


def test_an_answer_that_does_not_see_its_prompt_is_noticed(
    values: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail, in the forward and in the backward pass."""
    settings = PolicyLoss()
    whole = joined(settings)
    expected = learned(whole, values, settings)
    parts = prompt_attention.prompt_parts

    def blind(*given: Any) -> Any:
        return parts(*given)._replace(seen=[])

    monkeypatch.setattr(prompt_attention, "prompt_parts", blind)
    ours = learned(share_prompts(whole), values, settings)
    name = "blocks.0.attention.wv"
    assert (ours[name] - expected[name]).norm() > 1e-3 * expected[name].norm()


def test_rows_that_share_little_stay() -> None:
    whole = joined(PolicyLoss())
    shared = share_prompts(whole)
    assert shared is not whole and share_prompts(shared) is shared
    supervised = replace(whole, rollout=None)
    assert share_prompts(supervised) is supervised


def test_a_run_shares_prompts_unless_it_is_told_not_to() -> None:
    mesh, dims = Mesh.single(), dict[bool, int]()
    for shares in (True, False):
        job: Any = prepare(rl_recipe(rl={"share_prompts": shares}))
        rows = [row for s in samples() for row in policy_rows([s], 99, job.loss).rows]
        (batch,) = row_batches(job, mesh, rows, 0)
        dims[shares] = batch.cu_seqlens.dim()
    assert dims == {True: 2, False: 1}


def test_what_cannot_share_prompts_does_not() -> None:
    """The layout that counts is that of the model that computes, such as the reference's own."""
    job: Any = prepare(rl_recipe())
    critic = {"trunk": "own"}

    def shares(layout: Layout = ALONE, **other: Any) -> bool:
        given = replace(job, recipe=rl_recipe(**other)) if other else job
        return shares_prompts(given, layout, job.shape)

    overlap = Layout(tp=2, overlap="tokens")
    assert shares() and shares(Layout(tp=2)) and not shares(overlap)
    overlapped = rl_recipe(layout={"tp": 2, "overlap": "tokens"})
    assert shares_prompts(replace(job, recipe=overlapped), ALONE, job.shape)
    assert not shares(train={"compile": True})
    assert not shares(rl={"method": "ppo"}, roles={"critic": critic})
    apart = critic | {"ranks": 1}
    assert shares(rl={"method": "ppo"}, roles={"critic": apart})
