"""The interface of samplers, and the times at which they evaluate a model.

A sampler is a generator for one image or several that are as noisy as each other: it yields what it wants a prediction
for, is sent the prediction, and returns the image. So images at different steps can be evaluated in one batch, and what
a sampler remembers belongs to its images.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple, Protocol

import torch

from weft.diffusion.noise_process import LEVELS, NoiseProcess
from weft.errors import UsageError

T = torch.Tensor


class Query(NamedTuple):
    """Request of a sampler to the model: predict for ``noised`` images ``[batch, ...]``, all at the same ``time``."""

    noised: T
    time: float


#: A sampler under way: yields queries, is sent predictions shaped like the noised images, and returns the images.
Solving = Generator[Query, T, T]


class Solver(Protocol):
    """Interface of diffusion samplers (kind "sampler").

    A sampler is a generator function: it yields queries to the model, gets a prediction for each, and returns the
    image.
    """

    def __call__(
        self, process: NoiseProcess, times: tuple[float, ...], x: T
    ) -> Solving:
        """Turn the noise ``x`` ``[batch, ...]`` into images.

        ``process``: how images become noise, and what predictions mean. ``times``: rising, from 0 (noise) to 1 (image).
        """


def sample_times(process: NoiseProcess, steps: int) -> tuple[float, ...]:
    """Return the ``steps + 1`` times between which a sampler takes its steps, rising from 0 (noise) to 1 (image).

    ``process``: the model's noise process. For a flow they are evenly spaced. Otherwise they are the times of rounded
    noise levels, evenly spaced from the last level to the first, and at last the time of the image itself. That is what
    diffusers does with ``timestep_spacing="linspace"``. Raises :class:`UsageError` if ``steps`` is below 1.
    """
    if steps < 1:
        raise UsageError(f"--steps = {steps} is not possible; make at least one")
    if process.target == "flow":
        return tuple(n / steps for n in range(steps + 1))
    spaced = torch.linspace(0, LEVELS - 1, steps + 1, dtype=torch.float64).round()
    levels = spaced.flip(0)[:-1].tolist()
    return (*(1 - (level + 1) / LEVELS for level in levels), 1.0)


class AmountsAt(NamedTuple):
    """A noised image at one time is ``signal`` times the image plus ``noise`` times Gaussian noise; both are Python
    numbers.
    """

    signal: float
    noise: float

    @property
    def log_ratio(self) -> float:
        """Half the logarithm of the signal-to-noise ratio (``lambda`` in Lu et al. 2022).

        It is infinite if either amount is 0.
        """
        if not self.signal:
            return -math.inf
        return math.log(self.signal / self.noise) if self.noise else math.inf


def amounts_at(process: NoiseProcess, time: float) -> AmountsAt:
    """Return the coefficients of image and noise at ``time`` of the noise process ``process``."""
    signal, noise = process.amounts(torch.tensor(time, dtype=torch.float64))
    return AmountsAt(signal.item(), noise.item())


def predicted_image(process: NoiseProcess, query: Query, predicted: T) -> T:
    """Return the clean image that the model's prediction ``predicted`` for ``query`` implies. ``process``: the model's
    noise process.
    """
    x = query.noised
    time = torch.full((len(x),), query.time, dtype=torch.float64, device=x.device)
    return process.parts(x, predicted, time).image
