"""The steps of a run with ``control.method = "ppo"``: collect with the newest policy, learn, and forget."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft.layout.dims import part
from weft.layout.mesh import Mesh, from_all
from weft.recipe.control_section import Control
from weft.recipe.recipe import Recipe
from weft.rl.control.action_policy import ActionPolicy, policy_kind
from weft.rl.control.control_ppo import (
    RunningEpisodes,
    SumOverRanks,
    action_generators,
    collect_steps,
    learn_from_steps,
)
from weft.rl.control.control_state import adam_tensors
from weft.rl.control.environment_pool import EnvironmentPool
from weft.rl.control.method_step import MethodStep

T = torch.Tensor


def environment_words(settings: Control) -> dict[str, Any]:
    """Return the fields of ``settings`` that a process needs to create environments, as plain values."""
    keys = {"environment", "settings", "time_limit", "reward", "progress", "terms"}
    return settings.model_dump(mode="json", include=keys)


def process_count(settings: Control, own: int) -> int:
    """Return the number of processes for a rank's ``own`` environments.

    It is ``control.processes`` or, if that is 0, one for each core that the rank can use.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(own, settings.processes or max(1, cores // ranks))


def summing_over(mesh: Mesh) -> SumOverRanks:
    """Return the function that adds a tensor up over the ranks of ``mesh``, in place."""

    def add_up(values: T) -> None:
        if mesh.layout.dp > 1:
            dist.all_reduce(values, group=mesh.step_group)

    return add_up


def cut_off(
    store: dist.Store, key: str, horizon: int, enough: int
) -> Callable[[int], bool]:
    """Return a function of the number of steps taken, which says whether this rank has to stop collecting.

    A rank stops as soon as ``enough`` ranks have taken all ``horizon`` steps. ``store``: key-value store of all ranks;
    ``key``: key under which the number of these ranks is counted in it.
    """

    def stops(taken: int) -> bool:
        if taken == horizon:
            store.add(key, 1)
            return False
        return store.add(key, 0) >= enough

    return stops


class SeenObservations:
    """Running mean and deviation of all observations so far over all ranks, by which a policy normalises its inputs.

    ``count``, ``mean``, ``squares`` (sums of squared deviations) are tensors that checkpoints keep.
    """

    def __init__(self, observed: int) -> None:
        self.tensors = {
            "seen.count": torch.zeros(1, dtype=torch.float64),
            "seen.mean": torch.zeros(observed, dtype=torch.float64),
            "seen.squares": torch.zeros(observed, dtype=torch.float64),
        }

    def add(self, rows: np.ndarray, policy: ActionPolicy, add_up: SumOverRanks) -> None:
        """Add this rank's observations ``[rows, observed]``, and set the normalisation of ``policy``. All ranks must
        call it.

        ``add_up``: adds a tensor up over all ranks.
        """
        values = torch.from_numpy(rows)
        counted = torch.cat([torch.tensor([float(len(rows))]).double(), values.sum(0)])
        add_up(counted)
        new, mean_new = counted[0], counted[1:] / counted[0]
        squares_new = (values - mean_new).square().sum(0)
        add_up(squares_new)
        count, mean, squares = self.tensors.values()
        together = count + new
        away = mean_new - mean
        squares += squares_new + away.square() * count * new / together
        mean += away * new / together
        count.copy_(together)
        policy.shift.copy_(mean)
        deviation = (squares / count).sqrt()
        # a component that never changes says nothing
        policy.scale.copy_(
            torch.where(deviation > 1e-6, deviation, torch.ones_like(deviation))
        )


class OnPolicy:
    """Proximal policy optimisation (PPO), as a :class:`weft.rl.control.method_step.ControlMethod`.

    ``recipe``: recipe with the section ``[control]``; ``mesh``: mesh of the run's ranks; ``begun``: number of steps
    that the run has taken before, which determines the environments' seeds.

    Attributes:
        ``tensors``: tensors to checkpoint, by name.
        ``parameters``: number of parameters.
        ``facts``: settings in which a resumed run must agree.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh) -> None:
        assert recipe.control is not None
        self._settings = settings = recipe.control
        self._seed, self._mesh = recipe.train.seed, mesh
        lo, hi = part(settings.environments, mesh.layout.dp, mesh.rank("dp"))
        self._numbers = range(lo, hi)
        self._processes = process_count(settings, hi - lo)
        self._pool = self._open_pool(0)
        form = self._pool.form
        kind = policy_kind(settings.policy, form)
        self._policy = ActionPolicy(form, kind, settings.hidden, self._seed)
        self._policy.to(mesh.device, getattr(torch, recipe.train.dtype))
        self._optimizer = torch.optim.Adam(
            self._policy.parameters(), lr=settings.lr, eps=1e-5
        )
        self._seen = SeenObservations(form.observed)
        self._episodes = RunningEpisodes(hi - lo)
        self._add_up = summing_over(mesh)
        names: dict[T, str] = {p: name for name, p in self._policy.named_parameters()}
        self.parameters = sum(p.numel() for p in names)
        self.tensors: Mapping[str, T] = {
            **{f"model.{name}": t for name, t in self._policy.state_dict().items()},
            **adam_tensors(self._optimizer, names),
            **self._seen.tensors,
        }
        self.facts = {"method": "ppo", "policy": kind, "hidden": list(settings.hidden)}

    def _open_pool(self, begun: int) -> EnvironmentPool:
        return EnvironmentPool(
            environment_words(self._settings),
            self._numbers,
            self._processes,
            self._settings.step_seconds,
            (self._seed, begun),
        )

    def resume(self, begun: int, updates: int) -> None:
        """Begin new episodes after ``begun`` steps of the run, with other seeds than before. ``updates`` is not
        used.
        """
        if begun:
            self._pool.close()
            self._pool = self._open_pool(begun)

    def take_step(self, number: int) -> MethodStep:
        """Take the run's step ``number``, from 0: collect steps and learn from them; return the result. All ranks must
        call it.
        """
        settings, begun = self._settings, time.perf_counter()
        if settings.decay:
            self._optimizer.param_groups[0]["lr"] = settings.lr * (
                1 - number / settings.steps
            )
        collected = collect_steps(
            self._pool,
            self._policy,
            settings,
            action_generators(self._seed, number, self._numbers),
            self._numbers.start,
            self._episodes,
            self._cut_off(number),
        )
        between = time.perf_counter()
        learned = learn_from_steps(
            self._policy, self._optimizer, collected, settings, number, self._seed, self._add_up,
        )  # fmt: skip
        observed = collected.observations[collected.learns]
        self._seen.add(observed, self._policy, self._add_up)
        ended = self._episodes.take()
        counts = torch.tensor(
            [*ended.numbers(),  collected.learns.size, self._pool.dropped],
            dtype=torch.float64,
        )  # fmt: skip
        self._add_up(counts)
        episodes, returns, own, steps, taken, dropped = counts.tolist()
        values: dict[str, Any] = learned._asdict()
        if episodes:
            values |= {
                "return": returns / episodes,
                "own_return": own / episodes,
                "length": steps / episodes,
            }
        values |= {
            "episodes": int(episodes),
            "dropped": int(dropped),
            "lr": self._optimizer.param_groups[0]["lr"],
            "collect_s": between - begun,
            "learn_s": time.perf_counter() - between,
        }
        lines = from_all(self._pool.take_lines(), self._mesh.step_group)
        return MethodStep(
            int(taken), learned.updates, values, [line for theirs in lines for line in theirs]
        )  # fmt: skip

    def _cut_off(self, number: int) -> Callable[[int], bool]:
        """Return whether this rank shall stop collecting, as a function of the steps that it has taken."""
        settings, ranks = self._settings, self._mesh.layout.dp
        enough = math.ceil(settings.cutoff * ranks)
        if enough >= ranks:
            return lambda taken: False
        store = dist.distributed_c10d._get_default_store()
        return cut_off(store, f"weft/control/{number}", settings.horizon, enough)

    def best(self, observations: np.ndarray) -> np.ndarray:
        """Return the policy's most likely actions for ``observations``, ``[environments, observed]``: one action per
        environment.
        """
        like = self._policy.shift
        with torch.no_grad():
            inputs = torch.as_tensor(observations, dtype=like.dtype, device=like.device)
            return self._policy.draw(self._policy.outputs(inputs), None)

    def close(self) -> None:
        """End the processes of the environments."""
        self._pool.close()
