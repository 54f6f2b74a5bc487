"""Images and videos as sequences of patches, and where a patch is."""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from weft.shapes.diffusion_shape import DiffusionSettings

T = torch.Tensor


def patchify(pixels: T, settings: DiffusionSettings) -> T:
    """Return the patches ``[batch, patches, values]`` of ``pixels`` ``[batch, channels, (frames,) height, width]``.

    Patches are in the order of rows, and the values of a patch are in the order of its pixels, channels last. Where the
    last patch of an axis reaches beyond the image, its values are zeros.
    """
    grid, patch = settings.grid, settings.patch_size
    beyond = [g * p - n for g, p, n in zip(grid, patch, settings.size, strict=True)]
    if any(beyond):
        pixels = F.pad(pixels, [n for by in reversed(beyond) for n in (0, by)])
    axes = len(grid)
    # [batch, channels, grid 1, patch 1, grid 2, patch 2, ...]
    both = [n for pair in zip(grid, patch, strict=True) for n in pair]
    x = pixels.reshape(*pixels.shape[:2], *both)
    order = [0, *(2 + 2 * i for i in range(axes)), *(3 + 2 * i for i in range(axes)), 1]
    return x.permute(order).reshape(len(pixels), prod(grid), -1)


def unpatchify(patches: T, settings: DiffusionSettings) -> T:
    """Return the pixels ``[batch, channels, (frames,) height, width]`` of ``patches`` ``[batch, patches, values]``.

    This is the reverse of :func:`patchify`. The number of channels follows from the number of values.
    """
    grid, patch = settings.grid, settings.patch_size
    axes = len(grid)
    x = patches.reshape(len(patches), *grid, *patch, -1)
    order = [0, 2 * axes + 1, *(n for i in range(axes) for n in (1 + i, 1 + axes + i))]
    sizes = [g * p for g, p in zip(grid, patch, strict=True)]
    pixels = x.permute(order).reshape(len(patches), -1, *sizes)
    for axis, size in enumerate(settings.size, 2):
        pixels = pixels.narrow(axis, 0, size)
    return pixels


def real_values(settings: DiffusionSettings) -> T:
    """Return which values of the patches are of pixels and not beyond the image, bool ``[patches, values]``."""
    ones = torch.ones(1, settings.channels, *settings.size)
    return patchify(ones, settings)[0] > 0


def coordinates(positions: T, grid: Sequence[int]) -> T:
    """Return for each number of a patch its index along each axis of ``grid``, float64 ``[..., axes]``.

    ``positions``: numbers of patches in the order of rows; numbers beyond the grid are further along its first
    axis, or stand for padding.
    """
    rest, indices = positions, []
    for size in reversed(grid[1:]):
        indices.append(rest % size)
        rest = rest // size
    # the first axis has no end: a video may be longer than those of training
    return torch.stack([rest, *indices[::-1]], -1).double()


def sine_positions(positions: T, settings: DiffusionSettings, width: int) -> T:
    """Return what is added to patches so that blocks know where they are, float64 ``[..., width]``.

    The axes share ``width`` (of images half is for the column and half for the row, in the order of DiT's published
    code): for each axis sines, then cosines, of its index times falling frequencies. ``positions``: numbers of patches
    ``[...]``.
    """
    where = coordinates(positions, settings.grid)
    axes = where.shape[-1]
    pairs = [width // 2 // axes + (i < width // 2 % axes) for i in range(axes)]
    parts = []
    # the column first, then the row
    for axis, count in zip(reversed(range(axes)), pairs, strict=True):
        steps = torch.arange(count, dtype=torch.float64, device=where.device)
        waves = where[..., axis, None] * 10_000.0 ** (-steps / max(count, 1))
        parts += [waves.sin(), waves.cos()]
    return F.pad(torch.cat(parts, -1), (0, width % 2))


def axis_angles(
    positions: T, settings: DiffusionSettings, width: int, theta: float
) -> T:
    """Return the angles by which pairs of elements of a head are rotated, float64 ``[..., width / 2]``.

    The axes share the pairs, those that come first getting what is left over (RoPE over two or three axes).
    ``positions``: numbers of patches ``[...]``; ``width``: elements of a head; ``theta``: base of the frequencies.
    """
    where = coordinates(positions, settings.grid)
    axes, pairs = where.shape[-1], width // 2
    parts = []
    for axis in range(axes):
        count = pairs // axes + (axis < pairs % axes)
        steps = torch.arange(count, dtype=torch.float64, device=where.device)
        parts.append(where[..., axis, None] * theta ** (-steps / max(count, 1)))
    return torch.cat(parts, -1)


def time_waves(time: T, width: int, settings: DiffusionSettings) -> T:
    """Return cosines and sines of the noise level of ``time``, float64 ``[batch, width]``.

    ``time``: ``[batch]``, from 0 (noise) to 1 (image). The level of a flow is a thousand at noise and 0 at the image;
    that of a table is its number (:class:`weft.diffusion.noise_process.NoiseProcess`), and the image has none. So it is
    in diffusers, whose frequencies these are.
    """
    half = width // 2
    steps = torch.arange(half, dtype=torch.float64, device=time.device)
    frequencies = 10_000.0 ** (-steps / (half - (settings.form == "dit")))
    levels = 1000 * (1 - time.double()) - int(settings.target != "flow")
    waves = levels[:, None] * frequencies
    return torch.cat([waves.cos(), waves.sin()], -1)
