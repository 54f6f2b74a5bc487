"""Asynchronous workers, replay and learners: in lock step they are the plain algorithm, bit for bit."""

from __future__ import annotations

import copy
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.api import start
from weft.checkpoint.store import open_checkpoint
from weft.errors import UsageError
from weft.layout.mesh import Mesh
from weft.layout.parts import Part
from weft.recipe.control_section import Control
from weft.recipe.read import build_recipe
from weft.rl.control.acting_policy import (
    best_actions,
    exploring_action,
    network_outputs,
    random_action,
    split_weights,
)
from weft.rl.control.action_policy import perceptron
from weft.rl.control.environment_kinds import ActionForm, LineWalk, action_form
from weft.rl.control.environment_process import episode_seed
from weft.rl.control.off_policy import LEARN, OffPolicy
from weft.rl.control.off_policy_worker import EXPLORE
from weft.rl.control.published_weights import NO_WEIGHTS, PublishedWeights
from weft.rl.control.transition_replay import TransitionReplay

WALK = "weft.rl.control.environment_kinds:LineWalk"
FAULTY = "tests.rl.control_faults:FaultyWalk"


def settings_of(method: str, **more: Any) -> dict[str, Any]:
    """A section of a run of 60 transitions, of which 20 are random."""
    return {
        "environment": WALK,
        "settings": {"continuous": method == "sac", "limit": 12},
        "method": method,
        "environments": 1,
        "hidden": [16],
        "minibatch": 8,
        "warmup": 20,
        "replay": 50,
        "transitions": 60,
        "every": 30,
        "episodes": 4,
        "lr": 3e-3,
        **more,
    }


def recipe_of(method: str, **more: Any) -> Any:
    train = {"device": "cpu", "threads": 1, "seed": 3}
    return build_recipe(
        {"name": method, "control": settings_of(method, **more), "train": train}
    )


