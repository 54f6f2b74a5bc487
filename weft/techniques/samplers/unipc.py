"""UniPC of the second order: a predictor, and a corrector that needs no evaluation of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.registry import register

if TYPE_CHECKING:
    import torch

    from weft.diffusion.noise_process import NoiseProcess
    from weft.diffusion.solver import AmountsAt, Solving


@register(
    "sampler",
    "unipc",
    title="UniPC",
    paper="Zhao et al. 2023",
    recipe="weft sample --checkpoint RUN --sampler unipc",
    proof="tests/diffusion/test_samplers.py",
    figure="images equal to those of diffusers' scheduler to 1e-5 of the largest value",
)
def unipc(process: NoiseProcess, times: tuple[float, ...], x: torch.Tensor) -> Solving:
    """Sample an image with UniPC of order two: predict the next state, and correct it with the prediction that the
    model makes there for the next step (Zhao et al. 2023). This is the variant with ``B(h) = exp(h) - 1`` that works on
    predicted images. The first and the last step are of the first order. Arguments and generator are those of
    :class:`weft.diffusion.solver.Solver`: it yields queries to the model, and returns the image.
    """
    from weft.diffusion.solver import Query, amounts_at, predicted_image

    at = [amounts_at(process, time) for time in times]
    images: list[torch.Tensor] = []
    start, order = x, 0
    for i, time in enumerate(times[:-1]):
        query = Query(x, time)
        image = predicted_image(process, query, (yield query))
        if order:
            x = corrected(start, at[: i + 1], images, image, order)
        images = [*images[-1:], image]
        start = x
        order = min(2, i + 1, len(times) - 1 - i)
        x = stepped(start, at[: i + 2], images, order)
    return x


def stepped(
    x: torch.Tensor, at: list[AmountsAt], images: list[torch.Tensor], order: int
) -> torch.Tensor:
    """Return the next state that UniPC's predictor computes. ``x``: the present state. ``at``: amounts of image and
    noise at each time so far; the last entry but one is for ``x``, the last entry for the next state. ``images``: the
    images that the model has predicted so far, the last one from ``x``. ``order``: order of the step.
    """
    import math

    here, there = at[-2:]
    step = there.log_ratio - here.log_ratio
    change = math.expm1(-step)
    slope = 0.0 * x
    if order == 2:
        ratio = (at[-3].log_ratio - here.log_ratio) / step
        slope = (images[-2] - images[-1]) / ratio / 2
    return there.noise / here.noise * x - there.signal * change * (images[-1] + slope)


def corrected(
    x: torch.Tensor, at: list[AmountsAt], images: list[torch.Tensor], image: torch.Tensor,
    order: int,
) -> torch.Tensor:  # fmt: skip
    """Return the next state that UniPC's corrector computes. ``x``: the present state. ``at``: amounts of image and
    noise at each time so far; the last entry but one is for ``x``, the last entry for the next state. ``images``: the
    images that the model has predicted so far, the last one from ``x``. ``image``: the image that the model predicts at
    the end of the step. ``order``: order of the step.
    """
    import math

    here, there = at[-2:]
    step = there.log_ratio - here.log_ratio
    change = math.expm1(-step)
    last, later = images[-1], 0.5
    slope = 0.0 * x
    ratio = (at[-3].log_ratio - here.log_ratio) / step if order == 2 else -math.inf
    if math.isfinite(ratio):
        # moments of the interpolation at the ratio and at 1 (section 3 of the paper)
        first = change / -step - 1
        second = first / -step - 0.5
        b = first / change, 2 * second / change
        later = (b[1] - ratio * b[0]) / (1 - ratio)
        slope = (images[-2] - last) / ratio * (b[0] - later)
    whole = last + slope + later * (image - last)
    return there.noise / here.noise * x - there.signal * change * whole
