"""Environments in processes, their rewards, and PPO whose result does not depend on the number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from weft.api import finish_run, start
from weft.checkpoint.store import committed_checkpoints, open_checkpoint
from weft.errors import UsageError, WeftError
from weft.layout.dims import Tensor
from weft.layout.parts import Part
from weft.recipe.control_section import Control
from weft.recipe.read import build_recipe
from weft.rl.control.action_policy import ActionPolicy, policy_kind
from weft.rl.control.control_ppo import (
    CollectedSteps,
    RunningEpisodes,
    action_generators,
    collect_steps,
    learn_from_steps,
    minibatches,
    standardised,
)
from weft.rl.control.environment_kinds import (
    ActionForm,
    LineWalk,
    action_form,
    make_environment,
)
from weft.rl.control.environment_pool import EnvironmentPool
from weft.rl.control.environment_process import EpisodeRunner, episode_seed
from weft.rl.control.episode_advantages import episode_advantages
from weft.rl.control.on_policy import SeenObservations, cut_off, environment_words
from weft.rl.control.simple_reward import SimpleReward

WALK = "weft.rl.control.environment_kinds:LineWalk"
FAULTY = "tests.rl.control_faults:FaultyWalk"


class LocalPool:
    """Environments in this process, with what :func:`collect_steps` needs of a pool."""

    def __init__(self, settings: Control, numbers: range, seed: int = 0) -> None:
        about = environment_words(settings)
        self._runners = [
            EpisodeRunner(about, episode_seed(seed, 0, 0, n)) for n in numbers
        ]
        self.form = self._runners[0].form
        self.observations = np.stack([r.observation for r in self._runners])

    def step(self, actions: np.ndarray) -> Any:
        steps = [r.step(a) for r, a in zip(self._runners, actions, strict=True)]
        both = {key: np.array([step[key] for step in steps]) for key in steps[0]}
        self.observations = both["observation"]
        both["observations"], both["finals"] = (
            both.pop("observation"),
            both.pop("final"),
        )
        both["rewards"] = both.pop("reward")
        both["dropped"] = np.zeros(len(steps), bool)
        return type("Step", (), both)


def reference_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    nexts: np.ndarray,
    terminated: np.ndarray,
    ended: np.ndarray,
    gamma: float,
    trace: float,
) -> np.ndarray:
    """The sum over later steps of the same episode, as the paper writes it."""
    steps, count = rewards.shape
    result = np.zeros_like(rewards)
    for e in range(count):
        for t in range(steps):
            weight = 1.0
            for later in range(t, steps):
                live = 0.0 if terminated[later, e] else 1.0
                error = (
                    rewards[later, e]
                    + gamma * live * nexts[later, e]
                    - values[later, e]
                )
                result[t, e] += weight * error
                weight *= gamma * trace
                if ended[later, e]:
                    break
    return result


def test_advantages_are_the_papers_sum() -> None:
    draw = np.random.default_rng(0)
    rewards, values, nexts = draw.normal(size=(3, 11, 4))
    ended = draw.random((11, 4)) < 0.3
    terminated = ended & (draw.random((11, 4)) < 0.5)
    estimate = episode_advantages(rewards, values, nexts, terminated, ended, 0.9, 0.8)
    expected = reference_advantages(rewards, values, nexts, terminated, ended, 0.9, 0.8)
    assert np.allclose(estimate.advantages, expected, atol=1e-12)
    assert np.allclose(estimate.returns, expected + values)


def test_a_truncated_episode_is_bootstrapped_and_a_terminated_is_not() -> None:
    """Walkers that never reach the goal are truncated: what follows counts as the critic's value of the last place."""
    settings = Control(
        environment=WALK, settings={"limit": 4}, environments=1, horizon=5
    )
    pool = LocalPool(settings, range(1))
    policy = ActionPolicy(pool.form, "categorical", (8,), 0).double()
    nexts: list[float] = []

    def seen(observations: torch.Tensor) -> torch.Tensor:
        nexts.append(float(observations[0, 0]))
        return observations[:, 0] * 100

    policy.values = seen  # type: ignore[method-assign]
    got = collect_steps(
        pool,
        policy,
        settings.model_copy(update={"trace": 0.0}),
        action_generators(0, 0, [0]),
        0,
        RunningEpisodes(1),
    )  # type: ignore[arg-type]
    # returns with lambda = 0: reward + gamma x value of the observation after the step, at the truncation too
    places = got.observations[:, 0, 0]
    again = EpisodeRunner(environment_words(settings), episode_seed(0, 0, 0, 0))
    finals = [again.step(action)["final"][0] for action in got.actions[:, 0]]
    assert finals[3] != places[4], "the fifth step is of another episode"
    reward = np.array(finals) - places
    assert np.allclose(
        got.returns[:, 0], reward + settings.gamma * 100 * np.array(finals)
    )
    terminal = episode_advantages(
        np.ones((1, 1)),
        np.zeros((1, 1)),
        np.full((1, 1), 5.0),
        np.ones((1, 1), bool),
        np.ones((1, 1), bool),
        1.0,
        1.0,
    )
    assert terminal.returns[0, 0] == 1.0


