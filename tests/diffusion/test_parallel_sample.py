"""Sampling tables with a diffusion transformer: what samplers compute on one device, and what options mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from weft.diffusion.denoiser import Denoiser
from weft.diffusion.parallel_sample import NamedTable, TableSampling, table_of_options
from weft.diffusion.sample import SampleRequest, sample, seeded_noise
from weft.diffusion.sampling_costs import SamplingDevice, bytes_between
from weft.diffusion.sampling_pictures import sampled_sizes
from weft.diffusion.sampling_plan import (
    chosen_table,
    exchange_seconds,
    exchanged_bytes,
    planned_tables,
)
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.models.diffusion_transformer import DiffusionTransformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.registry import names

T = torch.Tensor
CLASSES = torch.tensor([3, 0])


def denoiser(**settings: Any) -> Denoiser:
    """A small transformer whose gates are open, in float64."""
    size = {"size": (8, 6), "channels": 1, "classes": 5} | settings
    shape = ModelShape(
        kind="diffusion", layers=4, embed=16, heads=2, ffn=24, settings=size
    )
    model = parallelize(shape, Mesh.single(), Train(dtype="float64")).model
    assert isinstance(model, DiffusionTransformer)
    return Denoiser(open_gates(model.eval()))


def open_gates(model: DiffusionTransformer) -> DiffusionTransformer:
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        with torch.no_grad():
            values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(values * 0.25)
    return model


def by_table(
    word: str, ranks: int, frames: int = 0, guidance: float = 1.0, of: Denoiser | None = None, **how: Any
) -> T:  # fmt: skip
    request = SampleRequest(CLASSES, steps=3, guidance=guidance, seed=7, **how)
    of = of or denoiser()
    table = NamedTable(word, ranks)
    return TableSampling(of, request, table, frames, of.settings.classes).as_threads()


def on_one_device(guidance: float = 1.0, of: Denoiser | None = None, **how: Any) -> T:
    request = SampleRequest(CLASSES, steps=3, guidance=guidance, seed=7, **how)
    of = of or denoiser()

    def predict(noised: T, time: T, condition: T) -> T:
        return of(noised.double(), time, condition)

    def double_noise(*asked: Any) -> T:
        return seeded_noise(*asked).double()

    # tables begin in the model's type, and a sampler's first step is taken in that of its noise
    with patch("weft.diffusion.sample.seeded_noise", double_noise), torch.no_grad():
        return sample(predict, of.process, of.shape, request, of.settings.classes)


@pytest.mark.parametrize("sampler", names("sampler"))
@pytest.mark.parametrize(("word", "ranks"), [("exact", 2), ("exact", 4), ("pipefusion:age=0", 3)])  # fmt: skip
def test_fresh_keys_give_what_one_device_samples(sampler: str, word: str, ranks: int) -> None:  # fmt: skip
    got = by_table(word, ranks, guidance=2.5, sampler=sampler)
    expected = on_one_device(guidance=2.5, sampler=sampler)
    assert got.shape == expected.shape == (2, 1, 8, 6)
    torch.testing.assert_close(got, expected.double(), rtol=0, atol=1e-10)


def test_what_reaches_beyond_the_image_stays_nothing() -> None:
    """No patch divides these sizes; what a model says of the rest is no part of a sample."""
    for target in ("flow", "v"):
        odd = denoiser(size=(7, 5), target=target)
        whole = on_one_device(of=odd, guidance=2.5).double()
        for word, ranks in (("exact", 1), ("exact", 2), ("pipefusion:age=0", 2)):
            got = by_table(word, ranks, of=odd, guidance=2.5)
            torch.testing.assert_close(got, whole, rtol=0, atol=1e-10)


class SplitAnswer(NamedTuple):
    """On a rank its samples, the bytes that it has sent, and those of the formula."""

    images: T | None
    sent: int
    formula: float


def split_over_ranks(word: str, ranks: int) -> list[SplitAnswer]:
    import torch.distributed as dist

    out = []
    for steps in (1, 3):
        of = denoiser()
        request = SampleRequest(CLASSES, steps, "heun", 2.5, 7)
        table = NamedTable(word, ranks)
        sampling = TableSampling(of, request, table, 0, of.settings.classes, split=True)
        images = sampling.over_ranks()
        runnable, rank = sampling.runnable, dist.get_rank() % ranks
        sizes = sampled_sizes(sampling)
        keys = bytes_between(runnable, sizes) if ranks > 1 else {}
        sent = sum(n for (source, _), n in keys.items() if source == rank)
        last = [row for row in runnable.source.of_rank(rank) if row.layers.end == 4]
        tokens = sum(runnable.source.blocks[b] for row in last for b in row.queries)
        predicted = tokens * len(CLASSES) * of.settings.patch_values * 8
        out.append(SplitAnswer(images, sampling.bytes_sent, sent + predicted))
    return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("word", "ranks"), [("exact", 1), ("exact", 2), ("pipefusion:age=0", 2)])  # fmt: skip
def test_guidance_over_two_groups_is_that_of_one_device(
    pool: Any, word: str, ranks: int
) -> None:
    answers = pool.run(2 * ranks, split_over_ranks, word, ranks)
    for index, steps in enumerate((1, 3)):
        of = denoiser()
        request = SampleRequest(CLASSES, steps, "heun", 2.5, 7)
        whole = TableSampling(of, request, NamedTable("exact", 1), 0, 5).as_threads()
        first, *others = [answer[index] for answer in answers]
        torch.testing.assert_close(first.images, whole, rtol=0, atol=1e-10)
        assert all(other.images is None for other in others)
        for answer in (first, *others):
            assert answer.sent == answer.formula > 0


def test_guidance_of_one_is_not_split() -> None:
    of = denoiser()
    with pytest.raises(UsageError, match="--guidance 1 is none"):
        TableSampling(of, SampleRequest(CLASSES), NamedTable("exact", 1), 0, 5, True)


def test_a_plan_names_the_fastest_table_that_loses_little() -> None:
    """Exact tables lose nothing, what is impossible is last, with its reason, and bytes are those of the table."""
    request = SampleRequest(CLASSES, steps=4, seed=7)
    slow = SamplingDevice(
        1e9, 1e6, 1e-4
    )  # a link that takes longer than the computation
    words = (
        "exact",
        "distrifusion",
        "distrifusion:age=0",
        "pcpp:part=0",
        "pipefusion:patches=9",
    )
    plans = planned_tables(denoiser(), request, 2, slow, 0, words)
    by_word = {plan.word: plan for plan in plans}
    assert plans[-1].refused and "cannot be cut into 9" in plans[-1].refused
    assert by_word["exact"].error < 1e-10 > by_word["distrifusion:age=0"].error
    assert by_word["distrifusion"].seconds < by_word["exact"].seconds
    assert by_word["pcpp:part=0"].bytes < by_word["distrifusion"].bytes
    assert by_word["distrifusion"].synchronous == 1 and by_word["exact"].synchronous == 4  # fmt: skip
    least = chosen_table(plans, 0.0)
    assert least is None or least.error == 0
    assert chosen_table(plans, 1e9) is plans[0]


def test_a_plan_splits_guidance() -> None:
    """Halves of the ranks have halves of guidance; the bytes are those that two ranks send (test above)."""
    request = SampleRequest(CLASSES, steps=2, guidance=2.0, seed=7)
    plans = planned_tables(denoiser(), request, 2, SamplingDevice(1e9, 1e6), 0, ("exact",))  # fmt: skip
    split, whole = sorted(plans, key=lambda plan: not plan.split)
    assert split.split and not whole.split and split.error < 1e-10
    sampling = TableSampling(denoiser(), request, NamedTable("exact", 1), 0, 5, True)
    assert split.bytes == 2 * exchanged_bytes(sampling) > 0
    seconds = exchange_seconds(sampling, SamplingDevice(1e9, 1e6))
    assert seconds == pytest.approx(split.bytes / 2e6)
    # one device without half of guidance, but for the predictions that travel
    half = replace(request, guidance=1.0)
    alone = planned_tables(denoiser(), half, 1, SamplingDevice(1e9), 0, ("exact",))
    assert split.seconds == pytest.approx(alone[0].seconds + seconds)


VIDEO = {"size": (6, 4, 4), "positions": "rotary"}


def test_a_longer_video_by_clips_is_one_whose_keys_are_masked() -> None:
    """Frames beyond those of training have places of their own, and two ranks see what four do."""
    of = denoiser(**VIDEO)
    word = "video-infinity:padding=2,everywhere=2"
    two, four = (by_table(word, n, frames=12, of=of) for n in (2, 4))
    assert two.shape == (2, 1, 12, 4, 4)
    torch.testing.assert_close(two, four, rtol=0, atol=1e-10)


def test_a_queue_of_blocks_does_not_depend_on_ranks() -> None:
    of = denoiser(**VIDEO)
    word = "dualparal:frames=3,context=2"
    two, four = (by_table(word, n, frames=17, of=of) for n in (1, 2))
    torch.testing.assert_close(two, four, rtol=0, atol=1e-10)
    # a later sample has the noise of its number, whatever its batch
    later = SampleRequest(CLASSES[1:], steps=3, seed=7, first=1)
    alone = TableSampling(of, later, NamedTable(word, 1), 17).as_threads()
    torch.testing.assert_close(alone[0], two[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("word", "frames", "said"),
    [
        ("exact", 12, "computes 12 frames at once, and the model was trained on 6"),
        ("dualparal:frames=6,context=1", 13, "trained on 6"),
    ],
)
def test_what_the_model_has_never_seen_is_refused(word: str, frames: int, said: str) -> None:  # fmt: skip
    with pytest.raises(UsageError, match=said):
        by_table(word, 1, frames=frames, of=denoiser(**VIDEO))
    with pytest.raises(UsageError, match="--frames 12 is for models of videos"):
        by_table("exact", 1, frames=12)
    with pytest.raises(UsageError, match="rotary"):
        by_table(word, 1, frames=frames, of=denoiser(size=(6, 4, 4)))


@pytest.mark.parametrize(
    ("layout", "stale", "table", "named"),
    [
        ("", None, "", ("exact", 1)),
        ("cp=4", None, "", ("exact", 4)),
        ("cp=4", 0, "", ("exact", 4)),
        ("cp=4", 1, "", ("distrifusion:age=1", 4)),
        ("cp=2", 3, "", ("distrifusion:age=3", 2)),
        ("pp=4", None, "", ("pipefusion:age=0", 4)),
        ("pp=4", 1, "", ("pipefusion", 4)),
        ("cp=4", None, "pcpp:part=0.3", ("pcpp:part=0.3", 4)),
        ("pp=2", None, "dualparal", ("dualparal", 2)),
    ],
)
def test_options_name_a_table(
    layout: str, stale: int | None, table: str, named: tuple[str, int]
) -> None:
    assert table_of_options(Layout.parse(layout), stale, table) == named


@pytest.mark.parametrize(
    ("layout", "stale", "table", "said"),
    [
        ("cp=2,pp=2", None, "", "one of them"),
        ("tp=2", None, "", "one of them"),
        ("cp=2,dp=2", 1, "", "one of them"),
        ("cp=2", -1, "", "below 0"),
        ("pp=2", 2, "", "at most 1 step"),
        ("cp=2", 1, "pcpp:part=0.3", "--table pcpp:age=1"),
    ],
)
def test_options_that_name_none_are_one_line(
    layout: str, stale: int | None, table: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        table_of_options(Layout.parse(layout), stale, table)
    assert "\n" not in str(refused.value)
