"""Samplers: exact where the answer is known, the same in every batch, and as diffusers' own."""

from __future__ import annotations

import pytest
import torch

from weft.diffusion.noise_process import NoiseProcess
from weft.diffusion.sample import (
    SampleRequest,
    advance_pictures,
    begun_picture,
    guided,
    sample,
    seeded_noise,
    solver_of,
)
from weft.diffusion.solver import sample_times
from weft.errors import UsageError

T = torch.Tensor
SHAPE = (1, 3, 4)
TABLES = (("epsilon", "linear"), ("v", "cosine"), ("x", "cosine"))
PROCESSES = [NoiseProcess(), *(NoiseProcess(*table) for table in TABLES)]


def images_of(condition: T) -> T:
    """One image for each class."""
    return torch.linspace(-1, 1, 12).view(SHAPE)[None] * (1 + condition.view(-1, 1, 1, 1)) / 3  # fmt: skip


def perfect(process: NoiseProcess) -> object:
    """A model of a data set with one image for each class, which it knows."""

    def predict(noised: T, time: T, condition: T) -> T:
        image = images_of(condition)
        signal, amount = (x.view(-1, 1, 1, 1).to(noised.dtype) for x in process.amounts(time))  # fmt: skip
        noise = (noised - signal * image) / amount
        return process.target_of(image, noise, time)

    return predict


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: p.target)
def test_a_known_image_is_reached_from_any_noise(process: NoiseProcess) -> None:
    request = SampleRequest(torch.tensor([0, 1, 2]), steps=10)
    images = sample(perfect(process), process, SHAPE, request)  # type: ignore[arg-type]
    torch.testing.assert_close(images, images_of(request.conditions), atol=2e-5, rtol=0)


def test_an_image_does_not_depend_on_its_batch() -> None:
    def predict(noised: T, time: T, condition: T) -> T:
        return noised.sin() + time.float().view(-1, 1, 1, 1) * images_of(condition)

    process, classes = NoiseProcess(), torch.tensor([0, 1, 2, 0, 1])
    whole = sample(predict, process, SHAPE, SampleRequest(classes, steps=4))
    small = sample(predict, process, SHAPE, SampleRequest(classes, steps=4, batch=2))
    alone = sample(predict, process, SHAPE, SampleRequest(classes[3:], steps=4, first=3))  # fmt: skip
    torch.testing.assert_close(small, whole, rtol=0, atol=0)
    torch.testing.assert_close(alone, whole[3:], rtol=0, atol=0)
    assert not torch.equal(seeded_noise(SHAPE, 0, 1), seeded_noise(SHAPE, 0, 2))
    assert not torch.equal(seeded_noise(SHAPE, 0, 1), seeded_noise(SHAPE, 0, 1, block=1))  # fmt: skip


def test_guidance_moves_away_from_no_class() -> None:
    def predict(noised: T, time: T, condition: T) -> T:
        return images_of(condition)

    classes = torch.tensor([0, 1])
    noised, time = torch.zeros(2, *SHAPE), torch.zeros(2)
    moved = guided(predict, 3.0, 5)(noised, time, classes)
    without = images_of(torch.tensor([5, 5]))
    torch.testing.assert_close(moved, without + 3 * (images_of(classes) - without))
    assert guided(predict, 1.0, 5) is predict


def test_no_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="--steps = 0"):
        sample(lambda *_: _[0], NoiseProcess(), SHAPE, SampleRequest(torch.tensor([0]), steps=0))  # fmt: skip


SAMPLERS = ["euler", "heun", "dpm-solver", "unipc"]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: p.target)
def test_more_steps_are_nearer(process: NoiseProcess, name: str) -> None:
    """Of Gaussian data the best prediction and the exact image are known."""

    spread, centre = 0.5, 0.3

    def predict(noised: T, time: T, condition: T) -> T:
        signal, amount = (x.view(-1, 1, 1, 1) for x in process.amounts(time))
        variance = signal**2 * spread**2 + amount**2
        image = centre + signal * spread**2 / variance * (noised - signal * centre)
        noise = (noised - signal * image) / amount.clamp(min=1e-12)
        return process.target_of(image, noise, time)

    signal, amount = process.amounts(torch.tensor(sample_times(process, 9)[0]))
    noise = seeded_noise(SHAPE, 0, 0).double()
    # the flow keeps the quantile of every value
    scale = (signal**2 * spread**2 + amount**2) ** 0.5
    exact = centre + spread * (noise - signal * centre) / scale

    def error(name: str, steps: int) -> float:
        picture = begun_picture(process, solver_of(name), steps, noise, torch.tensor(0))
        while picture.query is not None:
            advance_pictures([picture], predict)
        assert picture.image is not None
        return float((picture.image[0] - exact).norm())

    assert error(name, 40) < 0.8 * error(name, 10)
