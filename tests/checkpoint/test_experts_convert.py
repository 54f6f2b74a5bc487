"""Checkpoints of mixtures in and out: Hugging Face, DCP and Weft, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_hugging_face import logits, ours, their_logits, theirs, whole
from weft.checkpoint.convert import convert, open_foreign
from weft.checkpoint.model import open_model
from weft.errors import WeftError

transformers = pytest.importorskip("transformers")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mixtral", "qwen2 moe", "deepseek v3"])
def test_a_trip_through_weft_and_dcp_changes_no_bit(name: str, tmp_path: Path) -> None:
    reference = theirs(name, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "weft")
    convert(tmp_path / "weft", tmp_path / "dcp", to="dcp")
    convert(tmp_path / "dcp", tmp_path / "again", to="hf")
    expected = whole(ours(tmp_path / "hf"))
    for where in ("weft", "dcp", "again"):
        found = open_foreign(tmp_path / where)
        for key, value in expected.items():
            assert torch.equal(found.read(key), value), (where, key)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "again"
    ).eval()
    torch.testing.assert_close(their_logits(loaded), their_logits(reference))
    model, *_ = open_model(str(tmp_path / "weft"), "cpu", print)
    torch.testing.assert_close(
        logits(model), their_logits(reference), rtol=1e-5, atol=5e-5
    )


def test_experts_that_are_cut_short_are_one_line(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    reference = theirs("mixtral", tmp_path / "hf")
    # experts of a layer in one tensor each
    state: dict[str, Any] = reference.state_dict()
    dcp.save(state, checkpoint_id=tmp_path / "fused", no_dist=True)
    config = tmp_path / "hf/config.json"
    found = open_foreign(tmp_path / "fused", config=config)
    for key, value in whole(ours(tmp_path / "hf")).items():
        assert torch.equal(found.read(key), value), key
    convert(tmp_path / "hf", tmp_path / "dcp", to="dcp")
    pieces = {
        key: value
        for key, value in _tensors(tmp_path / "hf").items()
        if ".experts.3." not in key
    }
    dcp.save(pieces, checkpoint_id=tmp_path / "short", no_dist=True)
    with pytest.raises(
        WeftError, match=r"expert 3 of blocks\.0\.ffn\.experts\.gate is missing"
    ):
        open_foreign(tmp_path / "short", config=config)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
