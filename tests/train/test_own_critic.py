"""A critic with layers of its own: its steps in plain PyTorch, under layouts, and its first weights.

Runs with one are resumed in tests/rl/test_critic_processes.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.checkpoint.store import open_checkpoint
from weft.data.batch import IGNORE
from weft.errors import WeftError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.parts import TORCH_DTYPES, Part
from weft.prove.equality import Difference, compare_with_one_device, run_layout
from weft.recipe import Recipe, build_recipe
from weft.rl.critic_start import start_critic
from weft.train import own_critic
from weft.train.build_step import build_step
from weft.train.own_critic import CriticStep, critic_of
from weft.train.setup import build_for_training, prepare
from weft.train.step import Step, StepContext
from weft.train.step_values import MOST_SKIPPED, StepResult

TREE: dict[str, Any] = {
    "model": {"layers": 2, "embed": 16, "heads": 2, "ffn": 24, "tied": True},
    "data": {"seq_len": 16},
    "tasks": [{"reward": "addition", "digits": 1, "every": 0, "limit": 8}],
    "rl": {"method": "ppo", "group": 4, "tokens": 3, "loss": {"value_weight": 0.7}},
    "roles": {
        "critic": {"trunk": "own", "optimizer": {"lr": 3e-2, "warmup": 2, "clip": 0.05}}
    },
    "train": {"steps": 6, "batch": 8, "threads": 1, "dtype": "float64"},
    "optimizer": {"lr": 1e-2, "warmup": 1, "schedule": "constant"},
    "validation": {"every": 0},
    "checkpoint": {"every": 0},
}


def recipe(**sections: Any) -> Recipe:
    tree = json.loads(json.dumps(TREE))
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values if isinstance(values, dict) else values
    return build_recipe(tree)


def plain_losses(model: Any, batches: Any, settings: Any) -> torch.Tensor:
    """The critic's loss of a step in plain PyTorch: token by token, from the scores that the model gives each token."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        scores = model(batch.tokens, batch.positions, batch.cu_seqlens)[..., 0]
        for at in (batch.labels != IGNORE).nonzero().tolist():
            value, kept = scores[tuple(at)], batch.rollout
            old, due = kept.values[tuple(at)], kept.returns[tuple(at)]
            near = torch.clamp(
                value, old - settings.value_clip, old + settings.value_clip
            )
            total = total + torch.maximum((value - due) ** 2, (near - due) ** 2) / 2
            tokens += 1
    return settings.value_weight * total / tokens


def test_steps_are_those_of_plain_pytorch() -> None:
    """Three steps of a critic beside its policy, with rates and a clip of its own, by autograd and torch's AdamW."""
    given, mesh = recipe(), Mesh.single()
    job = prepare(given)
    built = build_for_training(job.shape, mesh, given)
    critic = critic_of(built.state)
    assert critic is not None and critic.model.shape.output == "score"
    step = build_step(StepContext(*built, mesh), given)
    other = critic_of(build_for_training(job.shape, mesh, given).state)
    assert other is not None
    parameters = dict(other.model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if (p.ndim > 1) is matrices], "weight_decay": decay}
        for matrices, decay in ((True, 0.1), (False, 0.0))
    ]  # fmt: skip
    plain = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    loader = job.loader(job.corpus.train, mesh)
    for number, rate in enumerate((1.5e-2, 3e-2, 3e-2)):
        batches = loader.step(number * 8)
        step.take(batches, 1e-2)
        plain.zero_grad()
        plain_losses(other.model, batches, given.rl.policy_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 0.05)
        assert norm > 0.05
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()
    begun = {h.name: h for h in built.state.held}
    for name, parameter in critic.model.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], rtol=1e-10, atol=1e-12)
        if name in begun and begun[name].logical.shape == parameter.shape:
            assert not torch.equal(parameter, begun[name].local)


