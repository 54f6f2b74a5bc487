"""Samples as files, and a sampling table as a picture."""

from __future__ import annotations

from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from weft.diffusion.image_files import as_pixels, image_grid, png_bytes
from weft.diffusion.sampling_costs import (
    DenoiserSizes,
    SamplingDevice,
    simulated_sampling,
)
from weft.new_folder import new_folder
from weft.pages import write
from weft.schedule.draw import html, svg

if TYPE_CHECKING:
    from weft.diffusion.parallel_sample import TableSampling

T = torch.Tensor
#: Operations per second of the device of a picture, of which only ratios are seen.
DRAWN_FLOPS = 1e9


def write_samples(images: T, folder: Path) -> None:
    """Write ``images``, ``[samples, channels, (frames,) height, width]`` from -1 to 1, into the new folder ``folder``.

    Each sample is a PNG file; a video is a strip of its frames, with an animation beside it. ``grid.png`` shows all
    samples, and ``samples.pt`` holds their values.
    """
    values = images.numpy()
    columns = ceil(sqrt(len(values)))
    with new_folder(folder) as parts:
        for number, (image, pixels) in enumerate(zip(images, values, strict=True)):
            (parts / f"{number:04}.png").write_bytes(png_bytes(as_pixels(pixels)))
            if image.dim() == 4:
                from weft.diffusion.animations import write_animation

                write_animation(image, parts / f"{number:04}.gif")
        (parts / "grid.png").write_bytes(png_bytes(image_grid(values, columns)))
        torch.save(images, parts / "samples.pt")


def sampled_sizes(sampling: TableSampling) -> DenoiserSizes:
    """Return the sizes of the model and of the batch in ``sampling``, as the simulator of tables needs them."""
    shape, request = sampling.denoiser.model.shape, sampling.request
    rows = min(request.batch, len(request.conditions))
    return DenoiserSizes(
        shape.embed, shape.ffn or 4 * shape.embed, sampling.settings.patch_values,
        rows * (1 if request.guidance == 1 or sampling.split else 2), bytes=sampling.denoiser.dtype.itemsize,
    )  # fmt: skip


def draw_table(sampling: TableSampling, path: Path) -> None:
    """Draw the sampling table of ``sampling`` into the file ``path``: an interactive page if the name ends with
    ``.html``, else SVG.
    """
    simulation = simulated_sampling(
        sampling.runnable, sampled_sizes(sampling), SamplingDevice(DRAWN_FLOPS)
    )
    draw = html if path.suffix == ".html" else svg
    note = (
        "number: step x blocks + block; keys leave behind sK and are awaited before sA"
    )
    write(path, draw(simulation, note=note, memory="bytes of latents, activations and keys"), "--svg")  # fmt: skip