def test_a_rank_that_is_cut_off_bootstraps_from_what_it_collected() -> None:
    """CaRL's estimate read the value of a step of the rollout before, as it compared with the planned length."""
    settings = Control(environment=WALK, environments=2, horizon=8)
    whole = settings.model_copy(update={"horizon": 3})
    results = []
    for each, stops in (
        (settings, lambda taken: taken == 3),
        (whole, lambda taken: False),
    ):
        pool = LocalPool(each, range(2))
        policy = ActionPolicy(pool.form, "categorical", (8,), 0).double()
        generators = action_generators(0, 0, range(2))
        # a rollout before, so that there is something stale
        collect_steps(pool, policy, whole, generators, 0, RunningEpisodes(2))  # type: ignore[arg-type]
        results.append(
            collect_steps(pool, policy, each, generators, 0, RunningEpisodes(2), stops)
        )  # type: ignore[arg-type]
    cut, planned = results
    assert cut.returns.shape == planned.returns.shape == (3, 2)
    assert np.array_equal(cut.advantages, planned.advantages)
    assert np.array_equal(cut.returns, planned.returns)
    rows = list(
        minibatches(
            cut, settings.model_copy(update={"minibatch": 4}), 0, 0, lambda values: None
        )
    )
    assert sum(len(share.rows) for share in rows) == 6 * settings.epochs


def test_stragglers_stop_once_enough_ranks_are_done() -> None:
    store = HashStore()
    three = [cut_off(store, "step", 4, 2) for _ in range(3)]
    assert not any(stops(3) for stops in three)
    assert not three[0](4) and not three[1](2)
    assert not three[2](4) and three[1](3)
    assert not cut_off(store, "next", 4, 2)(1)


@pytest.mark.parametrize("kind", ["categorical", "gaussian", "beta"])
def test_policies_draw_what_they_judge(kind: str) -> None:
    """Means of draws, and integrals of densities over all actions."""
    form = (
        ActionForm(2, choices=3)
        if kind == "categorical"
        else ActionForm(2, low=(-2.0,), high=(6.0,))
    )
    policy = ActionPolicy(form, kind, (8,), 1).double()
    with torch.no_grad():
        for p in policy.actor.parameters():
            p.mul_(20)
    rows = torch.tensor([[0.3, -0.7]], dtype=torch.float64)
    out = policy.outputs(rows)
    generators = [np.random.default_rng(5)]
    draws = np.array([policy.draw(out, generators)[0] for _ in range(4000)])
    if kind == "categorical":
        grid: torch.Tensor = torch.arange(3)
        density = policy.judge(rows.expand(3, 2), grid).log_probabilities.exp()
        shares = np.bincount(draws, minlength=3) / len(draws)
        assert np.allclose(shares, density.detach(), atol=0.03)
        assert torch.isclose(density.sum(), torch.tensor(1.0).double())
        entropy = -(density * density.log()).sum()
    else:
        low, high = (-2.0, 6.0) if kind == "beta" else (-30.0, 30.0)
        grid = torch.linspace(low, high, 20_001, dtype=torch.float64).unsqueeze(-1)
        density = policy.judge(rows.expand(len(grid), 2), grid).log_probabilities.exp()
        line = grid.squeeze(-1)
        assert torch.trapezoid(density, line).item() == pytest.approx(1, abs=1e-3)
        mean = torch.trapezoid(density * line, line).item()
        assert draws.mean() == pytest.approx(mean, abs=0.1)
        entropy = -torch.trapezoid(density * density.clamp_min(1e-300).log(), line)
    judged = policy.judge(rows, torch.from_numpy(draws[:1]))
    assert judged.entropies[0].item() == pytest.approx(entropy.item(), abs=2e-3)