def difference(layout: dict[str, Any]) -> tuple[Difference | None, int]:
    """What differs from one device, and how many of the critic's parameters were compared."""
    given = recipe(layout=layout)
    mesh, job = Mesh.create(given.layout, "cpu"), prepare(given)
    trace = run_layout(job, mesh, steps=2)
    of_critic = sum(name.startswith("critic.") for name in trace.params)
    return compare_with_one_device(trace, job, mesh), of_critic


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2},
        {"pp": 2},
        pytest.param({"shard": 2}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2, "schedule": "zb-h1"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equal_to_one_device(pool: Any, layout: dict[str, Any]) -> None:
    found, compared = pool.run(Layout(**layout).world, difference, layout)[0]
    assert found.ok and compared > 3, found


def started(layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's parts of policy and critic, after the policy has moved and the critic has begun as it."""
    given = recipe(layout=layout)
    mesh = Mesh.create(given.layout, "cpu") if layout else Mesh.single()
    built = build_for_training(prepare(given).shape, mesh, given)
    critic = critic_of(built.state)
    assert critic is not None
    for h in built.state.held:
        h.local.add_(0.5)
    start_critic(built.state, critic.state, mesh)
    return {name: part.values.clone() for name, part in built.state.parts().items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"pp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_the_critic_begins_as_the_policy_is(pool: Any, layout: dict[str, Any]) -> None:
    parts = pool.run(2, started, layout) if layout else [started(layout)]
    policy, critic = {}, {}
    for name, values in (item for each in parts for item in each.items()):
        of, _, parameter = name.rpartition("model.")
        if "optimizer." not in name:
            (critic if of else policy)[parameter] = values
    head = critic.pop("head")
    assert critic.keys() == policy.keys() and head.shape == (1, 16)
    assert all(torch.equal(critic[name], policy[name]) for name in policy)


def tensors(checkpoint: Any) -> dict[str, torch.Tensor]:
    opened = open_checkpoint(str(checkpoint))
    read = {}
    for name, about in opened.tensors.items():
        box = tuple((0, n) for n in about.shape)
        read[name] = torch.empty(about.shape, dtype=TORCH_DTYPES[about.dtype])
        opened.load({name: Part(read[name], box, about)})
    return read


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    def said(**critic: Any) -> str:
        with pytest.raises(WeftError) as error:
            prepare(recipe(roles={"critic": {"trunk": "own"} | critic}))
        return str(error.value)

    assert "roles.critic.optimizer.in_backward is about how steps" in said(
        optimizer={"in_backward": True}
    )
    assert (
        "roles.critic.optimizer" in (line := said(optimizer={"lrr": 1}))
        and "lrr" in line
    )
    assert said(model=str(tmp_path / "no")).startswith("roles.critic.model: ")
    given = recipe()
    settings = given.roles.critic.optimizer_settings(given.optimizer)
    assert (settings.lr, settings.clip, settings.kind) == (3e-2, 0.05, "adamw")
    assert not prepare(given).shape.value_head


@pytest.mark.parametrize("critic", ["", "judge"])
def test_a_named_critic_begins_with_its_weights_under_any_policy(
    monkeypatch: pytest.MonkeyPatch, critic: str
) -> None:
    """Also where model.from is a configuration, so that the policy has no values to begin with."""
    given = recipe(roles={"critic": {"trunk": "own", "model": critic}})
    model = given.model.model_copy(update={"origin": "config.json"})
    given = given.model_copy(update={"model": model})
    named: Any = lambda *words: "the values of judge"  # noqa: E731
    monkeypatch.setattr(own_critic, "_first_values", named)
    monkeypatch.setattr(own_critic, "critic_shape", lambda policy, recipe: policy)
    monkeypatch.setattr(own_critic, "parallelize", lambda *words, **_: words[3])
    shape: Any = None
    begun = own_critic.build_critic(shape, Mesh.single(), given, None)
    assert begun == ("the values of judge" if critic else None)


def test_updates_of_the_critic_that_are_left_out_are_told_and_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skips = [True, False, *[True] * MOST_SKIPPED]

    class Critic:
        state = SimpleNamespace(updates=0)

        def take(self, *words: Any) -> list[StepResult]:
            return [StepResult(float("nan"), 1.0, 1, skips.pop(0), False)]

    monkeypatch.setattr(Step, "take", lambda *words: [])
    state: Any = None
    step = CriticStep(
        state, state, state, state, None, [], critic=Critic(),  # type: ignore[arg-type]
        optimizer=recipe().optimizer, steps=9,
    )  # fmt: skip
    batches: Any = [SimpleNamespace(rollout=1)]
    step.take(batches, 1.0)
    (line,) = step.news()
    assert "critic's loss or gradient norm was not finite in step 1" in line
    step.take(batches, 1.0)
    for _ in range(MOST_SKIPPED - 1):
        step.take(batches, 1.0)
    assert len(step.news()) == MOST_SKIPPED - 1 and not step.news()
    with pytest.raises(WeftError, match=f"not finite in {MOST_SKIPPED} steps in a row"):
        step.take(batches, 1.0)
