"""Euler's method: one evaluation a step."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.diffusion.noise_process import NoiseProcess
    from weft.diffusion.solver import Solving


@register(
    "sampler",
    "euler",
    title="Euler's method (DDIM)",
    paper="Song et al. 2021 (DDIM); Lipman et al. 2023 (flows)",
    recipe="weft sample --checkpoint RUN --sampler euler",
    proof="tests/diffusion/test_samplers.py",
    figure="ten steps of a flow to one Gaussian image are exact to 1e-12",
)
def euler(process: NoiseProcess, times: tuple[float, ...], x: torch.Tensor) -> Solving:
    """Sample an image with steps of the first order (DDIM, Song et al. 2021; Lipman et al. 2023). Each step mixes the
    predicted image and the predicted noise in the amounts that belong to the next time. For a flow this is Euler's
    method, for tables of noise levels it is DDIM without added noise. Arguments and generator are those of
    :class:`weft.diffusion.solver.Solver`: it yields queries to the model, and returns the image.
    """
    import torch

    from weft.diffusion.solver import Query, amounts_at

    for time, later in pairwise(times):
        predicted = yield Query(x, time)
        if process.target == "flow":
            x = x + (later - time) * predicted
            continue
        at = torch.full((len(x),), time, dtype=torch.float64, device=x.device)
        image, noise = process.parts(x, predicted, at)
        signal, amount = amounts_at(process, later)
        x = signal * image + amount * noise
    return x
