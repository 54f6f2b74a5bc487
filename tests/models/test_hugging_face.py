"""Hugging Face folders in and out, against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weft.checkpoint.convert import open_foreign
from weft.checkpoint.weights import open_pretrained
from weft.errors import WeftError
from weft.layout.dims import Dim
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.placement import Place
from weft.models.hugging_face import (
    INDEX,
    SINGLE,
    check_stored,
    export,
    hf_values,
    tokenizer_files,
)
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize, resident_state
from weft.recipe import ModelShape, RopeScaling, Train
from weft.shapes.config import config_from_shape, shape_from_config
from weft.shapes.foreign_names import hf_name

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 6,
    "query_pre_attn_scalar": 16,
}
QWEN: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6,
    "v_head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    **DEEPSEEK,
    "n_group": 1,
    "first_k_dense_replace": 0,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0,
        "mscale_all_dim": 0.7, "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_theta": 5e3, **LLAMA3}}),
    "llama tied": (
        "llama",
        {"tie_word_embeddings": True, "head_dim": 12, "num_key_value_heads": 4},
    ),
    "qwen2": (
        "qwen2",
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ),
    "qwen2 tied": (
        "qwen2",
        {"tie_word_embeddings": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-5},
    ),
    "qwen3": (
        "qwen3",
        {
            "head_dim": 24,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral with windows": ("mistral", {"sliding_window": 7}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "num_hidden_layers": 7, "query_pre_attn_scalar": 24},
    ),
    "gemma3 scaled": (
        "gemma3_text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 8.0,
                    "rope_theta": 1e6,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_theta": 5e3,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mixtral": (
        "mixtral",
        {
            "num_local_experts": 5,
            "router_aux_loss_coef": 0.02,
            "output_router_logits": True,
        },
    ),
    "qwen2 moe": (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 48, "mlp_only_layers": [0], **QWEN},
    ),
    "qwen3 moe": (
        "qwen3_moe",
        {"norm_topk_prob": True, "head_dim": 12, **QWEN, "num_experts": 8},
    ),
    "qwen3 moe, every second": (
        "qwen3_moe",
        {**QWEN, "decoder_sparse_step": 2, "num_hidden_layers": 4, "head_dim": 8},
    ),
    "qwen3 moe, some": (
        "qwen3_moe",
        {**QWEN, "mlp_only_layers": [1], "num_hidden_layers": 3, "head_dim": 8},
    ),
    "deepseek v2": (
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1},
    ),
    "deepseek v2 groups": (
        "deepseek_v2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek v3": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 3,
            "rope_parameters": YARN,
        },
    ),
    "deepseek v3 halves": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "v_head_dim": 24,
        },
    ),
    "deepseek v3, all dense": (
        "deepseek_v3",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2},
    ),
    "qwen3 tied": (
        "qwen3",
        {"head_dim": 6, "tie_word_embeddings": True, "num_hidden_layers": 3},
    ),
}
EXACT = {"rtol": 0.0, "atol": 0.0}
IDS = torch.randint(0, 61, (2, 33), generator=torch.Generator().manual_seed(0))


def theirs(name: str, folder: Path) -> Any:
    """A random model of transformers, saved in ``folder``. Norm scales and biases are not left at one and zero."""
    kind, change = CASES[name]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **COMMON | change)
    )
    biases = [
        buffer
        for path, buffer in model.named_buffers()
        if path.endswith("correction_bias")
    ]
    for parameter in (*model.parameters(), *biases):
        if parameter.ndim == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.eval().save_pretrained(folder)
    return model


def ours(folder: Path, mesh: Mesh | None = None) -> Transformer:
    return parallelize(
        shape_from_config(folder),
        mesh or Mesh.single(),
        Train(),
        hf_values(folder, shape_from_config(folder)),
    )[0]


def whole(model: Transformer) -> dict[str, torch.Tensor]:
    return {p.name: p.local for p in resident_state(model, model.mesh).held}


def assert_ranks_read_their_boxes(folder: Path, tp: int) -> None:
    """What every rank reads of each parameter is its part of the whole; all but a row, where it has several."""
    shape = shape_from_config(folder)
    values, expected = hf_values(folder, shape), whole(ours(folder))
    for rank in range(tp):
        mesh = Mesh(Layout(tp=tp), torch.device("cpu"), Place.of(Layout(tp=tp), rank))
        for name, logical in Transformer(shape, mesh).logical_parameters():
            box = logical.rows(0, max(1, logical.local_shape[0] - 1))
            assert torch.equal(
                values(name, logical, box),
                expected[name][tuple(slice(*one) for one in box)],
            ), name


@torch.no_grad()
def logits(model: Transformer, ids: torch.Tensor = IDS) -> torch.Tensor:
    rows, seq = ids.shape
    positions = torch.arange(seq).expand(rows, seq)
    return model(ids, positions, torch.arange(rows + 1, dtype=torch.int32) * seq)


@torch.no_grad()
def their_logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_in_and_out(name: str, tmp_path: Path) -> None:
    reference = theirs(name, tmp_path / "in")
    expected = their_logits(reference)
    assert expected.std() > 0.5
    model = ours(tmp_path / "in")
    # Logits reach 7. What is left is float32 rounding: theirs is as far from our float64.
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=5e-5)
    rope = reference.model.rotary_emb
    bases = (
        [rope.full_attention_inv_freq, rope.sliding_attention_inv_freq]
        if "gemma3" in name
        else [rope.inv_freq]
    )
    torch.testing.assert_close(
        model.freq.float(), torch.stack(bases), rtol=1e-6, atol=0
    )

    export(
        whole(model),
        model.shape,
        tmp_path / "out",
        files={"generation_config.json": b'{"eos_token_id": 7}'},
    )
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    # Without a window Mistral is Llama.
    assert type(loaded) is type(reference) or name == "mistral"
    assert not any(
        info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")
    ), info
    # Gemma stores scales less one, which costs the last bit. Their product with a single row depends on where it lies.
    near = "gemma" in name or name == "qwen2 moe"
    torch.testing.assert_close(
        their_logits(loaded.eval()), expected, **({} if near else EXACT)
    )
    assert (
        loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 7
        and loaded.dtype == torch.float32
    )
    before, after = (
        load_file(tmp_path / "in" / SINGLE),
        load_file(tmp_path / "out" / SINGLE),
    )
    assert before.keys() == after.keys()
    for key in before:
        near = (
            {"rtol": 0, "atol": 1.2e-7} if "gemma" in name and "norm" in key else EXACT
        )
        torch.testing.assert_close(before[key], after[key], **near)
    assert shape_from_config(tmp_path / "out") == model.shape


@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_experts_as_transformers_holds_them_in_memory(
    name: str, tmp_path: Path
) -> None:
    reference = theirs(name, tmp_path / "in")
    state = {key: value.clone() for key, value in reference.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in state)
    renamed = {key.replace(".mlp.gate.", ".block_sparse_moe.gate.") if name == "mixtral" else key: value
               for key, value in state.items()}  # fmt: skip
    (tmp_path / "fused").mkdir()
    save_file(renamed, tmp_path / "fused" / SINGLE, metadata={"format": "pt"})
    (tmp_path / "fused/config.json").write_bytes(
        (tmp_path / "in/config.json").read_bytes()
    )
    for key, value in whole(ours(tmp_path / "in")).items():
        assert torch.equal(whole(ours(tmp_path / "fused"))[key], value), key


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_reads_its_part_of_the_experts(tp: int, tmp_path: Path) -> None:
    theirs("deepseek v3", tmp_path)
    assert_ranks_read_their_boxes(tmp_path, tp)


def test_a_missing_expert_is_one_line_before_anything_is_read(tmp_path: Path) -> None:
    theirs("qwen3 moe", tmp_path)
    stored = load_file(tmp_path / SINGLE)
    gone = "model.layers.1.mlp.experts.5.up_proj.weight"
    save_file(
        {key: value for key, value in stored.items() if key != gone},
        tmp_path / SINGLE,
        {"format": "pt"},
    )
    for opened in (open_pretrained, open_foreign):
        with pytest.raises(WeftError) as caught:
            opened(tmp_path)
        line = f"has 7 of 8 experts for blocks.1.ffn.experts.up: {gone} is missing"
        assert line in str(caught.value) and "\n" not in str(caught.value)


def test_what_no_architecture_has_is_not_exported() -> None:
    moe: dict[str, Any] = {"vocab": 9, "experts": 4, "expert_ffn": 8}
    for more, words in (
        ({"router": "sigmoid"}, "MixtralForCausalLM cannot have router = 'sigmoid'"),
        ({"experts": [4, 4, 2, 2]}, "unequally many experts"),
        ({"first_dense": 1}, "MixtralForCausalLM cannot have dense layers"),
        (
            {"kv_rank": 8, "router": "sigmoid"},
            "DeepseekV3ForCausalLM cannot have no shared experts",
        ),
        (
            {"qk_norm": True, "router": "pre-softmax", "router_early": True},
            "router_early = True",
        ),
        ({"activation": "relu"}, "activation = 'relu'"),
        ({"activation": "relu", "experts": 0}, "activation = 'relu'"),
    ):
        with pytest.raises(WeftError, match=words):
            config_from_shape(ModelShape(**moe | more))


def test_packed_documents_are_apart_as_in_separate_calls(tmp_path: Path) -> None:
    reference = theirs("qwen3", tmp_path)
    model, (a, b) = ours(tmp_path), (IDS[:1, :20], IDS[1:, :13])
    positions = torch.cat((torch.arange(20), torch.arange(13)))[None]
    with torch.no_grad():
        packed = model(
            torch.cat((a, b), 1),
            positions,
            torch.tensor([0, 20, 33], dtype=torch.int32),
        )
        expected = torch.cat((reference(a).logits, reference(b).logits), 1)
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_several_files_and_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs("qwen2", tmp_path / "in")
    model = ours(tmp_path / "in")
    values = whole(model)
    asked: list[str] = []

    def get(name: str) -> torch.Tensor:
        asked.append(name)
        return values[name]

    export(get, model.shape, tmp_path / "out", dtype, max_file_bytes=9000)
    assert sorted(set(asked)) == sorted(values)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files == sorted(
        f.name for f in (tmp_path / "out").glob("*.safetensors")
    )
    width = torch.empty(0, dtype=dtype).element_size()
    assert index["metadata"]["total_size"] == width * sum(
        v.numel() for v in values.values()
    )
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= 9000
    again = whole(ours(tmp_path / "out"))
    for name, value in values.items():
        assert torch.equal(again[name], value.to(dtype).float()), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    assert torch.equal(
        loaded.model.layers[1].self_attn.k_proj.bias,
        values["blocks.1.attention.bk"].to(dtype),
    )


@pytest.mark.parametrize("tp", [2, 3])
def test_every_rank_reads_its_box(tp: int, tmp_path: Path) -> None:
    theirs("qwen3", tmp_path)
    values = hf_values(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    for rank in range(tp):
        mesh = Mesh(Layout(tp=tp), torch.device("cpu"), Place.of(Layout(tp=tp), rank))
        for name, logical in Transformer(
            shape_from_config(tmp_path), mesh
        ).logical_parameters():
            box = logical.rows(0, max(1, logical.local_shape[0] - rank))
            expected = stored[hf_name(name)][tuple(slice(lo, hi) for lo, hi in box)]
            assert torch.equal(values(name, logical, box), expected), name


def test_names_are_unique_and_complete() -> None:
    shape = ModelShape(vocab=9, layers=12, qk_norm=True, qkv_bias=True)
    names = [
        hf_name(name)
        for name, _ in Transformer(shape, Mesh.single()).logical_parameters()
    ]
    assert len(set(names)) == len(names) == 12 * 14 + 3
    assert "model.layers.11.self_attn.q_proj.bias" in names


def write_config(folder: Path, **change: Any) -> Path:
    config = {"architectures": ["Qwen3ForCausalLM"], **COMMON, **change}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v != "absent"})
    )
    return folder


def test_configs_of_published_models(tmp_path: Path) -> None:
    llama = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(llama))
    expected = ModelShape(
        vocab=128256, layers=32, embed=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, rope_theta=5e5,
        rope_scaling=RopeScaling(factor=8.0),
    )  # fmt: skip
    assert (
        shape_from_config(tmp_path)
        == shape_from_config(tmp_path / "config.json")
        == expected
    )
    qwen = {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_window_layers": 21, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(qwen))
    expected = ModelShape(
        vocab=151936,
        layers=24,
        embed=896,
        heads=14,
        kv_heads=2,
        ffn=4864,
        qkv_bias=True,
        tied=True,
        norm_eps=1e-6,
        rope_theta=1e6,
    )
    assert shape_from_config(tmp_path) == expected


def test_old_and_new_keys_mean_the_same(tmp_path: Path) -> None:
    old = write_config(tmp_path / "old", rope_theta=3e4, rope_scaling=LLAMA3)
    new = write_config(tmp_path / "new", rope_parameters={"rope_theta": 3e4, **LLAMA3})
    older = {"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}
    older = write_config(
        tmp_path / "older",
        architectures="absent",
        model_type="qwen3",
        rope_theta=3e4,
        rope_scaling=older,
    )
    assert shape_from_config(old) == shape_from_config(new) == shape_from_config(older)
    assert shape_from_config(old).rope_scaling == RopeScaling(
        factor=8, original_max_position=16
    )
    assert shape_from_config(write_config(tmp_path / "plain")).head_dim == 128
    assert (
        shape_from_config(
            write_config(tmp_path / "null", head_dim=None, rope_scaling=None)
        ).rope_theta
        == 1e4
    )


@pytest.mark.parametrize("shape", [
    ModelShape(vocab=99, rope_scaling=RopeScaling(factor=4, original_max_position=64), tied=True, head_dim=20),
    ModelShape(vocab=99, qkv_bias=True, kv_heads=2),
    ModelShape(vocab=99, qk_norm=True, rope_theta=7e5, norm_eps=3e-6, init_std=0.1),
    ModelShape(vocab=99, window=9),
    ModelShape(vocab=99, qkv_bias=True, window=9, full_every=2, rope_scaling=RopeScaling(kind="linear", factor=2)),
    ModelShape(vocab=99, layers=7, qk_norm=True, norm_after=True, scaled_embedding=True, window=5, full_every=6,
               window_theta=1e4, query_dim=64, activation="gelu", tied=True, rope_theta=1e6, norm_eps=1e-6),
])  # fmt: skip
def test_shapes_survive(shape: ModelShape, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_from_shape(shape)))
    assert shape_from_config(tmp_path) == shape
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    rope = loaded.rope_parameters
    assert rope.get("full_attention", rope)["rope_theta"] == shape.rope_theta
    loaded.save_pretrained(tmp_path / "again")
    assert shape_from_config(tmp_path / "again") == shape


@pytest.mark.parametrize(("change", "words"), [
    ({"architectures": ["Phi3ForCausalLM"]}, ["architectures", "Phi3", "Llama, Mistral, Qwen2, Qwen3, Gemma3"]),
    ({"architectures": ["GlmMoeForCausalLM"], "num_experts": 64}, ["GlmMoe", "missing is its mixture of experts"]),
    ({**V3, "scoring_func": "softplus"}, ["scoring_func = 'softplus'", "'sigmoid'"]),
    ({**V3, "topk_method": "hash"}, ["topk_method = 'hash'", "noaux_tc"]),
    ({**V3, "n_group": 7}, ["6 experts do not make router_groups = 7"]),
    ({**V3, "num_experts_per_tok": 9}, ["experts_per_token = 9 is more than the 6 experts"]),
    ({**V3, "n_routed_experts": "many"}, ["n_routed_experts = 'many'", "whole numbers"]),
    ({**V3, "kv_lora_rank": None}, ["has no kv_lora_rank"]),
    ({"architectures": ["Qwen2MoeForCausalLM"], **QWEN, "shared_expert_intermediate_size": 50},
     ["shared_expert_intermediate_size = '50'", "multiples of moe_intermediate_size = 24"]),
    ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}, ["no num_experts_per_tok"]),
    ({"architectures": ["Qwen3MoeForCausalLM"], **QWEN, "topk_method": "hash"}, ["topk_method = 'hash'", "greedy"]),
    ({"architectures": ["Qwen3MoeForCausalLM"], **QWEN, "mlp_only_layers": "0"}, ["mlp_only_layers = '0'", "a list"]),
    ({"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"a": 1}}, ["missing is an image tower"]),
    ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
     ["missing is soft caps on scores and soft caps on logits"]),
    ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, ["attn_logit_softcapping = '50.0'"]),
    ({"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
     ["layer_types", "every n-th layer"]),
    ({"architectures": "absent"}, ["architectures", "Llama"]),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, ["rope_type", "dynamic", "llama3"]),
    ({"rope_scaling": {"rope_type": "yarn"}}, ["no rope_scaling.factor"]),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, ["rope_type", "longrope"]),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["rope_parameters", "all layers"]),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling.low_freq_factor, rope_scaling.high"]),
    ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, ["layer_types", "every n-th"]),
    ({"architectures": ["LlamaForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
     ["layer_types", "sliding_attention"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    ({"attention_bias": True}, ["attention_bias", "True", "False"]),
    ({"mlp_bias": True}, ["mlp_bias"]),
    ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
    ({"vocab_size": "absent", "hidden_size": None}, ["vocab_size, hidden_size"]),
    ({"hidden_size": "wide"}, ["hidden_size", "wide"]),
    ({"num_key_value_heads": 3}, ["heads = 4", "kv_heads = 3"]),
    ({"num_hidden_layers": "2"}, ["num_hidden_layers = '2'", "whole numbers"]),
    ({"num_hidden_layers": 2.0}, ["num_hidden_layers = '2.0'", "whole numbers"]),
    ({"architectures": "Qwen3ForCausalLM"}, ["architectures", "lists"]),
    ({"layer_types": 5}, ["layer_types = '5'", "lists"]),
    ({"model_type": []}, ["model_type", "texts"]),
    ({"rope_scaling": "yarn"}, ["rope_scaling = 'yarn'", "sets of values"]),
    ({"rope_scaling": {"rope_type": []}}, ["rope_type"]),
    ({"is_causal": False}, ["is_causal = 'False'"]),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 3, "layer_types": ["full_attention"] * 2},
     ["layer_types", "sliding_attention"]),
    ({"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 1e4}}, ["rope_parameters", "each of"]),
    ({"architectures": ["Gemma3ForCausalLM"], "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
     ["rope_type", "yarn"]),
])  # fmt: skip
def test_what_weft_would_compute_differently_is_refused(
    change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(WeftError) as caught:
        shape_from_config(write_config(tmp_path, **change))
    assert all(word in str(caught.value) for word in [str(tmp_path), *words]), (
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_an_output_layer_beside_a_tied_one_is_not_dropped(tmp_path: Path) -> None:
    """transformers computes with it, whatever the configuration says."""
    theirs("qwen3 tied", tmp_path)
    tensors, shape = load_file(tmp_path / SINGLE), shape_from_config(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / SINGLE)
    check_stored(tmp_path, shape)  # some programs write both
    tensors["lm_head.weight"] *= 2
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(WeftError, match=r"lm_head.weight of its own, .* say false"):
        check_stored(tmp_path, shape)


@pytest.mark.parametrize("content", [None, b"", b'{"a": ', b"\xff\xfe", b"[1]"])
def test_unreadable_configs(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WeftError, match=r"config\.json") as caught:
        shape_from_config(path)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "model"
    shape = ModelShape(vocab=40, layers=2, embed=16, heads=2, ffn=24)
    export(
        whole(parallelize(shape, Mesh.single(), Train())[0]),
        shape,
        folder,
        max_file_bytes=4000,
    )
    return folder


def copy_of(folder: Path, to: Path) -> Path:
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def test_damaged_weights_are_named(exported: Path, tmp_path: Path) -> None:
    folder = copy_of(exported, tmp_path)
    file = (
        folder
        / json.loads((folder / INDEX).read_text())["weight_map"]["model.norm.weight"]
    )
    whole_file = file.read_bytes()
    for content in (
        whole_file[: len(whole_file) // 2],
        whole_file[:5],
        b"",
        b"\xff" * 100,
        None,
    ):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(WeftError, match="missing or damaged") as caught:
            ours(folder)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    for content in ("{", "{}", "[]"):
        (folder / INDEX).write_text(content)
        with pytest.raises(WeftError, match=INDEX) as caught:
            ours(folder)
        assert "\n" not in str(caught.value)
    (folder / INDEX).unlink()
    with pytest.raises(WeftError, match=r"neither model\.safetensors nor"):
        ours(folder)


def test_missing_and_misshapen_tensors_are_named(exported: Path) -> None:
    shape = shape_from_config(exported)

    def build(**change: Any) -> str:
        with pytest.raises(WeftError) as caught:
            parallelize(
                shape.model_copy(update=change),
                Mesh.single(),
                Train(),
                hf_values(exported),
            )
        return str(caught.value)

    assert "no tensor model.layers.2." in build(layers=3)
    assert "model.layers.0.self_attn.q_proj.bias" in build(qkv_bias=True)
    assert "lm_head.weight has shape [40, 16] but the model needs [41, 16]" in build(
        vocab=41
    )


def test_other_contents_are_refused(tmp_path: Path) -> None:
    logical = Mesh.single().place.logical((Dim("vocab", 4), Dim("embed", 2)), 1.0)
    save_file(
        {"model.embed_tokens.weight": torch.zeros(4, 2, dtype=torch.int8)},
        tmp_path / SINGLE,
    )
    with pytest.raises(WeftError, match="stored as I8"):
        hf_values(tmp_path)("embedding.table", logical, logical.box)
    with pytest.raises(
        WeftError, match=r"no tensor lm_head\.weight; set model\.tied = true"
    ):
        hf_values(tmp_path)("head", logical, logical.box)


def test_export_is_whole_or_absent(exported: Path, tmp_path: Path) -> None:
    shape = shape_from_config(exported)
    values = whole(ours(exported))

    def fails_late(name: str) -> torch.Tensor:
        if name == "blocks.1.ffn.down":
            raise KeyboardInterrupt
        return values[name]

    with pytest.raises(KeyboardInterrupt):
        export(fails_late, shape, tmp_path / "out", max_file_bytes=4000)
    assert not any(tmp_path.iterdir())
    with pytest.raises(WeftError, match=r"norm\.scale: shape \[3\]"):
        export(values | {"norm.scale": torch.ones(3)}, shape, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(WeftError, match="cannot write"):
        export(values, shape, tmp_path / "file" / "out")
    with pytest.raises(WeftError, match="exists already"):
        export(values, shape, tmp_path)
    with pytest.raises(WeftError, match="no Hugging Face architecture"):
        export(
            values,
            shape.model_copy(update={"qk_norm": True, "qkv_bias": True}),
            tmp_path / "out",
        )
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_exported_files_are_readable_as_any_others(
    exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text("")
    export(
        whole(ours(exported)),
        shape_from_config(exported),
        tmp_path / "out",
        max_file_bytes=4000,
    )
    files = list((tmp_path / "out").iterdir())
    assert len(files) > 4 and {f.stat().st_mode for f in files} == {
        (tmp_path / "other").stat().st_mode
    }


def test_the_tokenizer_goes_along(exported: Path, tmp_path: Path) -> None:
    source = tmp_path / "from"
    source.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "merges.txt",
        "weft.json",
        "chat_template.jinja",
    ):
        (source / name).write_text(name)
    # as old folders have it
    (source / "config.json").write_text('{"eos_token_id": [3, 5], "bos_token_id": 1}')
    files = tokenizer_files(source)
    assert "weft.json" not in files
    export(
        whole(ours(exported)),
        shape_from_config(exported),
        tmp_path / "out",
        files=files,
    )
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["eos_token_id"], config["bos_token_id"]) == ([3, 5], 1)
    assert json.loads((tmp_path / "out/generation_config.json").read_text())[
        "eos_token_id"
    ] == [3, 5]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        SINGLE, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "merges.txt",
        "chat_template.jinja",
    }  # fmt: skip


def test_more_experts_than_the_configuration_says_are_one_line(tmp_path: Path) -> None:
    theirs("qwen3 moe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (count,) = [key for key in ("num_experts", "num_local_experts") if key in config]
    (tmp_path / "config.json").write_text(json.dumps(config | {count: 7}))
    with pytest.raises(
        WeftError,
        match=r"mlp\.gate\.weight has shape \[8, 32\] but the model needs \[7, 32\]",
    ):
        open_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_experts": 7, "num_local_experts": 8})
    )
    with pytest.raises(
        WeftError,
        match="num_experts = '7' is not supported; Weft supports that of num_local_experts",
    ):
        open_pretrained(tmp_path)
