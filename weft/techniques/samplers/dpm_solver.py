"""DPM-Solver++ of the second order: one evaluation a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.diffusion.noise_process import NoiseProcess
    from weft.diffusion.solver import Solving


@register(
    "sampler",
    "dpm-solver",
    title="DPM-Solver++ (2M)",
    paper="Lu et al. 2022",
    recipe="weft sample --checkpoint RUN --sampler dpm-solver",
    proof="tests/diffusion/test_samplers.py",
    figure="images equal to those of diffusers' scheduler to 1e-5 of the largest value",
)
def dpm_solver(
    process: NoiseProcess, times: tuple[float, ...], x: torch.Tensor
) -> Solving:
    """Sample an image with the second-order solver DPM-Solver++: extrapolate the predicted image from the last two
    predictions, in the logarithm of the signal-to-noise ratio (Lu et al. 2022). The first and the last step, which ends
    without noise, are of the first order. Arguments and generator are those of :class:`weft.diffusion.solver.Solver`:
    it yields queries to the model, and returns the image.
    """
    import math

    from weft.diffusion.solver import Query, amounts_at, predicted_image

    at = [amounts_at(process, time) for time in times]
    before: torch.Tensor | None = None
    for i, time in enumerate(times[:-1]):
        query = Query(x, time)
        image = predicted_image(process, query, (yield query))
        here, there = at[i], at[i + 1]
        step = there.log_ratio - here.log_ratio
        change = math.expm1(-step)
        guess = image
        if before is not None and i + 2 < len(times):
            past = here.log_ratio - at[i - 1].log_ratio
            # no past is as far as the beginning of a flow, which is noise alone
            guess = image + (image - before) * (step / past / 2)
        x = there.noise / here.noise * x - there.signal * change * guess
        before = image
    return x
