"""A convolutional autoencoder of images, behind which a diffusion transformer works (Rombach et al. 2022).

Modules and parameters have the names of diffusers' ``AutoencoderKL``, so that :mod:`weft.models.autoencoder_files`
reads and writes its weights as they are. It is not trained with a diffusion transformer, and every rank has all of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.models.autoencoder_sizes import AutoencoderSettings

T = torch.Tensor

#: Added to the variance in norms.
NORM_EPS = 1e-6


class PixelResidual(nn.Module):
    """A residual block: two convolutions, whose result is added to the input. ``into``, ``out``: numbers of channels of
    input and output; ``groups``: groups of the norms.
    """

    def __init__(self, into: int, out: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, into, NORM_EPS)
        self.conv1 = nn.Conv2d(into, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out, NORM_EPS)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        if into != out:
            self.conv_shortcut = nn.Conv2d(into, out, 1)

    def forward(self, x: T) -> T:
        """Map ``x`` ``[images, into, height, width]`` to ``[images, out, height, width]``."""
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        beside: T = self.conv_shortcut(x) if hasattr(self, "conv_shortcut") else x
        return beside + hidden


class PixelAttention(nn.Module):
    """Attention with one head, in which every pixel attends to all pixels of its image. ``width``: number of channels;
    ``groups``: groups of the norm.
    """

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, width, NORM_EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: T) -> T:
        """Map ``x`` ``[images, width, height, width]`` to the output of the same shape."""
        tokens = (
            self.group_norm(x).flatten(2).transpose(1, 2)
        )  # [images, pixels, width]
        q, k, v = (each(tokens)[:, None] for each in (self.to_q, self.to_k, self.to_v))
        seen = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x + self.to_out[0](seen).transpose(1, 2).reshape(x.shape)


class PixelScale(nn.Module):
    """Halves height and width of an image by a convolution (``down``), or doubles them and applies a convolution.
    ``width``: number of channels.
    """

    def __init__(self, width: int, down: bool) -> None:
        super().__init__()
        self.down = down
        self.conv = nn.Conv2d(width, width, 3, 2 if down else 1, 0 if down else 1)

    def forward(self, x: T) -> T:
        """Map ``x`` ``[images, channels, height, width]`` to half or double of its height and width."""
        ready = F.pad(x, (0, 1, 0, 1)) if self.down else F.interpolate(x, scale_factor=2.0)  # fmt: skip
        scaled: T = self.conv(ready)
        return scaled


class PixelStage(nn.Module):
    """Residual blocks of one resolution, followed by a halving (``down``) or doubling of the resolution, unless
    ``last``.

    ``into``, ``out``: numbers of channels of input and output; ``layers``: number of residual blocks; ``groups``:
    groups of the norms; ``down``: whether the stage belongs to an encoder; ``last``: whether it is the last stage,
    after which the resolution stays.
    """

    def __init__(
        self, into: int, out: int, layers: int, groups: int, down: bool, last: bool
    ) -> None:
        super().__init__()
        widths = [into, *[out] * layers]
        self.resnets = nn.ModuleList(
            PixelResidual(a, b, groups) for a, b in pairwise(widths)
        )
        if not last:
            scale = nn.ModuleList([PixelScale(out, down)])
            self.add_module("downsamplers" if down else "upsamplers", scale)

    def forward(self, x: T) -> T:
        """Map ``x`` ``[images, into, height, width]`` to ``[images, out, height', width']``: half or double of height
        and width, or the same in the last stage.
        """
        for part in self.children():
            for layer in part.children():
                x = layer(x)
        return x


class PixelMiddle(nn.Module):
    """The blocks between encoder stages and latents, or latents and decoder stages, at the lowest resolution.
    ``width``: number of channels; ``settings``: sizes of the autoencoder.
    """

    def __init__(self, width: int, settings: AutoencoderSettings) -> None:
        super().__init__()
        groups = settings.norm_num_groups
        seeing = [PixelAttention(width, groups)] * settings.mid_block_add_attention
        self.attentions = nn.ModuleList(seeing)
        self.resnets = nn.ModuleList(
            PixelResidual(width, width, groups) for _ in range(2)
        )

    def forward(self, x: T) -> T:
        """Map ``x`` ``[images, width, height, width]`` to the output of the same shape."""
        x = self.resnets[0](x)
        for attention in self.attentions:
            x = attention(x)
        last: T = self.resnets[1](x)
        return last


class PixelCoder(nn.Module):
    """An encoder from pixels to latents if ``down``, else a decoder from latents to pixels. ``settings``: sizes of the
    autoencoder.
    """

    def __init__(self, settings: AutoencoderSettings, down: bool) -> None:
        super().__init__()
        widths, layers = settings.block_out_channels, settings.layers_per_block
        latents, groups = settings.latent_channels, settings.norm_num_groups
        outer, inner = widths[0], widths[-1]
        stages = [*zip((outer, *widths), widths, strict=False)]
        if not down:
            stages = [*zip((inner, *widths[::-1]), widths[::-1], strict=False)]
        blocks = nn.ModuleList(
            PixelStage(a, b, layers + (not down), groups, down, i == len(widths) - 1)
            for i, (a, b) in enumerate(stages)
        )
        first = (settings.in_channels, outer) if down else (latents, inner)
        last = (inner, 2 * latents) if down else (outer, settings.in_channels)
        self.conv_in = nn.Conv2d(*first, 3, padding=1)
        self.down = down
        self.add_module("down_blocks" if down else "up_blocks", blocks)
        self.mid_block = PixelMiddle(inner, settings)
        self.conv_norm_out = nn.GroupNorm(groups, last[0], NORM_EPS)
        self.conv_out = nn.Conv2d(*last, 3, padding=1)

    def forward(self, x: T) -> T:
        """Return what the encoder or decoder, whichever this is, computes from ``x``.

        An encoder maps pixels ``[images, channels, height, width]`` to means and logarithms of variances of latents; a
        decoder maps latents to pixels.
        """
        x = self.conv_in(x)
        stages: Any = self.down_blocks if self.down else self.up_blocks
        parts = [*stages, self.mid_block] if self.down else [self.mid_block, *stages]
        for part in parts:
            x = part(x)
        out: T = self.conv_out(F.silu(self.conv_norm_out(x)))
        return out


class Autoencoder(nn.Module):
    """An autoencoder, which maps images to smaller latents and back, so that a diffusion model can learn latents.
    ``settings``: its sizes.
    """

    def __init__(self, settings: AutoencoderSettings) -> None:
        super().__init__()
        self.settings = settings
        latents = settings.latent_channels
        self.encoder = PixelCoder(settings, True)
        self.decoder = PixelCoder(settings, False)
        if settings.use_quant_conv:
            self.quant_conv = nn.Conv2d(2 * latents, 2 * latents, 1)
        if settings.use_post_quant_conv:
            self.post_quant_conv = nn.Conv2d(latents, latents, 1)

    def moments(self, pixels: T) -> T:
        """Return means and logarithms of variances of the latents of ``pixels``, ``[images, 2 latent channels, ...]``:
        first the means. They are not yet shifted and scaled as latents are.
        """
        both: T = self.encoder(pixels)
        return self.quant_conv(both) if self.settings.use_quant_conv else both

    def encoded(self, pixels: T) -> T:
        """Return the latents of ``pixels``, ``[images, latent channels, height / factor, width / factor]``: the
        encoder's means, shifted and scaled.

        ``pixels``: ``[images, channels, height, width]``, from -1 to 1. Height and width must be multiples of
        :attr:`AutoencoderSettings.factor`.
        """
        mean = self.moments(pixels).chunk(2, 1)[0]
        return (mean - (self.settings.shift_factor or 0.0)) * self.settings.scaling_factor  # fmt: skip

    def decoded(self, latents: T) -> T:
        """Return the pixels ``[images, channels, height, width]``, about from -1 to 1, of ``latents`` ``[images, latent
        channels, ...]``. This is the reverse of :meth:`encoded`.
        """
        x = latents / self.settings.scaling_factor + (self.settings.shift_factor or 0.0)
        if self.settings.use_post_quant_conv:
            x = self.post_quant_conv(x)
        pixels: T = self.decoder(x)
        return pixels
