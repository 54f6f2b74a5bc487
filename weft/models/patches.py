"""Images and videos as sequences of patches, and where a patch is."""

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from weft.shapes.diffusion_shape import DiffusionSettings

T = torch.Tensor


def patchify(pixels: T, settings: DiffusionSettings) -> T:
    """Cut ``pixels`` ``[batch, channels, (frames,) height, width]`` into patches ``[batch, patches, values]``. Patches
    are numbered row by row, and the values of a patch are ordered by pixel, with the channels of a pixel together. If
    the last patch of an axis reaches beyond the image, its values there are zeros. ``settings``: settings of the
    diffusion model, with the size of a patch.
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

    This is the reverse of :func:`patchify`, with the same ``settings`` of the diffusion model. The number of channels
    follows from the number of values.
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
    """Return which values of the patches belong to pixels of the image, bool ``[patches, values]``; the others lie
    beyond its border. ``settings``: settings of the diffusion model, with the sizes of image and patches.
    """
    ones = torch.ones(1, settings.channels, *settings.size)
    return patchify(ones, settings)[0] > 0


def coordinates(positions: T, grid: Sequence[int]) -> T:
    """Return the index of each patch along each axis of ``grid``, float64 ``[..., axes]``. ``grid``: number of patches
    along each axis; ``positions``: numbers of patches, counted row by row. Numbers beyond the grid get larger indices
    along its first axis; they are further frames, or padding.
    """
    rest, indices = positions, []
    for size in reversed(grid[1:]):
        indices.append(rest % size)
        rest = rest // size
    # the first axis has no end: a video may be longer than those of training
    return torch.stack([rest, *indices[::-1]], -1).double()


def sine_positions(positions: T, settings: DiffusionSettings, width: int) -> T:
    """Return the sine position embedding of patches, float64 ``[..., width]``, which is added to their embeddings. Each
    axis of the image has a share of ``width``: sines, then cosines, of the patch's index times falling frequencies. The
    column comes first, then the row, as in DiT's published code. ``positions``: numbers of patches ``[...]``;
    ``settings``: settings of the diffusion model, with the sizes of image and patches; ``width``: elements of an
    embedding.
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
    """Return the angles of rotary embedding for patches, float64 ``[..., width / 2]``. Each axis of the image has a
    share of the pairs of elements; if they cannot be shared equally, the first axes have one more. ``positions``:
    numbers of patches ``[...]``; ``width``: elements of a head; ``theta``: base of the frequencies.
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
    """Return cosines and sines of the noise level at each ``time``, float64 ``[batch, width]``, with the frequencies of
    diffusers. ``width``: number of cosines and sines together; ``settings``: settings of the diffusion model. ``time``:
    ``[batch]``, from 0 (noise) to 1 (image). For flow matching the noise level is 1000 at noise and 0 at the image. For
    a model with a table of noise levels it is the number in the table
    (:class:`weft.diffusion.noise_process.NoiseProcess`).
    """
    half = width // 2
    steps = torch.arange(half, dtype=torch.float64, device=time.device)
    frequencies = 10_000.0 ** (-steps / (half - (settings.form == "dit")))
    levels = 1000 * (1 - time.double()) - int(settings.target != "flow")
    waves = levels[:, None] * frequencies
    return torch.cat([waves.cos(), waves.sin()], -1)
