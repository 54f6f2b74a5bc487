"""What a step costs and what the device could do: the two sides of model flops utilisation (MFU)."""

from __future__ import annotations

import resource
import sys
import time

import torch

from weft.recipe import ModelShape

#: Dense peaks in TFLOP/s (bfloat16, float32 without tensor cores) from NVIDIA's data sheets, no sparsity. The first
#: entry with a name that occurs in the device's name counts, so that longer names stand before shorter ones.
PEAKS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    (("B200", "B300"), 2250, 75),
    (("H100 PCIe",), 756, 51),
    (("H100 NVL",), 835, 60),
    (("H200", "H100", "H800"), 989, 67),
    (("A100", "A800"), 312, 19.5),
    (("A40 ", "RTX A6000"), 150, 37.4),
    (("A30 ",), 165, 10.3),
    (("A10G",), 70, 31.5),
    (("A10 ",), 125, 31.2),
    (("L40S", "RTX 6000 Ada"), 362, 91.6),
    (("L40 ",), 181, 90.5),
    (("L4 ",), 121, 30.3),
    (("RTX 5090",), 209.5, 104.8),
    (("RTX 4090",), 165.2, 82.6),
    (("RTX 3090",), 71, 35.6),
)


def layer_matmuls(shape: ModelShape) -> int:
    """Weights of one layer that every token is multiplied with: query, key, value, output and SwiGLU."""
    heads, kv_heads = shape.heads, shape.kv_heads or shape.heads
    attention = 2 * (heads + kv_heads) * (shape.head_dim or 0) * shape.embed
    return attention + 3 * shape.embed * (shape.ffn or 0)


def parameter_count(shape: ModelShape, vocab: int) -> int:
    """Number of parameters, tied embedding counted once."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads or shape.heads, shape.head_dim or 0
    per_layer = layer_matmuls(shape) + 2 * shape.embed
    per_layer += 2 * head_dim * shape.qk_norm + (heads + 2 * kv_heads) * head_dim * shape.qkv_bias
    return shape.layers * per_layer + shape.embed + (1 if shape.tied else 2) * vocab * shape.embed


def flops_per_token(shape: ModelShape, vocab: int, seq_len: int) -> float:
    """Model flops of forward and backward per token: three times those of the forward's matrix products.

    Forward, per token, with ``s`` the sequence length::

        layers * (2 * weights + 4 * heads * head_dim * s / 2) + 2 * embed * vocab

    where ``weights`` are the projections and SwiGLU (:func:`layer_matmuls`), and attention's two products (QK^T and
    AV, 2 * heads * head_dim * s each) count half, since a causal token sees s/2 others on average. Recomputation
    does not count: these are *model*, not hardware flops (Chowdhery et al. 2022, appendix B). Packed documents
    attend over less than the whole row, so that the figure is an upper bound there.
    """
    attention = 4 * shape.heads * (shape.head_dim or 0) * seq_len / 2
    forward = shape.layers * (2 * layer_matmuls(shape) + attention) + 2 * shape.embed * vocab
    return 3.0 * forward


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Dense peak of one device in flop/s: from :data:`PEAKS`, else measured by a matrix product (CPU, other GPUs)."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = f"{torch.cuda.get_device_name(device)} "
        for names, half, single in PEAKS:
            if any(key in name for key in names):
                tf32 = torch.get_float32_matmul_precision() != "highest"  # half the rate of bfloat16
                return 1e12 * (half if dtype != torch.float32 else max(single, tf32 * half / 2))
    return measured_flops(device, dtype)


def measured_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.2, size: int = 1024) -> float:
    """Best rate of a square matrix product within about ``seconds``, in flop/s."""
    a = torch.rand(size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds or best == float("inf"):
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


def memory_gib(device: torch.device) -> float:
    """Peak memory of this rank in GiB: what the CUDA allocator has handed out, else the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
