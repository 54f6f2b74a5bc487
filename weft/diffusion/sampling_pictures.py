"""Samples as files, and a sampling table as a picture."""

from __future__ import annotations

from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from weft.diffusion.sampling_costs import (
    DenoiserSizes,
    SamplingDevice,
    simulated_sampling,
)
from weft.errors import UsageError
from weft.new_folder import new_folder
from weft.pages import write
from weft.schedule.draw import html, svg

if TYPE_CHECKING:
    from weft.diffusion.parallel_sample import TableSampling

T = torch.Tensor
#: Pixels of the shorter side of a small image in a grid.
SHOWN = 64
#: Operations per second of the device of a picture, of which only ratios are seen.
DRAWN_FLOPS = 1e9


def strip_of(sample: T) -> T:
    """Return one picture ``[channels, height, width]`` of a sample; the frames of a video stand side by side.

    ``sample``: ``[channels, (frames,) height, width]``.
    """
    return sample if sample.dim() == 3 else torch.cat(list(sample.unbind(1)), dim=-1)


def grid_of(images: T) -> T:
    """Return one picture ``[channels, height, width]`` of all ``images``, with lines between them."""
    strips = [F.pad(strip_of(image), (1, 1, 1, 1), value=-1.0) for image in images]
    columns = 1 if images.dim() == 5 else ceil(sqrt(len(strips)))
    while len(strips) % columns:
        strips.append(torch.full_like(strips[0], -1.0))
    rows = [
        torch.cat(strips[start : start + columns], dim=-1)
        for start in range(0, len(strips), columns)
    ]
    whole = torch.cat(rows, dim=-2)
    small = max(1, SHOWN // min(images.shape[-2:]))
    return whole.repeat_interleave(small, -1).repeat_interleave(small, -2)


def write_samples(images: T, folder: Path) -> None:
    """Write ``images`` ``[samples, channels, (frames,) height, width]``, from -1 to 1, into the new ``folder``.

    Each is a PNG file (of a video the frames side by side, and beside it an animation); ``grid.png`` has all of them,
    and ``samples.pt`` their values. Raises :class:`UsageError` if Pillow is missing.
    """
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(
            "images are written by Pillow, which is not installed; run pip install 'weft[images]'"
        ) from None

    def save(picture: T, path: Path) -> None:
        values = ((picture.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        pixels = values.permute(1, 2, 0).squeeze(-1).numpy()
        Image.fromarray(pixels).save(path)

    with new_folder(folder) as parts:
        for number, image in enumerate(images):
            save(strip_of(image), parts / f"{number:04}.png")
            if image.dim() == 4:
                from weft.diffusion.animations import write_animation

                write_animation(image, parts / f"{number:04}.gif")
        save(grid_of(images), parts / "grid.png")
        torch.save(images, parts / "samples.pt")


def sampled_sizes(sampling: TableSampling) -> DenoiserSizes:
    """Return the sizes of the model of ``sampling`` and of a batch of its samples."""
    shape, request = sampling.denoiser.model.shape, sampling.request
    rows = min(request.batch, len(request.conditions))
    return DenoiserSizes(
        shape.embed, shape.ffn or 4 * shape.embed, sampling.settings.patch_values,
        rows * (1 if request.guidance == 1 or sampling.split else 2), bytes=sampling.denoiser.dtype.itemsize,
    )  # fmt: skip


def draw_table(sampling: TableSampling, path: Path) -> None:
    """Draw the table of ``sampling`` into ``path``: an interactive page if its name ends with ``.html``, else SVG."""
    simulation = simulated_sampling(
        sampling.runnable, sampled_sizes(sampling), SamplingDevice(DRAWN_FLOPS)
    )
    draw = html if path.suffix == ".html" else svg
    note = (
        "number: step x blocks + block; keys leave behind sK and are awaited before sA"
    )
    write(path, draw(simulation, note=note, memory="bytes of latents, activations and keys"), "--svg")  # fmt: skip
