"""A run whose ranks write answers together, in groups, has the answers of a run on one device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.rl.test_rl_loader import recipe
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.recipe import build_recipe
from weft.rl.rl_job import RlJob
from weft.train.setup import build_for_training, prepare
from weft.train.step import train_step

MODEL = {"layers": 2, "embed": 32, "heads": 2, "kv_heads": 2, "ffn": 64, "tied": True}


class Recorder:
    """Forgets what it is told."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None


def two_phases(tree: dict[str, Any], damaged: bool = False) -> list[Any]:
    """On every rank: the tokens of all answers of two rollout phases, with an update between them.

    ``damaged``: the update makes the policy's logits NaN.
    """
    settings = build_recipe(tree)
    mesh, job = Mesh.create(settings.layout, "cpu"), prepare(settings)
    assert isinstance(job, RlJob)
    built = build_for_training(job.shape, mesh, settings)
    phases = []
    with ExitStack() as stack:
        loader = job.training_loader(mesh, built, Recorder(), lambda: False, stack, {})  # type: ignore[arg-type]
        for number in range(2):
            if damaged and number:
                for p in built.model.parameters():
                    p.data.fill_(torch.nan)
            position = number * settings.train.batch
            assert loader.make_ready(position)
            phases.append([sample.ids.tolist() for sample in loader.samples])
            batches = loader.step(position)
            train_step(built.model, built.state, batches, mesh, lr=0.05, clip=1.0)
    return phases


@pytest.mark.slow(5)
def test_groups_write_what_one_device_writes(pool: Any) -> None:
    def tree(**more: Any) -> dict[str, Any]:
        given = recipe(model=MODEL, rl={"start": {"steps": 0}}, train={"dtype": "float64"}, **more)  # fmt: skip
        return given.model_dump(mode="json")

    expected = two_phases(tree())
    assert expected[0] != expected[1]
    rollout = {"rollout": {"layout": {"tp": 2}}}
    for found in pool.run(
        4, two_phases, tree(layout={"dp": 2, "tp": 2}, roles=rollout)
    ):
        assert found == expected


@pytest.mark.slow(4)
def test_a_policy_that_diverges_ends_all_ranks_of_a_group(pool: Any) -> None:
    """Ranks that compute along with the first one of their group end with its line, too."""
    given = recipe(model=MODEL, rl={"start": {"steps": 0}}, layout={"tp": 2})
    with pytest.raises(WeftError, match="not finite after 1 updates"):
        pool.run(2, two_phases, given.model_dump(mode="json"), True, timeout=60)
