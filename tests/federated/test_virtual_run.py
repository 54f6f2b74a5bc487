"""``weft train`` of a recipe with simulated clients: resumed as if never stopped, and refused in one line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.api import start
from weft.checkpoint.store import open_checkpoint, stored_files
from weft.errors import UsageError, WeftError
from weft.federated.plain_tensors import load_values
from weft.observe.run_metrics import read_metrics
from weft.recipe import Recipe, build_recipe, load_recipe


def small(**federated: Any) -> Recipe:
    """Four clients with a few samples of digits."""
    return build_recipe(
        {
            "model": {
                "kind": "mlp",
                "settings": {"depth": 0},
                "inputs": {"pixels": [64]},
                "outputs": {"digit": [10]},
            },
            "federated": {
                "clients": 4,
                "classes": 3,
                "steps": 2,
                "rounds": 4,
                "speeds": [1, 2, 3],
                **federated,
            },
            "train": {"batch": 4, "dtype": "float64"},
            "optimizer": {"kind": "sgd", "lr": 0.1},
        }
    )


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The model of a run's last checkpoint."""
    checkpoint = open_checkpoint(str(sorted((run / "checkpoints").glob("step-*"))[-1]))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        file.write_bytes(stored_files(checkpoint)["federation.safetensors"])
        parameters: dict[str, torch.Tensor] = load_values(file)["clock"]["parameters"]
    return parameters


@pytest.mark.parametrize(
    "policy", ["fedcompass", pytest.param("scaffold-m", marks=pytest.mark.slow(10))]
)
def test_a_resumed_run_is_as_if_never_stopped(tmp_path: Path, policy: str) -> None:
    more: dict[str, Any] = {"policy": policy, "drops": 0.1, "away": 2.0, "jitter": 0.2}
    more |= {"min_steps": 1, "max_steps": 4} if policy == "fedcompass" else {}
    start(small(rounds=9, **more), tmp_path / "whole")
    start(small(rounds=5, **more), tmp_path / "halves")
    start(small(rounds=9, **more), tmp_path / "halves", resume="auto")
    whole, halves = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert whole.keys() == halves.keys()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    # the partition is in the checkpoint, and every change is on record
    place = sorted((tmp_path / "halves" / "checkpoints").glob("step-*"))[-1]
    partition = json.loads(stored_files(open_checkpoint(str(place)))["partition.json"])
    assert len(partition["rows"]) == 4
    records = read_metrics(tmp_path / "halves")["federated"]
    assert [record["step"] for record in records] == [*range(1, 10)]
    assert records[-1]["bytes"] == read_metrics(tmp_path / "whole")["federated"][-1]["bytes"]  # fmt: skip
    with pytest.raises(WeftError, match=f"federated.policy = '{policy}'"):
        start(small(policy="fedavg"), tmp_path / "halves", resume="auto")


def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    """FedAvg: the model down and a difference up for every client; SCAFFOLD: twice that, but no ``c`` at first."""
    size = 650 * 8
    for policy, first, later in (("fedavg", 8, 8), ("scaffold", 12, 16)):
        start(small(policy=policy, rounds=2), tmp_path / policy)
        records = read_metrics(tmp_path / policy)["federated"]
        assert [record["bytes"] for record in records] == [first * size, (first + later) * size]  # fmt: skip


@pytest.mark.parametrize(("tree", "words"), [
    ({"model": {}}, "set model.kind"),
    ({"optimizer": {"kind": "adamw"}}, "optimizer.kind = 'adamw'"),
    ({"optimizer": {"kind": "sgd", "warmup": 5}}, "optimizer.warmup does nothing"),
    ({"train": {"recompute": "full"}}, "train.recompute does nothing"),
    ({"generate": {"prompt": "a"}}, r"\[generate\] does nothing"),
    ({"layout": {"dp": 2}}, "leave the layout out"),
    ({"federated": {"per_round": 9}}, "more than federated.clients"),
    ({"federated": {"polcy": "fedavg"}}, "did you mean 'policy'"),
    ({"federated": {"policy": "fedfix", "tick": 0}}, "greater than 0"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(tree: dict[str, Any], words: str) -> None:
    recipe = small().model_dump(mode="json", exclude_unset=True)
    with pytest.raises(UsageError, match=words):
        build_recipe({**recipe, **tree})


def test_samples_that_the_model_cannot_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"set model.inputs = \{ pixels = \[13\] \}"):
        start(small(samples="sklearn:wine"), tmp_path / "run")


@pytest.mark.slow(10)
def test_the_recipe_of_this_house_learns(tmp_path: Path) -> None:
    start(load_recipe("federated"), tmp_path / "run")
    records = read_metrics(tmp_path / "run")["train"]
    assert records[-1]["held_out_accuracy"] > 0.75
