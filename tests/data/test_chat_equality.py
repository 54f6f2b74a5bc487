"""Conversations of unequal length, partly learned and unequally weighted: every layout equals one device."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import recipe
from tests.conftest import Command
from tests.prove.test_equality import difference
from weft.data.loader import open_data
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import build_recipe
from weft.train.setup import prepare
from weft.train.step import evaluate, pass_loss

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content }}"
    "{{ eos_token if m.role == 'assistant' else ';' }}{% endfor %}"
)
LAYOUTS: list[dict[str, Any]] = [
    {"shard": 2},
    {"dp": 3},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "schedule": "zb-h1", "vocab_barriers": 1},
    {"cp": 2, "context": "zigzag"},
    {"shard": 2, "cp": 2, "balance": "greedy", "zero": 1},
    pytest.param({"pp": 2, "vocab_barriers": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param(
        {"shard": 2, "cp": 2, "tp": 2, "context": "ulysses"}, marks=pytest.mark.slow
    ),
    pytest.param({"pp": 2, "shard": 2, "schedule": "1f1b"}, marks=pytest.mark.slow),
]  # type: ignore[list-item]


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny recipe of conversations whose answers weigh 0, 1, 0.25 and 3 times those of others."""
    folder = tmp_path_factory.mktemp("talks")
    rng = random.Random(3)
    with (folder / "talks.jsonl").open("w") as file:
        for _ in range(60):
            texts = [
                "".join(rng.choice("abc ") for _ in range(rng.randrange(4))) + "x"
                for _ in range(4)
            ]
            talk = [
                {"role": ("user", "assistant")[i % 2], "content": text}
                for i, text in enumerate(texts)
            ]
            talk[1]["weight"] = rng.choice([0, 1, 0.25])
            file.write(
                json.dumps({"messages": talk, "weight": rng.choice([1, 3])}) + "\n"
            )
    source = [{"kind": "chat", "path": str(folder / "talks.jsonl")}]
    made = recipe(
        source[0]["path"],
        data__sources=source,
        data__seq_len=41,
        data__chat={"template": TEMPLATE},
    )
    return made.model_dump(mode="json")


def under(values: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    return values | {"layout": layout}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equal_to_one_device(
    pool: Any, values: dict[str, Any], layout: dict[str, Any]
) -> None:
    found = pool.run(Layout(**layout).world, difference, under(values, layout))[0]
    assert found.ok, found


def test_the_loss_is_the_weighted_mean(values: dict[str, Any]) -> None:
    """Against PyTorch's own cross entropy, and unlike the plain mean, so that a weight that got lost would show."""
    job = prepare(build_recipe(values))
    mesh = Mesh.single(torch.device("cpu"))
    model, state = parallelize(job.shape, mesh, job.recipe.train, None, 41)
    assert isinstance(model, Transformer)
    (batch,) = job.loader(job.corpus.train, mesh).step(0) or []
    assert (
        batch.weights is not None
        and len({*batch.weights[batch.labels >= 0].tolist()}) > 2
    )
    logits = model(batch.tokens, batch.positions, batch.cu_seqlens).flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(
        logits, batch.labels.flatten(), reduction="none", ignore_index=-100
    )
    weights = torch.where(batch.labels >= 0, batch.weights, 0).double().flatten()
    wanted = (losses * weights).sum() / weights.sum()
    share = pass_loss(model, batch, torch.tensor(batch.label_weight), mesh)
    torch.testing.assert_close(share, wanted, rtol=1e-12, atol=0)
    assert evaluate(model, state, [[batch]], mesh) == pytest.approx(
        wanted.item(), rel=1e-12
    )
    assert abs(wanted.item() / (losses.sum() / batch.real_tokens).item() - 1) > 1e-4
    share.backward()
    mine = {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    model.zero_grad()
    wanted.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(mine[name], p.grad, rtol=1e-9, atol=1e-13)
    # all below one in sum: still the mean
    light = replace(batch, weights=batch.weights * 1e-3)
    share = pass_loss(model, light, torch.tensor(light.label_weight), mesh)
    torch.testing.assert_close(share, wanted, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_verify_takes_chat_recipes(
    launched: Command, values: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "chat.toml"
    data = values["data"]
    file.write_text(
        f"[model]\nlayers = 1\nembed = 16\nheads = 2\n[train]\nbatch = 3\n[data]\nkind = 'chat'\n"
        f"path = {data['sources'][0]['path']!r}\nseq_len = 41\ncache = {data['cache']!r}\n"
        f"[data.chat]\ntemplate = {json.dumps(TEMPLATE)}\n"
    )
    code, out, err = launched("verify", file, "--layout", "shard=2", "--steps", 2)
    assert code == 0, out + err
    assert launched("verify", file, "--layout", "shard=2,tp=2", "--types")[0] == 0
    assert "60 conversations" in open_data(build_recipe(values).data).description
