"""Makes images of noise: seeds, guidance, and batches in which images are at different steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weft.diffusion.noise_process import NoiseProcess
from weft.diffusion.solver import Query, Solver, Solving, sample_times
from weft.errors import UsageError
from weft.registry import find

T = torch.Tensor

#: Function from noised images, times and conditions to predictions, such as a :class:`Denoiser`.
Predict = Callable[[T, T, T], T]


def seeded_noise(shape: Sequence[int], seed: int, number: int, block: int = 0) -> T:
    """Return the initial noise of image ``number``, float32 ``[*shape]``.

    It depends only on the arguments, and so is the same in every batch and on every rank. ``block``: number of the
    block of frames, for videos that are sampled block by block.
    """
    # a list of such large numbers would become floats
    key = np.array([seed % 2**64, (number << 24) + block], np.uint64)
    drawn = np.random.Generator(np.random.Philox(key=key))
    return torch.from_numpy(drawn.standard_normal(tuple(shape), np.float32))


def solver_of(name: str) -> Solver:
    """Return the sampler called ``name``. Raises :class:`UsageError` if there is none."""
    solver: Solver = find("sampler", name).implementation
    return solver


def guided(predict: Predict, scale: float | T, dropped: T | int) -> Predict:
    """Return ``predict`` with classifier-free guidance (Ho & Salimans 2022).

    The result is ``without + scale * (with - without)``, from the predictions with and without condition. ``scale``:
    one scale for all images, or one for each, ``[batch]``; 1: no guidance, so that the image is evaluated only once.
    ``dropped``: the condition that stands for none.
    """
    scales = torch.as_tensor(scale, dtype=torch.float64)
    if (scales == 1).all():
        return predict

    def predicted(noised: T, time: T, condition: T) -> T:
        each = scales.to(noised.device).expand(len(noised))
        twice = each != 1
        without = torch.zeros_like(condition[twice]) + dropped
        both = predict(
            torch.cat((noised, noised[twice])),
            torch.cat((time, time[twice])),
            torch.cat((condition, without)),
        )
        conditional, unconditional = both[: len(noised)], both[len(noised) :]
        moved = conditional[twice] - unconditional
        factors = each[twice].to(moved.dtype).view(-1, *[1] * (moved.dim() - 1))
        whole = conditional.clone()
        whole[twice] = unconditional + factors * moved
        return whole

    return predicted


@dataclass
class Picture:
    """State of one image that is being sampled.

    Attributes:
        ``condition``: number of its class, or text states.
        ``solving``: the running generator of its sampler.
        ``query``: the evaluation that the sampler needs next; None once the image is finished.
        ``image``: the finished image; None before.
        ``steps``: number of predictions so far.
        ``guidance``: scale of classifier-free guidance; 1: none.
    """

    condition: T
    solving: Solving
    query: Query | None = None
    image: T | None = None
    steps: int = 0
    guidance: float = 1.0

    def advance(self, predicted: T | None) -> None:
        """Pass the model's prediction ``predicted`` for :attr:`query` to the sampler; None starts the sampler."""
        self.steps += predicted is not None
        try:
            self.query = (
                next(self.solving)
                if predicted is None
                else self.solving.send(predicted)
            )
        except StopIteration as end:
            self.query, self.image = None, end.value


def begun_picture(
    process: NoiseProcess, solver: Solver, steps: int, noise: T, condition: T, guidance: float = 1.0
) -> Picture:  # fmt: skip
    """Begin to sample a picture from ``noise``, which has the shape of an image, in ``steps`` steps of ``solver``.

    ``process``: noise process of the model. ``condition``: number of a class, or text states. ``guidance``: scale of
    classifier-free guidance; 1: none.
    """
    times = sample_times(process, steps)
    picture = Picture(condition, solver(process, times, noise[None]), guidance=guidance)
    picture.advance(None)
    return picture


@torch.inference_mode()
def advance_pictures(
    pictures: Sequence[Picture], predict: Predict, dropped: T | int = 0
) -> None:
    """Evaluate the model ``predict`` once for all ``pictures``, which may be at different steps, and advance each.

    ``dropped``: the condition that stands for none, for pictures with guidance.
    """
    queries = [each.query for each in pictures if each.query is not None]
    if len(queries) < len(pictures) or not queries:
        raise UsageError("a picture that is finished wants no prediction")
    noised = torch.cat([query.noised for query in queries])
    time = torch.tensor([query.time for query in queries], dtype=torch.float64)
    condition = torch.stack([each.condition for each in pictures])
    scales = torch.tensor([each.guidance for each in pictures], dtype=torch.float64)
    with_guidance = guided(predict, scales, dropped)
    predicted = with_guidance(noised, time.to(noised.device), condition)
    for picture, of_picture in zip(pictures, predicted, strict=True):
        picture.advance(of_picture[None])


@dataclass(frozen=True)
class SampleRequest:
    """Request to sample images.

    Attributes:
        ``conditions``: number of the class of each image, or its text states.
        ``steps``: number of steps.
        ``sampler``: name of the sampler.
        ``guidance``: scale of classifier-free guidance; 1: none.
        ``seed``: seed of the noise; the noise of an image also depends on its number.
        ``first``: number of the first image.
        ``batch``: largest number of images in one evaluation.
    """

    conditions: T
    steps: int = 20
    sampler: str = "euler"
    guidance: float = 1.0
    seed: int = 0
    first: int = 0
    batch: int = 64


def sample(
    predict: Predict, process: NoiseProcess, shape: Sequence[int], request: SampleRequest,
    dropped: T | int = 0, passed: Callable[[int], None] | None = None,
) -> T:  # fmt: skip
    """Return the images of ``request``, ``[images, *shape]``.

    ``predict``: the model. ``process``: its noise process. ``shape``: shape of an image. ``dropped``: the
    condition that stands for none, for guidance. ``passed``: called with the number of finished images.
    """
    if request.guidance != 1 and request.guidance < 0:
        raise UsageError(f"--guidance = {request.guidance} is below 0; use 1 for none")
    solver = solver_of(request.sampler)
    images: list[T] = []
    for start in range(0, len(request.conditions), request.batch):
        conditions = request.conditions[start : start + request.batch]
        pictures = [
            begun_picture(
                process, solver, request.steps,
                seeded_noise(shape, request.seed, request.first + start + i).to(condition.device), condition,
                request.guidance,
            )
            for i, condition in enumerate(conditions)
        ]  # fmt: skip
        while pictures[0].query is not None:
            advance_pictures(pictures, predict, dropped)
        images += [each.image for each in pictures if each.image is not None]
        if passed is not None:
            passed(len(images))
    return torch.cat(images)
