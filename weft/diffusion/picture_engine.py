"""Denoises pictures of many requests in one batch, each at a step of its own, with its own seed and guidance."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.data.size_buckets import ImageSize
from weft.diffusion.class_words import NO_CLASS, class_number
from weft.diffusion.sample import (
    Picture,
    advance_pictures,
    begun_picture,
    seeded_noise,
    solver_of,
)
from weft.errors import UsageError

if TYPE_CHECKING:
    from weft.diffusion.denoiser import Denoiser

T = torch.Tensor

#: Scales of guidance are below this.
MOST_GUIDANCE = 10_000


@dataclass(frozen=True)
class PictureAsk:
    """Request for one image.

    Attributes:
        ``condition``: number of its class, or text states.
        ``steps``: number of steps.
        ``sampler``: name of the sampler.
        ``guidance``: scale of classifier-free guidance; 1: none.
        ``seed``, ``number``: seed of the noise, and number of the image among those of this seed.
        ``size``: height and width in pixels; None: those of the engine's denoiser.
    """

    condition: T
    steps: int = 20
    sampler: str = "euler"
    guidance: float = 1.0
    seed: int = 0
    number: int = 0
    size: ImageSize | None = None


class PictureJob:
    """A requested image that waits, is being sampled, or is finished.

    Attributes:
        ``ask``: the request.
        ``picture``: state of its sampling; None while it waits.
        ``image``: the image ``[channels, (frames,) height, width]``; None before it is finished.
    """

    def __init__(self, ask: PictureAsk) -> None:
        self.ask = ask
        self.picture: Picture | None = None
        self.image: T | None = None


class PictureEngine:
    """Samples images with ``denoiser`` for many requests, at most ``most`` in a batch; others wait for their turn.

    An image joins the batch as soon as there is room, whatever steps the others are at, and leaves it as soon as it is
    finished. Its values do not depend on the others, except for rounding in products of another size. Images of
    different sizes are evaluated one size after the other.

    Attributes:
        ``running``: images in the batch.
        ``waiting``: images that wait, in order.
        ``evaluations``: number of predictions so far. An image with guidance needs two where another needs one.
    """

    def __init__(self, denoiser: Denoiser, most: int) -> None:
        self.denoiser, self.most = denoiser, most
        self.running: list[PictureJob] = []
        self.waiting: deque[PictureJob] = deque()
        self.evaluations = 0

    @property
    def idle(self) -> bool:
        """Whether no image is in the batch and none waits."""
        return not (self.running or self.waiting)

    def submit(self, asks: Sequence[PictureAsk]) -> list[PictureJob]:
        """Add the requests ``asks`` for one image each to those that wait. Returns a job for each, in the same order.

        Raises :class:`UsageError` if a sampler is not known.
        """
        for ask in asks:
            solver_of(ask.sampler)
        jobs = [PictureJob(ask) for ask in asks]
        self.waiting += jobs
        return jobs

    def cancel(self, jobs: Sequence[PictureJob]) -> None:
        """Remove ``jobs`` from the batch and from the waiting images; finished jobs are ignored."""
        gone = set(jobs)
        self.running = [job for job in self.running if job not in gone]
        self.waiting = deque(job for job in self.waiting if job not in gone)

    def step(self) -> list[PictureJob]:
        """Let waiting images join the batch, evaluate the model once, and return the images that are finished."""
        while self.waiting and len(self.running) < self.most:
            job = self.waiting.popleft()
            job.picture = self._begun(job.ask)
            self.running.append(job)
        for size in dict.fromkeys(job.ask.size for job in self.running):
            alike = [job.picture for job in self.running if job.ask.size == size]
            pictures = [each for each in alike if each is not None]
            denoiser = self._sized(size)
            advance_pictures(pictures, denoiser, denoiser.dropped)
            self.evaluations += sum(1 + (each.guidance != 1) for each in pictures)
        finished = []
        for job in self.running:
            assert job.picture is not None
            if job.picture.image is not None:
                job.image = job.picture.image[0]
                finished.append(job)
        self.running = [job for job in self.running if job.image is None]
        return finished

    def _sized(self, size: ImageSize | None) -> Denoiser:
        return self.denoiser if size is None else self.denoiser.sized(size)

    def _begun(self, ask: PictureAsk) -> Picture:
        denoiser, device = self._sized(ask.size), ask.condition.device
        noise = seeded_noise(denoiser.shape, ask.seed, ask.number).to(device)
        return begun_picture(
            denoiser.process, solver_of(ask.sampler), ask.steps, noise, ask.condition, ask.guidance
        )  # fmt: skip


def prompt_condition(denoiser: Denoiser, prompt: str) -> T:
    """Return the condition by which ``denoiser`` makes an image that ``prompt`` describes: the number of a class, or a
    caption.

    ``prompt``: name or number of a class, or "" or "none" for no class; any text for a model that reads texts. Raises
    :class:`UsageError` for a class that is not known, and for a text that is too long.
    """
    settings = denoiser.settings
    device = denoiser.model.conditioning.time_in.device
    if settings.text:
        from weft.diffusion.parallel_sample import prompt_captions

        return prompt_captions(settings, 1, [prompt])[0].to(device)
    number = class_number(
        prompt.strip() or NO_CLASS, settings.classes, denoiser.class_names
    )
    return torch.tensor(number, device=device)


def check_guidance(denoiser: Denoiser, guidance: float) -> None:
    """Raise :class:`UsageError` if ``denoiser`` does not support classifier-free guidance of the scale ``guidance``."""
    settings = denoiser.settings
    if not 0 <= guidance < MOST_GUIDANCE:
        raise UsageError(
            f"a guidance of {guidance:g} is below 0 or above {MOST_GUIDANCE}; give 1 for none"
        )
    if guidance == 1:
        return
    if not (settings.classes or settings.text):
        raise UsageError(
            "this model knows neither classes nor texts to guide by; give 1"
        )
    if not settings.drop:
        raise UsageError(
            "this model was trained without dropped conditions (settings.drop = 0), which guidance needs; give 1"
        )
