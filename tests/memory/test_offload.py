"""State and activations on the host: equal to one device, everything moved once, and checkpoints as before."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import Case, recipe, start, write_corpus
from tests.checkpoint.test_resume import go, state_of
from tests.checkpoint.test_resume import tree as save_tree
from tests.prove.test_equality import difference, name, tree
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.recipe import Memory, build_recipe
from weft.train.setup import build_for_training, prepare
from weft.train.step import evaluate, train_step

FILES = {"weights": "file"}
ALL = {"weights": "host", "activations": "host"}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [
    {"layout": {"shard": 1}, "memory": ALL},
    {"layout": {"shard": 2, "tp": 2}, "memory": ALL, "micro_batch": 1},
    {"layout": {"dp": 2, "shard": 2}, "zero": 2, "memory": {"weights": "host"}, "micro_batch": 1, "tied": True},
    {"layout": {"shard": 4, "secondary": 2}, "memory": ALL, "recompute": "full"},
    {"layout": {"cp": 2, "tp": 2}, "zero": 1, "memory": {"activations": "host"}, "kv_heads": 1, "extras": True},
    {"layout": {"cp": 2}, "memory": {"activations": "host"}, "context": "zigzag", "mixer": "retention"},
    {"layout": {"pp": 2, "shard": 2, "dp": 2}, "memory": ALL, "micro_batch": 1, "tied": True},
    {"layout": {"pp": 2, "tp": 2, "schedule": "zb-h1"}, "memory": ALL, "micro_batch": 1, "recompute": "full"},
    {"layout": {"pp": 2, "shard": 2, "virtual": 2, "schedule": "interleaved-1f1b"}, "memory": {"weights": "host"},
     "batch": 8, "micro_batch": 1},
    {"layout": {"dp": 2, "tp": 2}, "memory": FILES, "micro_batch": 1, "tied": True},
    {"layout": {"cp": 2, "shard": 2}, "memory": {"weights": "file", "gradients": "host"}, "recompute": "full"},
    {"layout": {"pp": 2, "shard": 2, "schedule": "zb-h1"}, "memory": FILES | {"activations": "host"}, "micro_batch": 1},
    {"layout": {"shard": 2}, "zero": 2, "memory": {"moments": "file"}, "micro_batch": 1},
    {"layout": {"shard": 2, "tp": 2}, "memory": {"weights": "host", "alternate": 0.5}},
    {"layout": {"pp": 2, "dp": 2}, "memory": {"weights": "host", "alternate": "auto"}, "micro_batch": 1, "tied": True},
], ids=lambda case: name(case).replace("/", "_"))  # fmt: skip
def test_equal_to_one_device(pool: Any, corpus: str, case: Case) -> None:
    values = tree(corpus, case)
    values |= {"memory": {"folder": str(Path(corpus).parent), **case["memory"]}}
    values["train"]["batch"] = case.get("batch", 5)
    values["model"]["layers"] = 4
    found = pool.run(Layout(**case["layout"]).world, difference, values)[0]
    assert found.ok, found


def trained(
    values: dict[str, Any], memory: dict[str, str], zero: int
) -> dict[str, torch.Tensor]:
    """This rank's part of the state after three steps."""
    values = values | {"memory": memory, "layout": values["layout"] | {"zero": zero}}
    _, mesh, model, state, loader = start(values)
    for step in range(3):
        train_step(
            model,
            state,
            loader.step(step * values["train"]["batch"]) or [],
            mesh,
            lr=1e-2,
            clip=0.1,
        )
    return {name: tensor.values.clone() for name, tensor in state.tensors().items()}


def differing(values: dict[str, Any], folder: str, zero: int) -> list[str]:
    found, plain = (
        trained(values, {**FILES, "folder": folder}, 3),
        trained(values, {}, zero),
    )
    assert found.keys() == plain.keys()
    return [name for name in plain if not torch.equal(found[name], plain[name])]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layout",
    [{"shard": 2}, {"shard": 2, "tp": 2}, {"cp": 2}, {"dp": 2, "shard": 2}, {"dp": 2}],
    ids=str,
)
def test_files_have_the_bits_of_gradients_that_are_summed_once(
    pool: Any, corpus: str, layout: dict[str, int], tmp_path: Path
) -> None:
    """Whatever the number of microbatches: what ``layout.zero`` = 1 does with the state in memory."""
    values = tree(corpus, {"layout": layout, "micro_batch": 1})
    values["train"]["batch"] = 6
    world = Layout(**layout).world
    assert not any(pool.run(world, differing, values, str(tmp_path), 1))


# --- activations


