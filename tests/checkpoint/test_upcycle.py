"""A dense model with experts made of its feed-forwards is the same model at first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_hugging_face import logits, ours, their_logits, theirs
from weft.checkpoint.convert import convert
from weft.checkpoint.convert.upcycle import down_scale
from weft.checkpoint.model import open_model
from weft.errors import UsageError
from weft.recipe import ModelShape

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("settings", [
    "experts=4,experts_per_token=2",
    "experts=8,experts_per_token=4,expert_ffn=28",
    "experts=12,experts_per_token=4,expert_ffn=14,router=pre-softmax,router_norm=true,first_dense=1",
    "experts=4,experts_per_token=2,expert_ffn=28,router=sigmoid,router_norm=true,router_scale=2.5",
])  # fmt: skip
def test_the_first_forward_is_the_dense_models(settings: str, tmp_path: Path) -> None:
    theirs("qwen3", tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "moe", upcycle=settings)
    model, *_ = open_model(str(tmp_path / "moe"), "cpu", print)
    count = int(settings.split(",")[0].removeprefix("experts="))
    assert {router for router in model.shape.mixtures.values()} == {count}
    torch.testing.assert_close(
        logits(model), logits(ours(tmp_path / "dense")), rtol=1e-5, atol=5e-5
    )
    table = model.blocks["1"].ffn.router.table  # type: ignore[union-attr]
    assert (
        len(table.unique(dim=0)) == count // (56 // model.shape.expert_ffn)
        and table.std() > 0
    )


def test_transformers_computes_it_too(tmp_path: Path) -> None:
    reference = theirs("llama tied", tmp_path / "dense")
    convert(
        tmp_path / "dense",
        tmp_path / "moe",
        to="hf",
        upcycle="experts=4,experts_per_token=2",
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    assert type(loaded).__name__ == "MixtralForCausalLM"
    torch.testing.assert_close(
        their_logits(loaded), their_logits(reference), rtol=1e-5, atol=5e-5
    )


def test_weights_that_do_not_add_up_are_right_on_average(tmp_path: Path) -> None:
    """Before any normalisation eight of 32 experts weigh a quarter of the whole, more or less."""
    theirs("qwen3", tmp_path / "dense")
    convert(tmp_path / "dense", tmp_path / "moe",
            upcycle="experts=32,experts_per_token=8,expert_ffn=28,router=pre-softmax")  # fmt: skip
    model, *_ = open_model(str(tmp_path / "moe"), "cpu", print)
    for block in model.blocks.values():
        block.ffn.router.table.data *= 0.01  # type: ignore[union-attr]
    torch.testing.assert_close(
        logits(model), logits(ours(tmp_path / "dense")), rtol=0.05, atol=0.1
    )
    shape = ModelShape(
        experts=32, experts_per_token=8, ffn=56, expert_ffn=28, router="pre-softmax"
    )
    # R G^2 / k of the Megatron upcycling paper (2410.07524)
    assert down_scale(shape, 32) == 16 * 2**2 / 8


@pytest.mark.parametrize(("settings", "words"), [
    ("experts=8,expert_ffn=30", "expert_ffn = 30 does not divide the dense ffn of 56"),
    ("experts=9,experts_per_token=2,expert_ffn=28", "9 is no multiple"),
    ("experts=8,experts_per_token=1,expert_ffn=28", "1 is no multiple"),
    ("experts=2,experts_per_token=3", "experts_per_token = 3 is more than the 2 experts"),
    ("experts", "not of the form"), ("layers=3", "'layers' is not about experts"), ("experts=many", "experts"),
    ("experts_per_token=2", "makes no experts"),
])  # fmt: skip
def test_what_cannot_be_upcycled_is_one_line(
    settings: str, words: str, tmp_path: Path
) -> None:
    theirs("qwen3", tmp_path / "dense")
    with pytest.raises(UsageError, match=words) as caught:
        convert(tmp_path / "dense", tmp_path / "moe", upcycle=settings)
    assert "\n" not in str(caught.value) and not (tmp_path / "moe").exists()


def test_experts_are_not_upcycled_again(tmp_path: Path) -> None:
    theirs("mixtral", tmp_path / "moe")
    change: dict[str, Any] = {"upcycle": "experts=4"}
    with pytest.raises(UsageError, match="is for dense models"):
        convert(tmp_path / "moe", tmp_path / "out", **change)
