"""Rotary position embedding (Su et al. 2021) in the half-rotation convention of Hugging Face checkpoints."""

import math

import torch
from spmd_types import rules

from weft.models.fused import own_gradients_pay
from weft.models.numbers import wide
from weft.models.triton_use import fuses
from weft.recipe import ModelShape, RopeScaling

T = torch.Tensor


def frequencies(shape: ModelShape) -> T:
    """Return the scaled inverse frequencies of rotary embedding, ``[bases, rotated / 2]`` in float64.

    The first row is computed from the base (theta) of layers with full attention. There is a second row if windowed
    layers have a base of their own (Gemma 3).
    """
    steps = -torch.arange(0, shape.rotated, 2, dtype=torch.float64) / shape.rotated
    bases = [_scaled(shape.rope_theta**steps, shape.rope_scaling, shape.rope_theta)]
    if shape.window_theta:
        bases.append(shape.window_theta**steps)
    return torch.stack(bases)


def _scaled(freq: T, scaling: RopeScaling | None, theta: float) -> T:
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    if scaling.kind == "yarn":
        return _yarn(freq, scaling, theta)
    # Long wavelengths are stretched by `factor`, short ones kept, and those between blended linearly.
    turns = scaling.original_max_position * freq / (2 * math.pi)
    between = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / between).clamp(0, 1)
    return keep * freq + (1 - keep) * freq / scaling.factor


def _yarn(freq: T, scaling: RopeScaling, theta: float) -> T:
    """Keep frequencies with more than ``beta_fast`` turns in the original length; stretch those with fewer than
    ``beta_slow``.
    """

    def index(turns: float) -> float:  # of the frequency that turns so often
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return len(freq) * math.log(wavelength) / math.log(theta)

    low = max(math.floor(index(scaling.beta_fast)), 0)
    high = math.ceil(index(scaling.beta_slow))
    high = min(high, 2 * len(freq) - 1)
    index_of = torch.arange(len(freq), dtype=freq.dtype)
    stretch = ((index_of - low) / max(high - low, 0.001)).clamp(0, 1)
    return freq * (1 - stretch) + freq / scaling.factor * stretch


def score_scales(shape: ModelShape) -> tuple[float, float]:
    """Return two factors by which the products of queries and keys are multiplied to get attention scores.

    The first factor applies to the whole product. The second applies in addition to the part of the product that comes
    from rotated elements; it is 1 except with YaRN. In latent attention only some elements are rotated. In other
    attention all are, so that both factors apply to the whole product.
    """
    width, scaling = shape.query_dim or shape.score_width, shape.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return width**-0.5, 1.0

    def growth(mscale: float) -> float:
        if scaling.factor > 1:
            return 0.1 * mscale * math.log(scaling.factor) + 1
        return 1.0

    derived = growth(1)
    if scaling.mscale and scaling.mscale_all_dim:
        derived = growth(scaling.mscale) / growth(scaling.mscale_all_dim)
    everywhere = growth(scaling.mscale_all_dim) if shape.kv_rank else 1.0
    return width**-0.5 * everywhere**2, (scaling.attention_factor or derived) ** 2


def angles(
    positions: T, freq: T, dtype: torch.dtype, draws: T | None = None
) -> tuple[T, ...]:
    """Return the cosines and the sines of rotary embedding, each ``[bases, batch, seq, 1, rotated / 2]``.

    ``bases`` is 2 if windowed layers rotate with other frequencies than the other layers, else 1. ``rotated`` is the
    number of elements of a head that are rotated. ``positions``: position of each token in its document,
    ``[batch, seq]``; ``freq``: result of :func:`frequencies`, ``[bases, rotated / 2]``; ``dtype``: result's type, or
    float32 if that is wider. ``draws``: random bits of the tokens for dropout (:mod:`weft.models.dropout`). If given,
    they are returned unchanged as a third item, so that they reach the blocks with the angles.
    """
    places, bases = positions[..., None, None], freq[:, None, None, None]
    theta = places.to(wide(dtype)) * bases.to(wide(dtype))
    return (theta.cos(), theta.sin(), *(() if draws is None else (draws,)))


def rotate(x: T, cos: T, sin: T, interleaved: bool = False) -> T:
    """Apply rotary embedding to ``x`` ``[batch, seq, heads, head_dim]``: rotate pairs ``(x[i], x[i + head_dim / 2])``.

    ``cos`` and ``sin``: results of :func:`angles`. ``interleaved``: rotate the pairs ``(x[2i], x[2i + 1])`` instead;
    their results are stored half a head apart, which does not change the scores.
    """
    if own_gradients_pay(x) and x.dtype == cos.dtype:
        turn = _turned if torch.is_inference_mode_enabled() else _Rotate.apply
        return turn(x, cos, sin, interleaved)
    if fuses(x) and x.dim() == 4 and x.shape[0] == 1 and x.stride(-1) == 1:
        from weft.models.pointwise_kernels import rotate_heads

        return rotate_heads(x, cos, sin, interleaved)
    a, b = pairs(x, interleaved)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def pairs(x: T, interleaved: bool) -> tuple[T, T]:
    """Return the first and the second elements of the pairs that :func:`rotate` rotates, as views of ``x``.

    ``interleaved``: whether the elements of a pair are neighbours, instead of half a head apart.
    """
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return a, b


def _turn(a: T, b: T, cos: T, sin: T, first: T, second: T) -> None:
    """Write the rotated pairs ``a, b`` to ``first, second``."""
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)


def _turned(x: T, cos: T, sin: T, interleaved: bool) -> T:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _turn(*pairs(x, interleaved), cos, sin, *pairs(out, False))
    return out


class _Rotate(torch.autograd.Function):
    """:func:`rotate`, whose gradient is the rotation back, without a temporary for each product."""

    @staticmethod
    def spmd_typecheck(*, x, cos, sin, interleaved):  # type: ignore[no-untyped-def]
        return rules.einsum("bshd,bsor,bsor->bshd", x, cos, sin)

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turned(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        d_x = torch.empty_like(grad, memory_format=torch.contiguous_format)
        _turn(*pairs(grad, False), cos, -sin, *pairs(d_x, ctx.interleaved))
        return d_x, None, None, None