def counted(values: dict[str, Any]) -> tuple[int, int, int, int]:
    """Bytes that leave in one pass on this rank, the same with full recompute, and those of block inputs."""
    sent = []
    for mode in ("none", "full"):
        values["train"]["recompute"] = mode
        settings, mesh, model, state, loader = start(values)
        batches = loader.step(0) or []
        train_step(model, state, batches, mesh, lr=1e-3, clip=1.0)
        sent.append(model.hooks.saver.sent)
        evaluate(model, state, [batches], mesh)
        assert model.hooks.saver.sent == sent[-1]  # without gradients nothing is saved
    inputs = (
        8
        * settings.model.layers
        * sum(b.tokens.numel() for b in batches)
        // mesh.size("tp")
    )
    return (*sent, inputs * settings.model.embed, len(batches))  # type: ignore[return-value]


@pytest.mark.parametrize("layout", [{"shard": 2}, {"tp": 2}], ids=str)
def test_full_recompute_sends_inputs_of_blocks_alone(
    pool: Any, corpus: str, layout: dict[str, int]
) -> None:
    values = tree(corpus, {"layout": layout, "micro_batch": 1})
    values["memory"] = {"activations": "host", "blocks": 9}
    values["data"] |= {"seq_len": 65}  # what is smaller than a page stays
    for whole, inputs, formula, _ in pool.run(2, counted, values):
        assert inputs == formula and whole > 5 * inputs


# --- state


def places(values: dict[str, Any]) -> dict[str, set[str]]:
    settings = build_recipe(values)
    mesh = Mesh.create(settings.layout, "cpu")
    _, state = build_for_training(prepare(settings).shape, mesh, settings)
    return {
        "kind": {type(p.parameter).__name__ for p in state.held},
        "state": {str(tensor.values.device) for tensor in state.tensors().values()},
    }


def test_one_rank_has_its_state_apart_as_well(pool: Any, corpus: str) -> None:
    """Without offloading a lone rank's parameters are its state; with it they are gathered from the host."""
    for place, kind in (("device", "Parameter"), ("host", "DTensor")):
        values = tree(corpus, {"layout": {}}) | {"memory": {"weights": place}}
        assert pool.run(1, places, values)[0] == {"kind": {kind}, "state": {"cpu"}}


@pytest.mark.soak
@pytest.mark.slow
def test_checkpoints_do_not_know_of_it(pool: Any, corpus: str, tmp_path: Path) -> None:
    """Six steps; three with and three without, or the other way round: the same state to the last bit."""

    def values(memory: dict[str, str], steps: int) -> dict[str, Any]:
        constant = {"optimizer__schedule": "constant", "train__steps": steps}
        return save_tree(corpus, {"shard": 2}, **constant) | {"memory": memory}

    def final(
        folder: str, *runs: tuple[dict[str, str], int]
    ) -> dict[str, torch.Tensor]:
        out = tmp_path / folder
        for i, (memory, steps) in enumerate(runs):
            pool.run(2, go, values(memory, steps), str(out), str(out) if i else None)
        return state_of(out / "checkpoints" / "step-000006", values({}, 6))

    whole = final("whole", ({}, 6))
    for folder, first, then in (("on", ALL, {}), ("off", {}, ALL)):
        mixed = final(folder, (first, 3), (then, 6))
        assert mixed.keys() == whole.keys()
        assert all(torch.equal(mixed[key], whole[key]) for key in whole)


def test_what_cannot_be_is_said(corpus: str) -> None:
    with pytest.raises(
        UsageError, match=r"does not see what train.recompute = 'selective' keeps"
    ):
        recipe(corpus, memory__activations="host", train__recompute="selective")
    with pytest.raises(
        UsageError,
        match=r"train: offload = 'all' is now memory.weights = 'host' and memory.act",
    ):
        recipe(corpus, train__offload="all")
    assert recipe(corpus, train__offload="none") == recipe(corpus)


@pytest.mark.parametrize(("memory", "said"), [
    ({"folder": "s3://bucket/tier"}, "memory.folder = 's3://bucket/tier': it should be a folder of this computer"),
    ({"moments": "nvme"}, "memory.moments = 'nvme' is not possible; choose from: device, host, file"),
    ("file", "memory = 'file': it should be a section of keys"),
], ids=str)  # fmt: skip
def test_what_is_no_place_is_said(memory: Any, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        build_recipe({"memory": memory})


def test_what_rests_where() -> None:
    assert Memory().away == {}
    host = Memory(weights="host", moments="file")
    assert host.away == {"weights": "host", "gradients": "host", "moments": "file"}
    assert (
        host.offloads_state
        and not host.offloads_activations
        and host.place_of("activations") == "device"
    )
