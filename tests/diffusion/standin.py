"""A small denoiser with the interface of sampling tables, and what one device computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

T = torch.Tensor


class Standin:
    """A transformer with seeded weights, positions by place and a shift by time; layers are random but fixed."""

    def __init__(
        self, layers: int = 3, heads: int = 2, width: int = 8, values: int = 4,
        steps: int = 4, dtype: torch.dtype = torch.float64, copies: int = 1,
    ) -> None:  # fmt: skip
        self.layers, self.heads, self.head_dim, self.width = layers, heads, width // heads, width  # fmt: skip
        self.values, self.steps, self.copies, self.dtype = values, steps, copies, dtype
        make = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> T:
            x = torch.randn(*shape, generator=make, dtype=torch.float64)
            return (x / shape[-1] ** 0.5).to(dtype)

        self.into, self.out = weight(width, values), weight(values, width)
        self.qkv = [weight(3 * width, width) * 2 for _ in range(layers)]
        self.o = [weight(width, width) for _ in range(layers)]
        self.up = [weight(2 * width, width) for _ in range(layers)]
        self.down = [weight(width, 2 * width) for _ in range(layers)]

    def prepare(self, places: T, step: int) -> T:
        """Of each token ``[tokens, width]``: waves of its place, and of the time."""
        waves = torch.arange(1, self.width + 1, dtype=torch.float64)
        where = torch.sin(places[:, None] * waves / 7) + torch.cos(
            waves * step / self.steps
        )
        return where.to(self.dtype)

    def embed(self, latents: T, prepared: T) -> T:
        x = F.linear(latents, self.into)
        return torch.cat([x + c for c in range(self.copies)]) + prepared

    def layer(self, index: int, hidden: T, prepared: T, attend: Callable[..., T]) -> T:
        q, k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in F.linear(
                F.layer_norm(hidden, hidden.shape[-1:]), self.qkv[index]
            ).chunk(3, -1)
        )
        out = attend(q, k, v).transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(out, self.o[index])
        return hidden + F.linear(
            torch.tanh(F.linear(hidden, self.up[index])), self.down[index]
        )

    def final(self, hidden: T, prepared: T) -> T:
        v = F.linear(torch.tanh(hidden), self.out)
        return v.chunk(self.copies)[0] - 0.5 * v.chunk(self.copies)[-1] * (self.copies > 1)  # fmt: skip


class Euler:
    """Adds the velocity in equal steps; with ``momentum`` it remembers the last velocity, as multistep samplers do."""

    def __init__(self, steps: int, momentum: float = 0.0) -> None:
        self.steps, self.momentum = steps, momentum

    def update(self, latents: T, velocity: T, step: int, memory: dict[str, Any]) -> T:
        last, memory["last"] = memory.get("last", velocity), velocity
        return latents + (velocity + self.momentum * (velocity - last)) / self.steps


def whole_noise(seed: int, batch: int, tokens: int, values: int) -> T:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, values, generator=make, dtype=torch.float64)


def one_device(denoiser: Any, sampler: Any, noise: T, places: T | None = None) -> T:
    """The loop of a sampler as anyone would write it."""
    z, memory = noise, {}
    places = torch.arange(noise.shape[1]) if places is None else places
    for step in range(sampler.steps):
        prepared = denoiser.prepare(places, step)
        x = denoiser.embed(z, prepared)
        for i in range(denoiser.layers):
            x = denoiser.layer(i, x, prepared, F.scaled_dot_product_attention)
        z = sampler.update(z, denoiser.final(x, prepared), step, memory)
    return z