class SummingRanks:
    """Ranks in threads of this process, which add tensors up in the order of ranks."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._values: list[Any] = [None] * ranks

    def of(self, rank: int) -> Callable[[torch.Tensor], None]:
        def add_up(values: torch.Tensor) -> None:
            self._values[rank] = values.clone()
            self._barrier.wait()
            total = sum(self._values[1:], self._values[0])
            self._barrier.wait()
            values.copy_(total)

        return add_up


def train_as_ranks(
    settings: Control, kind: str, ranks: int, steps: int
) -> list[dict[str, torch.Tensor]]:
    """The parameters of all ranks after some steps of a run, with observations normalised."""
    together, results = SummingRanks(ranks), [{}] * ranks
    share = settings.environments // ranks

    def be(rank: int) -> None:
        numbers = range(rank * share, (rank + 1) * share)
        pool: Any = LocalPool(settings, numbers)
        policy = ActionPolicy(pool.form, kind, (16,), 0).double()
        optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
        seen, episodes = SeenObservations(pool.form.observed), RunningEpisodes(share)
        for number in range(steps):
            generators = action_generators(7, number, numbers)
            got = collect_steps(
                pool, policy, settings, generators, numbers.start, episodes
            )
            learn_from_steps(
                policy, optimizer, got, settings, number, 7, together.of(rank)
            )
            rows = got.observations[got.learns]
            seen.add(rows, policy, together.of(rank))
        results[rank] = policy.state_dict()

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["categorical", "gaussian", "beta"])
def test_the_number_of_ranks_changes_nothing(kind: str) -> None:
    settings = Control(
        environment=WALK,
        settings={"continuous": kind != "categorical", "limit": 9},
        environments=4,
        horizon=16,
        minibatch=24,
        epochs=2,
        entropy=0.01,
    )
    (alone,) = train_as_ranks(settings, kind, 1, 3)
    for ranks in (2, 4):
        for result in train_as_ranks(settings, kind, ranks, 3):
            for name, value in alone.items():
                assert torch.allclose(result[name], value, atol=1e-9, rtol=0), name
    fresh = ActionPolicy(action_form(LineWalk(kind != "categorical")), kind, (16,), 0)
    moved = alone["actor.0.weight"] - fresh.double().state_dict()["actor.0.weight"]
    assert moved.abs().max() > 1e-3


def test_statistics_of_a_minibatch_are_of_all_ranks() -> None:
    """Each rank's own would change with the number of ranks."""
    advantages = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    expected = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    together = SummingRanks(2)
    results: list[Any] = [None, None]

    def be(rank: int, rows: slice) -> None:
        results[rank] = standardised(advantages[rows], 4, together.of(rank))

    threads = [
        threading.Thread(target=be, args=(0, slice(0, 1))),
        threading.Thread(target=be, args=(1, slice(1, 4))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.allclose(torch.cat(results), expected)


def test_minibatches_have_every_transition_once_and_dropped_ones_never() -> None:
    settings = Control(
        environment=WALK, environments=3, horizon=7, minibatch=4, epochs=1
    )
    learns = np.ones((7, 3), bool)
    learns[2:5, 1] = False
    empty = np.zeros((7, 3))
    steps = CollectedSteps(empty, empty, empty, empty, empty, learns, 0)
    shares = list(minibatches(steps, settings, 0, 0, lambda values: None))
    rows = np.concatenate([share.rows for share in shares])
    assert sorted(rows) == sorted(np.flatnonzero(learns.reshape(-1)))
    assert {share.size for share in shares} <= {4, 5}


def test_simple_reward_multiplies_and_the_other_sums() -> None:
    far = {"index": 1, "free": 1.0, "limit": 3.0, "penalty": 0.5, "ends": False}
    ends = far | {"index": 0, "limit": 2.0, "ends": True}
    product = SimpleReward("product", 0, [far, ends])
    product.begin(np.array([0.5, 0.0]))
    assert product.after_step(np.array([1.0, 2.0]), 9.0) == (0.5 * 0.75, False)
    # no way back is progress, nor the same way again
    assert product.after_step(np.array([0.2, 0.0]), 9.0).reward == 0
    assert product.after_step(np.array([0.9, 0.0]), 9.0).reward == 0
    assert product.after_step(np.array([2.5, 0.0]), 9.0) == (0.0, True)
    summed = SimpleReward("sum", None, [far])
    summed.begin(np.zeros(2))
    assert summed.after_step(np.array([0.0, -9.0]), 0.25) == (-0.25, False)


def pool_of(
    settings: dict[str, Any], count: int = 4, processes: int = 2, seconds: float = 60.0
) -> EnvironmentPool:
    words = environment_words(Control(environment=FAULTY, settings=settings))
    return EnvironmentPool(words, range(count), processes, seconds, (0,))


@pytest.mark.sampled(2)
@pytest.mark.slow(4)
@pytest.mark.parametrize(
    "fault, why",
    [
        ("die", "was killed (SIGKILL)"),
        ("hang", "has not answered for 3 s"),
        ("raise", "failed: ZeroDivisionError: the ground is gone"),
        ("nan", "not finite"),
    ],
)
def test_a_lost_environment_is_named_and_its_episode_dropped(
    fault: str, why: str, tmp_path: Path
) -> None:
    seconds = 3.0 if fault == "hang" else 60.0
    settings = {"fault": fault, "once": str(tmp_path / "once")}
    with pool_of(settings, 2, 1, seconds) as pool:
        (before,) = pool.pids
        steps = [pool.step(np.zeros(2, int)) for _ in range(8)]
        (after,) = pool.pids
        (line,) = pool.take_lines()
    assert after != before
    assert line.startswith(f"environment 0 (process {before})") and why in line
    assert "2 episodes were dropped" in line and pool.dropped == 2
    assert [bool(step.dropped.any()) for step in steps] == [False] * 3 + [True] + [
        False
    ] * 4
    # the new episode begins then, and is truncated after its own six steps
    assert not any(step.truncated.any() for step in steps)


@pytest.mark.parametrize(
    ("own", "why"),
    [(1e300, "1e+300, more than 1e+15"), (np.nan, "nan"), (None, "NoneType, which")],
)
def test_rewards_are_numbers_of_a_size(
    monkeypatch: pytest.MonkeyPatch, own: Any, why: str
) -> None:
    settings = {"fault": "raise", "once": "", "at": 9}
    words = environment_words(Control(environment=FAULTY, settings=settings))
    runner = EpisodeRunner(words, 0)
    step = np.zeros(2), own, False, False, {}
    monkeypatch.setattr(runner.environment, "step", lambda action: step)
    with pytest.raises(ValueError) as error:
        runner.step(np.array(0))
    assert str(error.value).startswith(f"it returned {why}")


@pytest.mark.slow(4)
def test_an_environment_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    settings = {"fault": "always", "once": str(tmp_path / "never"), "at": 0}
    with (
        pool_of(settings, 1, 1) as pool,
        pytest.raises(WeftError, match=r"environment 0 .*ground is gone, for the 3rd"),
    ):
        for _ in range(4):
            pool.step(np.zeros(1, int))
    assert pool.pids == []


def test_a_policy_must_go_with_the_actions() -> None:
    choices, bounded = ActionForm(2, choices=2), ActionForm(2, low=(0.0,), high=(1.0,))
    free = ActionForm(2, low=(-np.inf,), high=(np.inf,))
    assert [policy_kind("auto", f) for f in (choices, bounded, free)] == [
        "categorical",
        "beta",
        "gaussian",
    ]
    for word, form in (("beta", choices), ("categorical", bounded), ("beta", free)):
        with pytest.raises(UsageError, match=r"control\.policy"):
            policy_kind(word, form)


@pytest.mark.parametrize(
    "tree, line",
    [
        ({"terms": [{"index": 0}]}, "terms and progress are for reward"),
        ({"reward": "product"}, "without terms or progress"),
        ({"method": "sac", "epochs": 3}, "epochs does nothing for method = 'sac'"),
        ({"lockstep": True}, "lockstep does nothing for method = 'ppo'"),
        ({"method": "sac", "warmup": 10}, "too few for a minibatch"),
        ({"reward": "sum", "terms": [{"free": 2.0}]}, "not below limit"),
        ({"environments": 3}, "cannot be divided by layout.dp = 2"),
        ({"method": "dqn"}, "has one learner"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(tree: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        build_recipe({"control": tree, "layout": {"dp": 2}})


@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": {"lr": 1.0}},
        {"train": {"steps": 9}},
        {"layout": {"tp": 2}},
        {"model": {"layers": 9}},
    ],
)
def test_settings_of_language_models_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="does nothing beside"):
        build_recipe({"control": {}, **other})


def small_run(more: dict[str, Any] | None = None) -> dict[str, Any]:
    """A recipe of Weft's own environment that learns in four steps."""
    control = {"environment": WALK, "environments": 2, "processes": 1, "horizon": 16}
    control |= {"transitions": 128, "minibatch": 16, "episodes": 4, **(more or {})}
    return {
        "name": "walk",
        "control": control,
        "train": {"dtype": "float64", "device": "cpu", "threads": 1},
        "checkpoint": {"every": 2, "keep": 9},
    }


@pytest.mark.slow(4)
def test_a_run_is_recorded_saved_and_resumed(tmp_path: Path) -> None:
    """From a checkpoint in the middle the parameters go on as they were; a finished run says that it is."""
    recipe = build_recipe(small_run())
    whole = start(recipe, tmp_path / "whole")
    records = whole.metrics()
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    assert records[-1]["transitions"] == 128 and records[-1]["updates"] == 32
    assert whole.metrics("evaluation")[-1]["episodes"] == 4
    assert "Transitions per second" in finish_run(recipe, whole).report.read_text()
    half = tmp_path / "whole/checkpoints/step-000002"
    stored = {
        place.name: open_checkpoint(place)
        for place in committed_checkpoints(half.parent)
    }
    assert stored.keys() == {"step-000002", "step-000004"}
    resumed = start(recipe, tmp_path / "again", str(half))
    assert resumed.progress.step == 4 and resumed.progress.position == 128
    messages = [r["message"] for r in resumed.metrics("event")]
    assert any("resumed from" in m and "new episodes" in m for m in messages)
    done = start(recipe, tmp_path / "whole", "auto")
    assert "the run is complete" in done.metrics("event")[-1]["message"]
    other = build_recipe(small_run({"hidden": [8]}))
    with pytest.raises(
        WeftError, match=r"control\.hidden = \[64, 64\], the recipe \[8\]"
    ):
        start(other, tmp_path / "other", str(half))


@pytest.mark.parametrize(
    "word, line",
    [
        ("CartPoel-v1", "CartPole-v1|not installed; pip install 'weft"),
        ("nothing.here:Walk", "cannot be imported"),
        ("weft.rl.control.environment_kinds:Wlak", "has no Wlak"),
        ("tests.rl.control_faults:FaultyWalk", "cannot be made: TypeError"),
    ],
)
def test_an_environment_that_cannot_be_made_is_one_line(word: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        make_environment(word, {}, 0)


@pytest.mark.soak
@pytest.mark.slow(20)
def test_ranks_of_their_own_learn_the_same(tmp_path: Path) -> None:
    """Two processes with one environment each, and one with both: parameters to 1e-9."""
    values = []
    for ranks in (1, 2):
        recipe = build_recipe({**small_run(), "layout": {"dp": ranks}})
        outcome = start(recipe, tmp_path / str(ranks))
        checkpoint = open_checkpoint(outcome.checkpoint)
        weight = torch.empty(64, 2, dtype=torch.float64)
        box = ((0, 64), (0, 2))
        part = Part(weight, box, Tensor((64, 2), "F64"))
        checkpoint.load({"model.actor.0.weight": part})
        values.append(weight)
    assert torch.allclose(*values, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "control"),
        ("verify", "control", "--random", "1"),
        ("plan", "control", "--here"),
    ],
)
def test_commands_about_language_models_say_so(
    words: tuple[str, ...], command: Callable[..., tuple[int, str, str]]
) -> None:
    code, _, error = command(*words)
    assert code == 2 and "the recipe has [control]" in error


def test_episodes_of_gymnasium_have_no_step_between_them() -> None:
    """Also behind a wrapper that would reset in the next step, as vector environments do, and earn nothing there."""
    gymnasium = pytest.importorskip("gymnasium", reason="pip install 'weft[control]'")
    from gymnasium.wrappers import Autoreset

    words = environment_words(Control(time_limit=15))
    plain, wrapped = EpisodeRunner(words, 4), EpisodeRunner(words, 4)
    wrapped.environment = Autoreset(wrapped.environment)
    wrapped.begin(4)
    ends = []
    for t in range(80):
        a, b = plain.step(np.array(t % 2)), wrapped.step(np.array(t % 2))
        assert a["reward"] == b["reward"] == 1.0
        assert np.array_equal(a["final"], b["final"])
        ends += [(a["terminated"], a["truncated"])] * (
            a["terminated"] or a["truncated"]
        )
    assert ends == [(False, True)] * len(ends) and len(ends) == 5
    several = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with pytest.raises(UsageError, match="a vector of environments"):
        action_form(several)
