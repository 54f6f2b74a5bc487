"""Experts in files of which passes bring those that tokens choose: the same bits and fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import recipe, start, write_corpus
from tests.conftest import Command
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.parallel.build import check_fits
from weft.parallel.experts.chosen import ChosenExperts
from weft.recipe import Memory, ModelShape
from weft.train.step import evaluate, train_step

MODEL = {"layers": 3, "experts": 12, "experts_per_token": 1, "expert_ffn": 128, "balance_loss": 0.01,
         "shared_experts": 1}  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def values_of(corpus: str, layout: dict[str, int], **train: Any) -> dict[str, Any]:
    values = recipe(corpus, **{f"layout__{axis}": n for axis, n in layout.items()}).model_dump(mode="json")  # fmt: skip
    # also numbers that ranks cannot divide evenly, and of which one rank has none
    experts = {2: 13, 4: 5}.get(layout.get("shard", 1), 12)
    values["model"] |= MODEL | {"experts": 12 if len(layout) > 1 else experts}
    values["train"] |= {"batch": 4, "micro_batch": 1, "recompute": "none"} | train
    values["data"]["seq_len"] = 4
    return values


def trained(values: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    """Losses, state and what was read of three steps and an evaluation in between."""
    _, mesh, model, state, loader = start(values | {"memory": memory})
    losses, batch = [], values["train"]["batch"]
    for step in range(3):
        batches = loader.step(step * batch) or []
        result = train_step(model, state, batches, mesh, lr=1e-2, clip=0.1)
        losses += [result.loss, result.grad_norm]
        losses.append(evaluate(model, state, [batches], mesh))
    units = [unit for unit in state.units if isinstance(unit, ChosenExperts)]
    tensors = {name: t.values.clone() for name, t in state.tensors().items()}
    read = state.tiers.bytes["read"]
    counts = [unit.counts for unit in units]
    report = state.tiers.summary()
    return {"losses": losses, "tensors": tensors, "read": read, "counts": counts, "report": report}  # fmt: skip


def compared(values: dict[str, Any], folder: str) -> dict[str, Any]:
    memory = {"weights": "file", "folder": folder}
    every = trained(values, memory)
    chosen = trained(values, memory | {"experts": "chosen"})
    assert every["tensors"].keys() == chosen["tensors"].keys()
    tensors = chosen["tensors"]
    differ = [name for name, tensor in every["tensors"].items() if not torch.equal(tensor, tensors[name])]  # fmt: skip
    return {
        "differ": differ,
        "losses": (every["losses"], chosen["losses"]),
        "read": (every["read"], chosen["read"]),
        "counts": chosen["counts"],
        "report": chosen["report"],
    }


LAYOUTS = [
    ({"shard": 1}, {}),
    ({"shard": 2}, {"recompute": "full"}),
    ({"shard": 2, "ep": 2, "dp": 2}, {}),
    ({"shard": 2, "pp": 2}, {"dtype": "bfloat16"}),
    ({"tp": 2, "shard": 2}, {}),
    ({"shard": 4}, {}),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "train"), [
    LAYOUTS[0], pytest.param(*LAYOUTS[1], marks=pytest.mark.slow(2)),
    *(pytest.param(*each, marks=pytest.mark.soak) for each in LAYOUTS[2:]),
], ids=str)  # fmt: skip
def test_the_bits_are_those_of_all_experts(
    pool: Any, corpus: str, layout: dict[str, int], train: dict[str, Any], tmp_path: Any
) -> None:
    values = values_of(corpus, layout, **train)
    world = Layout(**layout).world
    ranks = pool.run(world, compared, values, str(tmp_path))
    assert sum(r["read"][1] for r in ranks) < sum(r["read"][0] for r in ranks), "bytes"
    for ran in ranks:
        assert not ran["differ"]
        every, chosen = ran["losses"]
        assert every == chosen
        assert ran["counts"]
        for counts in ran["counts"]:
            assert 0 < counts["hits"] <= counts["used"]
        assert "were foreseen, and waited" in ran["report"]


def test_what_cannot_choose_is_refused() -> None:
    files = Memory(weights="file", experts="chosen")
    shape = ModelShape(**{"vocab": 61, "layers": 2, "embed": 16, "heads": 2} | {"experts": 4})  # fmt: skip
    check_fits(shape, Layout(shard=2), memory=files)
    for model, layout, memory in (
        (shape, Layout(shard=2), Memory(experts="chosen")),
        (shape.model_copy(update={"experts": 0}), Layout(shard=2), files),
        (shape, Layout(shard=2, ep=2, placement="moving"), files),
        (shape, Layout(shard=2, ep=2, dispatch="adaptive"), files),
    ):
        with pytest.raises(UsageError, match=r"memory.experts = 'chosen' is for a"):
            check_fits(model, layout, memory=memory)


@pytest.mark.soak
def test_a_run_says_what_was_foreseen(
    command: Command, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("memory.weights=file", "memory.experts=chosen", "train.steps=3", "data.seq_len=16", "train.batch=2",
                "layout.shard=1", "validation.every=0", "observe.trackers=[]")  # fmt: skip
    code, out, err = command("train", "experts", *(w for s in settings for w in ("--set", s)))  # fmt: skip
    assert code == 0, err
    assert "were foreseen" in out + err
