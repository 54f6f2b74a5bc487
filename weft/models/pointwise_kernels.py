"""Triton kernels of chains of elementwise operations, which PyTorch launches one by one.

A step that decodes has so few numbers that each launch takes about equally long whatever it computes. Results are
computed in float32 and rounded once, as PyTorch's chains are. Triton is imported with this file.
"""

from typing import Any

import torch
import triton
import triton.language as tl

T = torch.Tensor

#: Elements of a program.
ELEMENTS = 1024


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, out, x_row, x_head, angle_row, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, BETWEEN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of one token. The elements of a pair are ``APART``, pairs are ``BETWEEN`` elements apart."""
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS_PAD), tl.arange(0, HALF_PAD)
    there = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    at = x + row * x_row + head[:, None] * x_head + pair[None, :] * BETWEEN
    a = tl.load(at, mask=there, other=0.0).to(tl.float32)
    b = tl.load(at + APART, mask=there, other=0.0).to(tl.float32)
    angle = row * angle_row + pair
    c = tl.load(cos + angle, mask=pair < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=pair < HALF, other=0.0)[None, :]
    to = out + (row * HEADS + head[:, None]) * (2 * HALF) + pair[None, :]
    tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=there)
    tl.store(to + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=there)


def rotate_heads(x: T, cos: T, sin: T, interleaved: bool) -> T:
    """Apply rotary embedding to ``x`` ``[1, tokens, heads, head_dim]``, as :func:`weft.models.rope.rotate` does.

    ``cos`` and ``sin``: float32 ``[1, tokens, 1, head_dim / 2]``. ``interleaved``: the elements of a pair are
    neighbours, instead of half a head apart.
    """
    _, tokens, heads, width = x.shape
    half = width // 2
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch: Any = _rotate[(tokens,)]
    launch(
        x, cos, sin, out, x.stride(1), x.stride(2), cos.stride(1), HEADS=heads,
        HEADS_PAD=triton.next_power_of_2(heads), HALF=half, HALF_PAD=triton.next_power_of_2(half),
        BETWEEN=2 if interleaved else 1, APART=1 if interleaved else half, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _silu_times(  # type: ignore[no-untyped-def]
    gate, up, out, gate_row, up_row, WIDTH: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    """``silu(gate) * up`` of some elements of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = at < WIDTH
    g = tl.load(gate + row * gate_row + at, mask=there, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=there, other=0.0).to(tl.float32)
    opened = (g / (1 + tl.exp(-g))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + at, (opened * u).to(out.dtype.element_ty), mask=there)


def silu_times(gate: T, up: T) -> T:
    """Return ``silu(gate) * up`` of tensors ``[1, tokens, width]`` whose last dimension is dense."""
    _, tokens, width = gate.shape
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    launch: Any = _silu_times[tokens, triton.cdiv(width, ELEMENTS)]
    launch(
        gate, up, out, gate.stride(1), up.stride(1), WIDTH=width, ELEMENTS=ELEMENTS, num_warps=4
    )  # fmt: skip
    return out
