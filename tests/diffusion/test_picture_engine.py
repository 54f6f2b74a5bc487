"""Pictures at different steps in one batch are what each is alone, whoever joins or leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.test_diffusion_transformer import model_of
from weft.diffusion.class_words import class_names, class_number
from weft.diffusion.denoiser import Denoiser
from weft.diffusion.picture_engine import (
    PictureAsk,
    PictureEngine,
    check_guidance,
    prompt_condition,
)
from weft.diffusion.sample import SampleRequest, sample
from weft.errors import UsageError

#: Images of all kinds: class, steps, sampler, guidance, seed, number. Class 3 is none.
ASKS = [
    PictureAsk(torch.tensor(0), 5, "euler", 1.0, 3, 0),
    PictureAsk(torch.tensor(1), 2, "heun", 2.5, 3, 1),
    PictureAsk(torch.tensor(2), 4, "unipc", 1.0, 8, 0),
    PictureAsk(torch.tensor(3), 1, "euler", 0.0, 8, 4),
    PictureAsk(torch.tensor(1), 6, "dpm-solver", 4.0, 2**40, 2),
]


def alone(denoiser: Denoiser, ask: PictureAsk) -> torch.Tensor:
    request = SampleRequest(
        ask.condition[None], ask.steps, ask.sampler, ask.guidance, ask.seed, ask.number
    )
    (image,) = sample(denoiser, denoiser.process, denoiser.shape, request, 3)
    return image


@pytest.mark.parametrize(
    ("kind", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-6)]
)
def test_pictures_that_join_at_any_step_are_what_they_are_alone(
    kind: torch.dtype, limit: float
) -> None:
    denoiser = Denoiser(model_of().to(kind))
    engine, jobs = PictureEngine(denoiser, 3), []
    sizes = []
    for ask in ASKS:
        jobs += engine.submit([ask])
        engine.step()
        sizes.append(len(engine.running))
    while not engine.idle:
        assert len(engine.running) <= 3
        engine.step()
    assert max(sizes) == 3, "some waited"
    for ask, job in zip(ASKS, jobs, strict=True):
        assert job.image is not None
        whole = alone(denoiser, ask)
        torch.testing.assert_close(
            job.image.to(whole.dtype), whole, rtol=0, atol=limit * whole.abs().max()
        )
    # Euler and the multistep samplers predict once a step, Heun's method twice but in the last; guidance doubles
    assert engine.evaluations == 5 + 2 * 3 + 4 + 2 * 1 + 2 * 6


def test_who_leaves_is_not_computed_and_changes_nobody() -> None:
    denoiser = Denoiser(model_of())
    engine = PictureEngine(denoiser, 2)
    first, second, third = (engine.submit([ask])[0] for ask in ASKS[:3])
    engine.step()
    engine.cancel([first, third])
    assert engine.running == [second] and not engine.waiting
    while not engine.idle:
        engine.step()
    assert first.image is None and third.image is None and second.image is not None
    torch.testing.assert_close(
        second.image, alone(denoiser, ASKS[1]), rtol=0, atol=1e-10
    )
    assert engine.evaluations == 1 + 2 * 3


@pytest.mark.parametrize(
    ("word", "number"), [("dark", 0), ("LIGHT ", 1), ("7", 2), ("0", 0), ("none", 3)]
)
def test_classes_have_names_and_numbers(word: str, number: int) -> None:
    assert class_number(word, 3, ("dark", "light", "7")) == number


def test_words_that_name_no_class_are_refused() -> None:
    for word in ("3", "darker", "-1", "9" * 5000, "²"):
        with pytest.raises(UsageError, match="classes are dark, light, 7, and none"):
            class_number(word, 3, ("dark", "light", "7"))
    with pytest.raises(UsageError, match="classes are 0 to 2, and none"):
        class_number("dark", 3)
    with pytest.raises(UsageError, match="knows none"):
        class_number("0", 0)
    many = [f"class {i}" for i in range(30)]
    with pytest.raises(UsageError, match="did you mean 'class 12'"):
        class_number("klass 12", 30, many)
    for broken in (b"{", b'["a"]', b"7"):
        assert class_names({"classes.json": broken}, 3) == ()


@pytest.mark.parametrize(
    ("settings", "guidance", "said"),
    [
        ({}, -1, "below 0"),
        ({"drop": 0.0}, 2, "settings.drop = 0"),
        ({"classes": 0}, 2, "neither classes nor texts"),
    ],
)
def test_guidance_that_means_nothing_is_refused(
    settings: dict[str, Any], guidance: float, said: str
) -> None:
    denoiser = Denoiser(model_of(**settings))
    check_guidance(denoiser, 1)
    with pytest.raises(UsageError, match=said):
        check_guidance(denoiser, guidance)


def test_a_prompt_is_a_caption_for_a_model_that_reads_texts() -> None:
    denoiser = Denoiser(model_of(classes=0, text=8, words=2))
    seven, eight, nothing = (prompt_condition(denoiser, p) for p in ("a seven", "a eight", ""))  # fmt: skip
    assert torch.equal(seven[0], eight[0]) and not torch.equal(seven[1], eight[1])
    assert not nothing.any()
    with pytest.raises(UsageError, match="has 3 words, and this model reads 2"):
        prompt_condition(denoiser, "a bold seven")
