"""Runs that train an adapter: what they save, what they go on from, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import recipe, write_corpus
from tests.checkpoint.test_resume import go
from weft.checkpoint.model import export_model, open_model
from weft.checkpoint.store import open_checkpoint
from weft.checkpoint.weights import open_pretrained
from weft.errors import WeftError
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import Train

TOKENS = torch.arange(40).view(2, 20) * 7 % 97


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model(
            TOKENS,
            torch.arange(20).expand(2, 20),
            torch.tensor([0, 20, 40], dtype=torch.int32),
        )


def adapter_of(run: Path) -> dict[str, torch.Tensor]:
    """Everything that the checkpoint of step 4 holds."""
    checkpoint = open_checkpoint(run / "checkpoints" / "step-000004")
    found = open_pretrained(str(run))
    assert found.values is not None
    shape = found.shape
    return {
        name: found.values(
            name.removeprefix("model."), logical, tuple((0, n) for n in logical.shape)
        )
        for name, logical in (
            (f"model.{n}", one)
            for n, one in Transformer(shape, Mesh.single()).logical_parameters()
        )
        if name in checkpoint.tensors
    }


@pytest.mark.slow
def test_an_adapter_is_saved_goes_on_elsewhere_and_knows_its_base(
    pool: Any, corpus: str, tmp_path: Path
) -> None:
    def tree(kind: str, **change: Any) -> dict[str, Any]:
        base = {
            "adapter__kind": kind,
            "adapter__rank": 3,
            "optimizer__lr": 1e-2,
            "checkpoint__every": 2,
        }
        return recipe(corpus, **base | {"train__steps": 4} | change).model_dump(
            mode="json"
        )

    for kind in ("dora", "qlora"):
        moved = tmp_path / f"{kind}-moved"
        pool.run(
            2,
            go,
            tree(kind, layout__shard=2, train__steps=2, optimizer__schedule="constant"),
            str(moved),
        )
        pool.run(
            1,
            go,
            tree(kind, optimizer__schedule="constant"),
            str(tmp_path / f"{kind}-constant"),
        )
        pool.run(
            2,
            go,
            tree(kind, layout__tp=2, optimizer__schedule="constant"),
            str(moved),
            "auto",
        )
        names = open_checkpoint(moved / "checkpoints/step-000004").tensors
        assert all(".adapters." in name for name in names)
        ours, theirs = adapter_of(moved), adapter_of(tmp_path / f"{kind}-constant")
        assert ours and ours.keys() == theirs.keys()
        for name in ours:
            assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-9), name

        unmerged = logits(open_model(str(moved), "cpu", print)[0])
        export_model(str(moved), tmp_path / f"{kind}-merged", print, merge=True)
        merged = open_pretrained(str(tmp_path / f"{kind}-merged"))
        assert merged.shape.adapter is None
        plain, _ = parallelize(merged.shape, Mesh.single(), Train(), merged.values)
        assert (logits(plain) - unmerged).abs().max() < 1e-5
        with pytest.raises(
            WeftError,
            match=r"adapter for another model: new weights of seed 0, .* seed 1",
        ) as no:
            pool.run(
                1, go, tree(kind, train__steps=6, train__seed=1), str(moved), "auto"
            )
        assert "\n" not in str(no.value)
