"""Samples of experts that were trained apart, as files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.diffusion.parallel_sample import asked_conditions
from weft.diffusion.picture_experts import open_picture_experts
from weft.diffusion.sample import sample
from weft.diffusion.sampling_pictures import write_samples

if TYPE_CHECKING:
    from weft.diffusion.sample import SampleRequest


def write_joined_samples(
    where: str, out: Path, request: SampleRequest, classes: str, say: Callable[[str], None], ema: bool = False,
    top: int | None = None,
) -> str:  # fmt: skip
    """Sample images with the experts of the set ``where``, and write them into the new folder ``out``.

    Returns a line for the user about the samples.

    Arguments:
        ``where``: folder that ``weft experts --clusters`` has written.
        ``request``: the request for samples; of its conditions only the number is used.
        ``classes``: class names or numbers, see :func:`weft.diffusion.parallel_sample.asked_conditions`.
        ``say``, ``ema``, ``top``: see :func:`weft.diffusion.picture_experts.open_picture_experts`.
    """
    device = str(request.conditions.device)
    joined = open_picture_experts(where, device, say, ema, top)
    assert joined is not None
    count = len(request.conditions)
    conditions = asked_conditions(joined.settings, count, classes).to(device)
    begun = time.perf_counter()
    images = sample(
        joined, joined.process, joined.shape, replace(request, conditions=conditions), joined.settings.classes
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    write_samples(joined.first.pixels(images), out)
    chosen = joined.weigher.top
    words = f"the likeliest {chosen}" if chosen else "all"
    computed = ", ".join(f"{rows:,}" for rows in joined.computed)
    return (
        f"{count} samples in {seconds:.2f} s by {words} of {len(joined.experts)} experts, which have computed "
        f"{computed} noised images"
    )
