"""Counted flops and parameters against PyTorch's own count and published models."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from weft.observe.flops import flops_per_token, measured_flops, memory_gib, parameter_count, peak_flops
from weft.recipe import ModelShape

SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 96, "vocab_size": 100, "head_dim": 24, "attn_implementation": "eager"}  # fmt: skip
SHAPE = {"layers": 3, "embed": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "head_dim": 24}
NARROW = {"head_dim": 16}
MODELS = [
    (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), ModelShape(**SHAPE)),
    (lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), ModelShape(**SHAPE, tied=True)),
    (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)), ModelShape(**SHAPE, qk_norm=True)),
    (lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES | NARROW)), ModelShape(**SHAPE | NARROW, qkv_bias=True)),
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
    assert counter.get_total_flops() / seq - causal_half == flops_per_token(shape, 100, seq)


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
    measured = mock.patch("weft.observe.flops.measured_flops", lambda device, dtype: 7e12)
    with mock.patch("torch.cuda.get_device_name", lambda device: "NVIDIA T99"), measured:
        assert peak_flops(torch.device("cuda"), torch.float32) == 7e12
    assert 1e8 < measured_flops(torch.device("cpu"), torch.float32, seconds=0.01) < 1e14


def test_a_processor_has_no_peak_to_compare_with() -> None:
    assert peak_flops(torch.device("cpu"), torch.float32) is None


def test_memory_falls_when_it_is_given_back_and_the_peak_stays() -> None:
    device = torch.device("cpu")
    before, held = memory_gib(device), torch.ones(2**27)  # half a GiB, which the allocator hands back
    during = memory_gib(device)
    del held
    after = memory_gib(device)
    assert 0.01 < before.now <= before.peak
    assert during.now - before.now > 0.4 and during.now - after.now > 0.4
    assert after.peak >= during.peak - 0.01 and after.peak > after.now + 0.4
