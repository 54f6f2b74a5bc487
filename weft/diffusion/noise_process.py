"""How much of an image is noise at a time, and what a model predicts of the two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from weft.shapes.diffusion_shape import DiffusionSettings

T = torch.Tensor

#: Levels of the schedules that are tables, those of DDPM.
LEVELS = 1000


class Amounts(NamedTuple):
    """Coefficients of a noised image: ``signal`` times the image plus ``noise`` times Gaussian noise."""

    signal: T
    noise: T


class Parts(NamedTuple):
    """The clean image and the noise of which a noised image is mixed, each in the shape of the noised image."""

    image: T
    noise: T


@cache
def log_signal_table(schedule: str) -> np.ndarray:
    """Return log(alpha bar) of each noise level, the logarithm of the image's share in the variance.

    The result is float64 ``[LEVELS + 1]``, with falling values. The first entry, 0, is the image without noise; the
    others are the noise levels. ``schedule``: "linear" (Ho et al. 2020) or "cosine" (Nichol & Dhariwal 2021, with betas
    of at most 0.999).
    """
    steps = np.arange(LEVELS + 1) / LEVELS
    if schedule == "linear":
        betas = np.linspace(1e-4, 0.02, LEVELS)
    else:
        shares = np.cos((steps + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - shares[1:] / shares[:-1], 0.999)
    return np.append(0.0, np.cumsum(np.log1p(-betas)))


@dataclass(frozen=True)
class NoiseProcess:
    """Noise process of diffusion: how an image turns into noise, as a function of time from 0 (noise) to 1 (image).

    ``target``: what the model predicts: "flow", "epsilon", "v" or "x". ``schedule``: name of the table of noise levels,
    for all targets but "flow". Level ``n`` of a table is at time ``1 - (n + 1) / LEVELS``, so that time 1 is the image
    itself. Between levels the logarithm of the image's share in the variance is interpolated.
    """

    target: str = "flow"
    schedule: str = "cosine"

    @classmethod
    def of(cls, settings: DiffusionSettings) -> NoiseProcess:
        """Return the process of a model with these ``settings``."""
        return cls(settings.target, settings.schedule)

    def amounts(self, time: T) -> Amounts:
        """Return the coefficients of image and noise at ``time``, float64 of the same shape."""
        time = time.double()
        if self.target == "flow":
            return Amounts(time, 1 - time)
        entry = ((1 - time) * LEVELS).clamp(0, LEVELS)
        # the time of an entry is that entry, whatever the product was rounded to
        entry = torch.where((entry - entry.round()).abs() < 1e-6, entry.round(), entry)
        table = torch.from_numpy(log_signal_table(self.schedule)).to(time.device)
        low = entry.floor().long()
        high = (low + 1).clamp(max=LEVELS)
        log_signal = torch.lerp(table[low], table[high], entry - low)
        return Amounts((log_signal / 2).exp(), (-log_signal.expm1()).sqrt())

    def noised(self, image: T, noise: T, time: T) -> T:
        """Mix ``image`` ``[batch, ...]`` with ``noise`` of the same shape, in the amounts of ``time`` ``[batch]``."""
        signal, amount = self._beside(image, time)
        return signal * image + amount * noise

    def target_of(self, image: T, noise: T, time: T) -> T:
        """Return the target that the model has to predict for the result of :meth:`noised` with the same arguments."""
        if self.target == "flow":
            return image - noise
        if self.target == "v":
            signal, amount = self._beside(image, time)
            return signal * noise - amount * image
        return noise if self.target == "epsilon" else image

    def parts(self, noised: T, predicted: T, time: T) -> Parts:
        """Split ``noised`` ``[batch, ...]`` into image and noise, according to the model's prediction ``predicted``.

        ``time``: time of each noised image, ``[batch]``.
        """
        signal, amount = self._beside(noised, time)
        if self.target == "flow":
            return Parts(noised + amount * predicted, noised - signal * predicted)
        if self.target == "v":
            image = signal * noised - amount * predicted
            return Parts(image, amount * noised + signal * predicted)
        if self.target == "epsilon":
            return Parts((noised - amount * predicted) / signal, predicted)
        return Parts(predicted, (noised - signal * predicted) / amount)

    def _beside(self, image: T, time: T) -> Amounts:
        """Return the amounts at ``time`` ``[batch]``, shaped to be multiplied with ``image`` ``[batch, ...]``."""
        shape = (-1, *[1] * (image.dim() - 1))
        signal, noise = self.amounts(time)
        return Amounts(
            signal.to(image.dtype).view(shape), noise.to(image.dtype).view(shape)
        )
