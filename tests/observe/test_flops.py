"""Counted flops and parameters against PyTorch's own count and published models."""

from __future__ import annotations

import mmap
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from weft.data.batch import Batch
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.observe.flops import measured_flops, memory_gib, peak_flops
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.shapes.parameters import (
    STATISTICS,
    learning_count,
    learns,
    parameter_count,
    parameters,
)
from weft.shapes.shape import flops_per_token, shape_of

SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 96, "vocab_size": 100, "head_dim": 24, "attn_implementation": "eager"}  # fmt: skip
SHAPE = {"layers": 3, "embed": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "head_dim": 24}
NARROW = {"head_dim": 16}
MODELS = [
    (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), ModelShape(**SHAPE)),
    (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        ModelShape(**SHAPE, tied=True),
    ),
    (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)), ModelShape(**SHAPE, qk_norm=True)),
    (
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES | NARROW)),
        ModelShape(**SHAPE | NARROW, qkv_bias=True),
    ),
]


@pytest.mark.parametrize("build, shape", MODELS)
def test_against_reference_models(build, shape: ModelShape) -> None:
    model = build()
    assert parameter_count(shape, 100) == sum(p.numel() for p in model.parameters())
    seq = 40
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, seq, dtype=torch.long)).logits.sum().backward()
    # PyTorch counts attention over the whole square.
    causal_half = 3 * shape.layers * 4 * shape.heads * shape.head_dim * seq / 2
    assert counter.get_total_flops() / seq - causal_half == flops_per_token(
        shape, 100, seq
    )


TINY = {
    "layers": 3,
    "embed": 24,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "ffn": 41,
    "vocab": 50,
}
ALL = [
    {"kv_rank": 9, "rope_dim": 4}, {"kv_rank": 9, "q_rank": 7, "value_dim": 11},
    {"kv_rank": 9, "q_rank": 70, "adapter": {"kind": "qlora", "rank": 3}},
    {}, {"tied": True, "qk_norm": True, "qkv_bias": True, "norm_after": True},
    {"mixer": "retention", "softmax_every": 2}, {"adapter": {"rank": 3}},
    {"adapter": {"kind": "dora", "targets": ["wo", "up"]}},
    {"experts": 4, "first_dense": 1, "router": "sigmoid", "shared_experts": 2, "shared_mix": "residual",
     "balance": "step"},
    {"experts": 3, "adapter": {"kind": "lora"}, "shared_experts": 1},
    {"adapter": {"kind": "qlora", "targets": ["q_proj", "blocks.1.*"]}, "embed": 72, "ffn": 150},
]  # fmt: skip


@pytest.mark.parametrize("change", ALL, ids=str)
def test_the_list_of_parameters_is_the_modules_own(change: dict) -> None:
    shape = ModelShape(**TINY | change)
    theirs = {
        name: (tuple(p.shape), p.dtype == torch.uint8)
        for name, p in Transformer(shape, Mesh.single()).named_parameters()
    }
    assert {p.name: (p.shape, p.is_bytes) for p in parameters(shape)} == theirs
    plain = parameters(shape.model_copy(update={"adapter": None}))
    assert (
        sum(p.numel for p in plain if not p.name.endswith(STATISTICS))
        == shape_of(shape).parameters
    )


@pytest.mark.parametrize("freeze", [(), ("embedding.*",), ("embedding.*", "blocks.0.*"), ("*.norm.*", "blocks.1.*"),
                                    ("blocks.*", "norm.*", "head"), ("embedding.*", "blocks.*", "norm.*")])  # fmt: skip
