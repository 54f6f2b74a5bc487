"""Rotary position embedding (Su et al. 2021) in the half-rotation convention of Hugging Face checkpoints."""

import math

import torch

from weft.recipe import ModelShape, RopeScaling


def frequencies(shape: ModelShape) -> torch.Tensor:
    """Inverse frequencies ``[bases, head_dim / 2]``, float64, scaled if the shape says so.

    First those of layers that see all tokens, then those of windowed ones, if these have a base of their own (Gemma 3).
    """
    assert shape.head_dim
    steps = -torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    found = [_scaled(shape.rope_theta**steps, shape.rope_scaling)]
    if shape.window_theta:
        found.append(shape.window_theta**steps)
    return torch.stack(found)


def _scaled(freq: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    if scaling is None:
        return freq
    if scaling.kind == "linear":
        return freq / scaling.factor
    # Long wavelengths are stretched by `factor`, short ones kept, and those between blended linearly.
    turns = scaling.original_max_position * freq / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * freq + (1 - keep) * freq / scaling.factor


def angles(positions: torch.Tensor, freq: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``[bases, batch, seq, 1, head_dim / 2]`` for ``positions`` ``[batch, seq]``."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    theta = positions[..., None, None].to(wide) * freq.to(wide)[:, None, None, None]
    return theta.cos(), theta.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs ``(x[i], x[i + head_dim / 2])`` of ``[batch, seq, heads, head_dim]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