class PlainLearner:
    """The textbook's networks and updates, with the initial weights that Weft draws."""

    def __init__(self, method: str, form: ActionForm, settings: Control) -> None:
        draw = torch.Generator().manual_seed(3)
        self.sac, self.settings = method == "sac", settings
        outputs = 2 * form.numbers if self.sac else form.choices
        self.policy = perceptron((2, 16, outputs), 1.0, draw, nn.ReLU)
        self.steps = torch.optim.Adam(self.policy.parameters(), lr=3e-3)
        if self.sac:
            self.q = [perceptron((3, 16, 1), 1.0, draw, nn.ReLU) for _ in range(2)]
            self.q_steps = torch.optim.Adam(
                [p for q in self.q for p in q.parameters()], lr=3e-3
            )
            self.q_target = copy.deepcopy(self.q)
            self.log_alpha = torch.zeros((), requires_grad=True)
            self.alpha_steps = torch.optim.Adam([self.log_alpha], lr=3e-3)
        else:
            self.target = copy.deepcopy(self.policy)

    def act(
        self, seen: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mean, raw = self.policy(seen).chunk(2, -1)
        log_std = -5.0 + 3.5 * (torch.tanh(raw) + 1)
        u = mean + log_std.exp() * noise
        action = torch.tanh(u)
        log = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log = log - 2 * (math.log(2) - u - nn.functional.softplus(-2 * u))
        return action, log.sum(-1)

    def update(self, batch: list[torch.Tensor], draw: np.random.Generator) -> None:
        seen, acted, reward, ended, after = batch
        gamma = self.settings.gamma
        if not self.sac:
            with torch.no_grad():
                aim = reward + gamma * (1 - ended) * self.target(after).max(-1).values
            value = self.policy(seen)[torch.arange(len(acted)), acted]
            self.steps.zero_grad()
            nn.functional.smooth_l1_loss(value, aim).backward()
            nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
            self.steps.step()
            self.follow([(self.target, self.policy)])
            return
        noise = torch.from_numpy(draw.standard_normal((2, *acted.shape))).float()
        alpha = self.log_alpha.detach().exp()
        with torch.no_grad():
            then, log = self.act(after, noise[0])
            both = torch.cat([after, then], -1)
            least = torch.minimum(*(q(both).squeeze(-1) for q in self.q_target))
            aim = reward + gamma * (1 - ended) * (least - alpha * log)
        both = torch.cat([seen, acted], -1)
        first, second = ((q(both).squeeze(-1) - aim).square().mean() for q in self.q)
        self.q_steps.zero_grad()
        (first + second).backward()
        self.q_steps.step()
        now, log = self.act(seen, noise[1])
        both = torch.cat([seen, now], -1)
        worth = torch.minimum(*(q(both).squeeze(-1) for q in self.q))
        self.steps.zero_grad()
        (alpha * log - worth).mean().backward()
        self.steps.step()
        self.alpha_steps.zero_grad()
        (-(self.log_alpha * (log.detach() - 1.0)).mean()).backward()
        self.alpha_steps.step()
        self.follow(list(zip(self.q_target, self.q, strict=True)))

    def follow(self, pairs: list[tuple[Any, Any]]) -> None:
        with torch.no_grad():
            for target, model in pairs:
                for old, new in zip(
                    target.parameters(), model.parameters(), strict=True
                ):
                    old.lerp_(new, self.settings.average)


def plain_run(method: str, settings: Control) -> PlainLearner:
    """One loop: act, keep, learn."""
    walk = LineWalk(continuous=method == "sac", limit=12)
    form = action_form(walk)
    learner = PlainLearner(method, form, settings)
    draw = np.random.default_rng([EXPLORE, 3, 0, 0, 0])
    seen, _ = walk.reset(seed=episode_seed(3, 0, 0, 0))
    kept: list[list[Any]] = []
    updates = 0
    for count in range(60):
        if count < 20:
            action = random_action(form, draw)
        else:
            flat = torch.cat(
                [p.detach().flatten() for p in learner.policy.parameters()]
            ).numpy()
            explore = 1 - 0.95 * min(1.0, count / 6.0)
            layers = split_weights(flat, (2, 16, 2 if method == "sac" else 3))
            action = exploring_action(form, layers, seen, draw, explore)
        after, reward, terminated, truncated, _ = walk.step(action.native)
        kept.append([seen, action.kept, reward, float(terminated), after])
        seen = walk.reset()[0] if terminated or truncated else after
        if len(kept) >= 20:
            chance = np.random.default_rng([3, LEARN, updates])
            # the ring's places: the oldest of more than 50 are overwritten
            ring = [
                kept[i + 50 if i + 50 < len(kept) else i]
                for i in range(min(50, len(kept)))
            ]
            rows = [ring[i] for i in chance.integers(len(ring), size=8)]
            batch = [
                torch.tensor(np.array(column)) for column in zip(*rows, strict=True)
            ]
            batch = [c if c.dtype == torch.int64 else c.float() for c in batch]
            learner.update(batch, chance)
            updates += 1
    return learner


@pytest.mark.slow(4)
@pytest.mark.parametrize("method", ["sac", "dqn"])
def test_lock_step_is_the_plain_algorithm_bit_by_bit(method: str) -> None:
    recipe = recipe_of(method, lockstep=True)
    run = OffPolicy(recipe, Mesh.single())
    try:
        run.resume(0, 0)
        steps = [run.take_step(number) for number in range(2)]
    finally:
        run.close()
    assert [step.transitions for step in steps] == [30, 30]
    assert [step.updates for step in steps] == [11, 30]
    plain = plain_run(method, recipe.control)
    names = {"sac": {"actor": plain.policy}, "dqn": {"values": plain.policy}}[method]
    if method == "sac":
        names |= {f"critics.{i}": q for i, q in enumerate(plain.q)}
        names |= {f"targets.{i}": q for i, q in enumerate(plain.q_target)}
        assert torch.equal(run.tensors["model.temperature.0"], plain.log_alpha)
    else:
        names |= {"target": plain.target}
    for name, module in names.items():
        for key, value in module.state_dict().items():
            assert torch.equal(run.tensors[f"model.{name}.{key}"], value), name
    fresh = perceptron(
        (2, 16, 2 if method == "sac" else 3),
        1.0,
        torch.Generator().manual_seed(3),
        nn.ReLU,
    )
    assert not torch.equal(fresh[0].weight, plain.policy[0].weight)


def test_workers_act_as_the_learners_network_does() -> None:
    network = perceptron((5, 16, 8, 4), 1.0, torch.Generator().manual_seed(0), nn.ReLU)
    rows = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    with torch.no_grad():
        flat = torch.cat([p.flatten() for p in network.parameters()]).numpy()
        expected = network(torch.from_numpy(rows)).numpy()
    layers = split_weights(flat, (5, 16, 8, 4))
    assert np.allclose(network_outputs(layers, rows), expected, atol=1e-6)
    form = ActionForm(5, low=(0.0, -3.0), high=(4.0, -1.0))
    best = best_actions(form, layers, rows)
    assert np.allclose(
        best, [2.0, -2.0] + np.array([2.0, 1.0]) * np.tanh(expected[:, :2]), atol=1e-5
    )
    choices = ActionForm(5, choices=4)
    assert np.array_equal(best_actions(choices, layers, rows), expected.argmax(-1))
    draw = np.random.default_rng(1)
    drawn = {
        int(exploring_action(choices, layers, rows[0], draw, 1.0).kept)
        for _ in range(60)
    }
    assert drawn == set(range(4))


def test_the_newest_weights_are_whole_while_they_are_written() -> None:
    """A reader never sees half of one version and half of another, and knows when there is none newer."""
    published = PublishedWeights(2000, "float32")
    assert published.newest(NO_WEIGHTS) is NO_WEIGHTS
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            published.publish(0.5, np.full(2000, number, np.float32))

    writer = threading.Thread(target=write)
    writer.start()
    newest, seen = NO_WEIGHTS, set()
    while len(seen) < 30:
        newest = published.newest(newest)
        if newest.version:
            assert (newest.weights == newest.version).all()
            seen.add(newest.version)
    stop.set()
    writer.join()
    newest = published.newest(newest)
    assert published.newest(newest) is newest and newest.explore == 0.5
    published.close()


def test_replay_keeps_the_newest_and_draws_all_of_them() -> None:
    replay = TransitionReplay(
        4, ActionForm(1, choices=2), torch.float64, torch.device("cpu")
    )
    for i in range(7):
        replay.add(np.array([i]), np.array(i % 2), i / 2, i == 5, np.array([i + 1]))
        if i == 1:
            early = replay.draw(100, np.random.default_rng(0)).observations
            assert set(early[:, 0].tolist()) == {0, 1}
    batch = replay.draw(200, np.random.default_rng(0))
    assert set(batch.observations[:, 0].tolist()) == {3, 4, 5, 6}
    assert torch.equal(batch.nexts, batch.observations + 1)
    assert torch.equal(batch.rewards, batch.observations[:, 0] / 2)
    assert torch.equal(batch.terminated, (batch.observations[:, 0] == 5).double())
    assert torch.equal(batch.actions, batch.observations[:, 0].long() % 2)


@pytest.mark.sampled(1)
@pytest.mark.slow(5)
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_workers_of_their_own_pace(ratio: float, tmp_path: Path) -> None:
    """A run with two workers that is killed one, is saved with its replay, and resumes."""
    settings = {"fault": "die", "once": str(tmp_path / "once"), "at": 15}
    recipe = recipe_of(
        "dqn",
        environment=FAULTY,
        settings=settings,
        environments=2,
        ratio=ratio,
        transitions=120,
        replay=200,
    )
    outcome = start(recipe, tmp_path / "run")
    (train, *_), events = outcome.metrics()[::-1], outcome.metrics("event")
    assert outcome.progress.position >= 120
    assert train["transitions"] == outcome.progress.position and train["dropped"] == 1
    assert train["ratio"] == outcome.progress.updates / outcome.progress.position
    if ratio:
        due = ratio * (outcome.progress.position - 20)
        assert abs(outcome.progress.updates - due) <= 4
    assert any(
        "was killed (SIGKILL); 1 episode was dropped" in e["message"] for e in events
    )
    checkpoint = open_checkpoint(outcome.checkpoint)
    stored = checkpoint.tensors["replay.count"]
    count = torch.zeros(1, dtype=torch.int64)
    checkpoint.load({"replay.count": Part(count, ((0, 1),), stored)})
    assert int(count) == outcome.progress.position
    longer = build_recipe(
        recipe.model_dump()
        | {"control": recipe.control.model_dump() | {"transitions": 180}}
    )
    resumed = start(longer, tmp_path / "run", "auto")
    assert resumed.progress.position >= 180
    assert resumed.progress.updates >= outcome.progress.updates
    assert not any(is_alive(pid) for pid in workers_in(events))


def workers_in(events: list[dict[str, Any]]) -> list[int]:
    return [
        int(e["message"].split("(process ")[1].split(")")[0])
        for e in events
        if "(process " in e["message"]
    ]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow(2)
@pytest.mark.parametrize(
    "method, continuous, line",
    [
        ("sac", False, "'sac' needs actions that are numbers"),
        ("dqn", True, "'dqn' chooses one of several"),
    ],
)
def test_a_method_must_go_with_the_actions(
    method: str, continuous: bool, line: str
) -> None:
    recipe = recipe_of(method, settings={"continuous": continuous})
    with pytest.raises(UsageError, match=line):
        OffPolicy(recipe, Mesh.single())
