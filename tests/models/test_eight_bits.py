"""Weights in 8 bits, with a scale for each block, as DeepSeek-V3 is published: read as their products."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_hugging_face import (
    SINGLE,
    assert_ranks_read_their_boxes,
    logits,
    ours,
    their_logits,
    theirs,
)
from weft.checkpoint.convert import convert, open_foreign
from weft.checkpoint.weights import open_pretrained
from weft.errors import WeftError
from weft.recipe import RopeScaling
from weft.shapes.config import shape_from_config
from weft.shapes.parameters import parameter_count

transformers = pytest.importorskip("transformers")

BLOCK = (16, 9)  # neither fits the sizes of the model
PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]
    },
    "rms_norm_eps": 1e-06, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def test_the_published_configuration_of_deepseek_v3(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    shape = shape_from_config(tmp_path)
    # without what predicts a second token
    assert parameter_count(shape, shape.vocab) == 671_026_404_352
    assert shape.rope_scaling == RopeScaling(
        kind="yarn",
        factor=40,
        original_max_position=4096,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    assert (
        shape.router_groups,
        shape.router_top_groups,
        shape.router_norm,
        shape.first_dense,
    ) == (8, 4, True, 3)


def in_eight_bits(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """A folder like ``folder`` with the matrices of blocks in 8 bits, as published; returns what these stand for."""
    stored, meant = {}, {}
    for name, weight in load_file(folder / SINGLE).items():
        stored[name] = meant[name] = weight
        if weight.ndim == 2 and ".layers." in name and ".gate.weight" not in name:
            rows, columns = (
                -(-n // size) for n, size in zip(weight.shape, BLOCK, strict=True)
            )
            scale, low = (
                torch.empty(rows, columns),
                torch.empty(weight.shape, dtype=torch.float8_e4m3fn),
            )
            meant[name] = torch.empty_like(weight)
            for i in range(rows):
                for j in range(columns):
                    at = tuple(
                        slice(k * size, (k + 1) * size)
                        for k, size in zip((i, j), BLOCK, strict=True)
                    )
                    scale[i, j] = weight[at].abs().max() / 448
                    low[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
                    meant[name][at] = low[at].float() * scale[i, j]
            stored |= {name: low, f"{name}_scale_inv": scale}
    out.mkdir()
    save_file(stored, out / SINGLE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = PUBLISHED["quantization_config"] | {
        "weight_block_size": list(BLOCK)
    }
    (out / "config.json").write_text(json.dumps(config))
    return meant


def test_logits_are_those_of_what_the_bytes_stand_for(tmp_path: Path) -> None:
    reference = theirs("deepseek v3", tmp_path / "wide")
    meant = in_eight_bits(tmp_path / "wide", tmp_path / "low")
    assert (
        sum(
            not torch.equal(meant[n], w)
            for n, w in load_file(tmp_path / "wide" / SINGLE).items()
        )
        > 40
    )
    save_file(meant, tmp_path / "wide" / SINGLE, {"format": "pt"})
    reference = type(reference).from_pretrained(tmp_path / "wide").eval()
    torch.testing.assert_close(
        logits(ours(tmp_path / "low")), their_logits(reference), rtol=1e-5, atol=5e-5
    )
    convert(tmp_path / "low", tmp_path / "weft")
    convert(tmp_path / "weft", tmp_path / "out", to="hf")
    found = load_file(tmp_path / "out" / SINGLE)
    assert found.keys() == meant.keys() and all(
        torch.equal(found[name], meant[name]) for name in meant
    )
    assert "quantization_config" not in json.loads(
        (tmp_path / "out/config.json").read_text()
    )


@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_reads_its_box(tp: int, tmp_path: Path) -> None:
    theirs("deepseek v3", tmp_path / "wide")
    in_eight_bits(tmp_path / "wide", tmp_path / "low")
    assert_ranks_read_their_boxes(tmp_path / "low", tp)


def test_missing_scales_and_unknown_bytes_are_one_line(tmp_path: Path) -> None:
    theirs("deepseek v3", tmp_path / "wide")
    in_eight_bits(tmp_path / "wide", tmp_path / "low")
    config, stored = (
        json.loads((tmp_path / "low/config.json").read_text()),
        load_file(tmp_path / "low" / SINGLE),
    )
    gone = "model.layers.1.mlp.experts.5.up_proj.weight_scale_inv"
    save_file(
        {key: value for key, value in stored.items() if key != gone},
        tmp_path / "low" / SINGLE,
        {"format": "pt"},
    )
    for opened in (open_pretrained, open_foreign):
        with pytest.raises(
            WeftError,
            match=rf"5 of 6 experts for blocks\.1\.ffn\.experts\.up: {gone} is missing",
        ):
            opened(tmp_path / "low")
    for given in ("fp8", {"quant_method": "fp8"}, {"quant_method": "awq", "weight_block_size": [8, 8]},
                  {"quant_method": "fp8", "weight_block_size": [0, 128]},
                  {"quant_method": "fp8", "weight_block_size": [1, 128], "fmt": "e5m2"}):  # fmt: skip
        (tmp_path / "low/config.json").write_text(
            json.dumps(config | {"quantization_config": given})
        )
        with pytest.raises(
            WeftError, match=r"quantization_config = .* is not supported"
        ) as caught:
            open_pretrained(tmp_path / "low")
        assert "\n" not in str(caught.value)
    save_file(stored, tmp_path / "low" / SINGLE, {"format": "pt"})
    (tmp_path / "low/config.json").write_text(
        json.dumps(config | {"quantization_config": None})
    )
    with pytest.raises(
        WeftError, match="has no quantization_config, which says what the 8 bits of"
    ):
        ours(tmp_path / "low")