@pytest.mark.parametrize("change", [
    {}, {"tied": True}, {"adapter": {"rank": 3}},
    {"adapter": {"rank": 2, "kind": "qlora", "targets": ["wo", "blocks.2.ffn.*"]}},
])  # fmt: skip
def test_what_is_frozen_costs_no_gradient(
    change: dict, freeze: tuple[str, ...]
) -> None:
    """Against PyTorch's count of a step of our own modules; attention is one operator to it, which it cannot count."""
    shape = ModelShape(**TINY | {"query_dim": 6.0} | change)
    names = [p.name for p in parameters(shape) if learns(p.name, shape, freeze)]
    if not names:
        return
    model, state = parallelize(
        shape, Mesh.single(), Train(dtype="float64", freeze=freeze)
    )
    assert sum(h.local.numel() for h in state.learning) == learning_count(
        shape, 50, freeze
    )
    seq, ends = 40, torch.tensor([0, 40], dtype=torch.int32)
    tokens = torch.arange(seq).view(1, seq)
    plain = mock.patch(
        "weft.models.module.rms_norm",
        lambda x, scale, eps: F.rms_norm(x, scale.shape, scale, eps),
    )
    # our own norms sum up by products
    with plain, FlopCounterMode(display=False) as counter:
        model(tokens, tokens, ends, Batch(tokens, tokens, tokens, ends)).backward()
    lowest = min(p.step for p in parameters(shape) if p.name in names)
    above = [
        p
        for p in parameters(shape)
        if p.name.endswith((".wo", ".wo.codes")) and p.step > lowest
    ]
    attention = 2 * shape.heads * shape.head_dim * seq * (shape.layers + 2 * len(above))
    assert (
        counter.get_total_flops() / seq
        == flops_per_token(shape, 50, seq, freeze) - attention
    )


def test_all_that_learns_costs_three_forwards() -> None:
    shape = ModelShape(**TINY, tied=True)
    assert flops_per_token(shape, 50, 40) == pytest.approx(
        3 * flops_per_token(shape, 50, 40, ("*",))
    )
    assert flops_per_token(shape, 50, 40) == float(shape_of(shape).flops_per_token(40))
    # the planner's count leaves out where the lowest adapter is
    adapted = ModelShape(**TINY, adapter={"rank": 3})
    assert flops_per_token(adapted, 50, 40) == pytest.approx(
        float(shape_of(adapted).flops_per_token(40)), rel=0.1
    )


def test_published_size() -> None:
    llama3 = ModelShape(layers=32, embed=4096, heads=32, kv_heads=8, ffn=14336)
    assert parameter_count(llama3, 128_256) == 8_030_261_248


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("NVIDIA H200", torch.bfloat16, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA L4", torch.bfloat16, 121e12),
        ("NVIDIA L40", torch.bfloat16, 181e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
        ("NVIDIA A10", torch.bfloat16, 125e12),
        ("NVIDIA A10G", torch.bfloat16, 70e12),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2e12),
    ],
)
def test_known_peaks(name: str, dtype: torch.dtype, peak: float) -> None:
    with mock.patch("torch.cuda.get_device_name", lambda device: name):
        assert peak_flops(torch.device("cuda"), dtype) == pytest.approx(peak)


def test_a_gpu_of_no_data_sheet_is_measured() -> None:
    measured = mock.patch(
        "weft.observe.flops.measured_flops", lambda device, dtype: 7e12
    )
    with (
        mock.patch("torch.cuda.get_device_name", lambda device: "NVIDIA T99"),
        measured,
    ):
        assert peak_flops(torch.device("cuda"), torch.float32) == 7e12
    assert 1e8 < measured_flops(torch.device("cpu"), torch.float32, seconds=0.01) < 1e14


def test_a_processor_has_no_peak_to_compare_with() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32) is None


@pytest.mark.slow
def test_memory_falls_when_it_is_given_back_and_the_peak_stays() -> None:
    device = torch.device("cpu")
    # an allocator might keep it, or have as much already
    before, held = memory_gib(device), mmap.mmap(-1, 2**29)
    torch.frombuffer(held, dtype=torch.uint8).fill_(1)
    during = memory_gib(device)
    held.close()
    after = memory_gib(device)
    assert 0.01 < before.now <= before.peak
    assert during.now - before.now > 0.4 and during.now - after.now > 0.4
    assert after.peak >= during.peak - 0.01 and after.peak > after.now + 0.4
