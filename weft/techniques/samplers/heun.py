"""Heun's method: two evaluations a step, and one in the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.diffusion.noise_process import NoiseProcess
    from weft.diffusion.solver import Solving


@register(
    "sampler",
    "heun",
    title="Heun's method",
    paper="Karras et al. 2022",
    recipe="weft sample --checkpoint RUN --sampler heun",
    proof="tests/diffusion/test_samplers.py",
    figure="images equal to those of diffusers' scheduler to 1e-5 of the largest value",
)
def heun(process: NoiseProcess, times: tuple[float, ...], x: torch.Tensor) -> Solving:
    """Sample an image with Heun's method: each step uses the mean of the slopes at both of its ends (Karras et al.
    2022). The last step, which ends without noise, is a step of Euler's method. For a flow the slope is the velocity.
    For tables of noise levels it is the noise, in the coordinates of Karras et al., where noise is added to an image
    that is not scaled. Arguments and generator are those of :class:`weft.diffusion.solver.Solver`: it yields queries to
    the model, and returns the image.
    """
    import torch

    from weft.diffusion.solver import Query, amounts_at

    flow = process.target == "flow"

    def slope(query: Query, predicted: torch.Tensor) -> torch.Tensor:
        if flow:
            return predicted
        x = query.noised
        at = torch.full((len(x),), query.time, dtype=torch.float64, device=x.device)
        return process.parts(x, predicted, at).noise

    def moved(x: torch.Tensor, time: float, later: float, slope: torch.Tensor) -> torch.Tensor:  # fmt: skip
        if flow:
            return x + (later - time) * slope
        (signal, noise), (next_signal, next_noise) = (
            amounts_at(process, t) for t in (time, later)
        )
        ratio = next_signal / signal
        return ratio * x + (next_noise - ratio * noise) * slope

    for i, time in enumerate(times[:-1]):
        later = times[i + 1]
        query = Query(x, time)
        first = slope(query, (yield query))
        tried = moved(x, time, later, first)
        if i + 2 == len(times):
            return tried
        query = Query(tried, later)
        second = slope(query, (yield query))
        x = moved(x, time, later, (first + second) / 2)
    return x
