"""Tiles of a larger image (ASGDiffusion): equal to one device, what travels, how age is forgiven, what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.diffusion.standin import Euler, Standin
from tests.diffusion.test_parallel_sample import CLASSES, denoiser
from weft.diffusion.parallel_sample import NamedTable, TableSampling
from weft.diffusion.sample import SampleRequest, seeded_noise
from weft.diffusion.sampling_check import (
    RunnableTable,
    sampling_table_of,
    validate_sampling,
)
from weft.diffusion.sampling_costs import (
    DenoiserSizes,
    SamplingDevice,
    bytes_between,
    simulated_sampling,
)
from weft.diffusion.sampling_plan import planned_tables
from weft.diffusion.sampling_ranks import run_over_ranks
from weft.diffusion.sampling_run import SampleSource, SamplingRun
from weft.diffusion.sampling_table import (
    GuideBlock,
    SamplingShape,
    SamplingTable,
    SamplingTableError,
)
from weft.diffusion.threads_as_ranks import run_as_threads
from weft.diffusion.tile_mix import TileMix
from weft.errors import UsageError

T = torch.Tensor
VALUES, BATCH, DOUBLE, SIDE = 4, 2, 8, 4
SIZES = DenoiserSizes(8, 16, VALUES, BATCH, bytes=DOUBLE)


class Tiling(NamedTuple):
    """Settings of tiles, as a table's word and as the reference below reads them."""

    scale: int = 2
    overlap: int = 0
    weight: float = 0.7
    structure: float = 0.5

    def word(self, **more: int) -> str:
        return "asgdiffusion:" + ",".join(f"{k}={v}" for k, v in (self._asdict() | more).items())  # fmt: skip


OVERLAPPED = Tiling(overlap=2)


def pixels_of_noise(scale: int) -> T:
    draw = torch.Generator().manual_seed(0)
    size = (BATCH, VALUES, scale * SIDE, scale * SIDE)
    return torch.randn(size, generator=draw, dtype=torch.float64)


def predicted(of: Standin, small: T, step: int) -> T:
    """The prediction for an image of the model's size, ``[samples, channels, height, width]``."""
    prepared = of.prepare(torch.arange(SIDE**2), step)
    x = of.embed(small.flatten(2).mT, prepared)
    for layer in range(of.layers):
        x = of.layer(layer, x, prepared, F.scaled_dot_product_attention)
    return of.final(x, prepared).mT.unflatten(2, (SIDE, SIDE))


def guided_loop(tiling: Tiling, steps: int) -> T:
    """The method as anyone would write it: whole images, no tables, a tile after the other."""
    scale, large = tiling.scale, tiling.scale * SIDE
    of, sampler = Standin(steps=steps), Euler(steps, momentum=0.3)
    memory: dict[str, Any] = {}
    z = pixels_of_noise(scale)
    starts = range(0, large - tiling.overlap, SIDE - tiling.overlap)
    for step in range(steps):
        total, counts = torch.zeros_like(z), torch.zeros_like(z)
        for top in starts:
            for left in starts:
                here = (..., slice(top, top + SIDE), slice(left, left + SIDE))
                total[here] += predicted(of, z[here], step)
                counts[here] += 1
        v = total / counts
        if step < round(tiling.structure * steps):
            moved = predicted(of, z[..., ::scale, ::scale], step) - v[..., ::scale, ::scale]  # fmt: skip
            v = v + tiling.weight * F.interpolate(moved, scale_factor=scale)
        z = sampler.update(z, v, step, memory)
    return z


def tiled(
    word: str, ranks: int, steps: int, threads: bool = True
) -> tuple[T, list[SamplingRun], RunnableTable]:
    runnable = sampling_table_of(word, SamplingShape(ranks, steps, 3, SIDE, SIDE))
    assert runnable.source.tiles is not None
    mix = TileMix(runnable.source.tiles, VALUES, 1)
    noise, done = pixels_of_noise(runnable.source.tiles.scale), dict[int, T]()

    def of_tile(tile: int, first: int, end: int) -> T:
        return mix.cut(noise, tile)[:, first:end]

    source = SampleSource(BATCH, VALUES, torch.float64, of_tile, done.__setitem__)
    of, sampler = Standin(steps=steps), Euler(steps, momentum=0.3)
    if threads:
        runs = run_as_threads(runnable, lambda: of, sampler, source)
    else:
        runs = [run_over_ranks(runnable, of, sampler, source)]
    return mix.joined(done) if done else torch.zeros(0), runs, runnable


def error(x: T, of: T) -> float:
    return float((x - of).norm() / of.norm())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tiling", [Tiling(), OVERLAPPED, Tiling(weight=0), Tiling(structure=1)])  # fmt: skip
def test_age_0_is_the_loop_on_one_device(tiling: Tiling, ranks: int) -> None:
    got, _, runnable = tiled(tiling.word(age=0), ranks, 4)
    torch.testing.assert_close(got, guided_loop(tiling, 4), rtol=0, atol=1e-10)
    assert runnable.source.exact()
    # what this would not see if guidance and overlap changed nothing
    assert error(got, guided_loop(tiling._replace(weight=0.3), 4)) > 1e-3
    assert tiling.overlap == 0 or error(got, guided_loop(Tiling(), 4)) > 1e-3


def test_one_tile_is_the_model_alone() -> None:
    """Of scale 1 the small image is the tile, so that guidance changes nothing."""
    for ranks in (1, 2):
        got = tiled("asgdiffusion:scale=1,age=0", ranks, 4)[0]
        alone = guided_loop(Tiling(1, 0, 0), 4)
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-10)


def processes(ranks: int, age: int) -> tuple[T, int]:
    got, runs, _ = tiled(OVERLAPPED.word(age=age), ranks, 4, threads=False)
    return got, runs[0].bytes_sent


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow(6))])
def test_processes_compute_what_threads_do(pool: Any, ranks: int) -> None:
    """Bit for bit, and they send the same bytes, which are those of the plan."""
    for age in (0, 1):
        answers = pool.run(ranks, processes, ranks, age)
        expected, runs, runnable = tiled(OVERLAPPED.word(age=age), ranks, 4)
        assert torch.equal(answers[0][0], expected)
        sent = [run.bytes_sent for run in runs]
        assert [answer[1] for answer in answers] == sent
        planned = bytes_between(runnable, SIZES)
        assert sent == [sum(n for (source, _), n in planned.items() if source == r) for r in range(ranks)]  # fmt: skip


@pytest.mark.parametrize("age", [0, 1])
@pytest.mark.parametrize("structure", [0.5, 1.0])
def test_what_travels_is_the_formula(age: int, structure: float) -> None:
    """On five ranks, of which one has the small image: latents to it, its prediction to all, and tiles at the end."""
    steps, piece = 6, SIDE**2 * VALUES * BATCH * DOUBLE
    runs = tiled(Tiling(structure=structure).word(age=age), 5, steps)[1]
    # the last prediction would be read one step later, when no step is guided
    small = round(structure * steps) - age
    # of noise each rank makes what it needs
    latents, predictions, finished = 4 * (small - 1), 4 * small, 4
    assert sum(run.bytes_sent for run in runs) == piece * (latents + predictions + finished)  # fmt: skip
    assert runs[0].bytes_sent == piece * predictions
    # each tile's prediction to the rank of each of the others that share tokens with it
    shared = tiled(Tiling(overlap=2, weight=0).word(age=age), 9, steps)[1]
    pairs = 2 * (12 + 8)
    assert sum(run.bytes_sent for run in shared) == piece * ((steps - age) * pairs + 8)


@pytest.mark.parametrize("synchronous", [1, 2, 5])
def test_synchronous_steps_are_as_many_as_said(synchronous: int) -> None:
    word = OVERLAPPED.word(structure=1, synchronous=synchronous)
    table = sampling_table_of(word, SamplingShape(4, 8, 2, SIDE, SIDE)).source
    old = {row.step for row in table.rows if any(g.age for g in row.guides)}
    assert old == set(range(synchronous, 8)) and table.synchronous() == synchronous


def test_age_is_forgiven_by_steps_and_no_rank_waits() -> None:
    lost = [error(tiled(Tiling().word(), 1, n)[0], guided_loop(Tiling(), n)) for n in (6, 24)]  # fmt: skip
    assert lost[0] / lost[1] > 2.4 and lost[1] < 0.05
    seconds = [
        simulated_sampling(tiled(Tiling().word(age=age), 5, 10)[2], SIZES, SamplingDevice(1e9, 1e7)).elapsed
        for age in (0, 1)
    ]  # fmt: skip
    assert seconds[0] > 1.25 * seconds[1]


def test_a_transformer_makes_larger_images() -> None:
    """With a real model, guidance by class, patches of several pixels and noise by the number of the sample."""
    of, steps = denoiser(size=(8, 8)), 3
    request = SampleRequest(CLASSES, steps, guidance=2.5, seed=7)
    word = "asgdiffusion:overlap=2,age=0,structure=1"
    got = [TableSampling(of, request, NamedTable(word, n), 0, 5).as_threads() for n in (1, 4)]  # fmt: skip
    z = torch.stack([seeded_noise((1, 16, 16), 7, i) for i in range(2)]).double()

    def guided(x: T, step: int) -> T:
        time = torch.full((2,), step / steps, dtype=torch.float64)
        with torch.no_grad():
            known, none = of(x, time, CLASSES), of(x, time, torch.full_like(CLASSES, 5))
        return none + 2.5 * (known - none)

    for step in range(steps):
        total, counts = torch.zeros_like(z), torch.zeros_like(z)
        for top in (0, 4, 8):
            for left in (0, 4, 8):
                here = (..., slice(top, top + 8), slice(left, left + 8))
                total[here] += guided(z[here], step)
                counts[here] += 1
        v = total / counts
        moved = guided(z[..., ::2, ::2], step) - v[..., ::2, ::2]
        z = z + (v + F.interpolate(moved, scale_factor=2)) / steps
    for image in got:
        torch.testing.assert_close(image, z, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("word", "ranks", "said"),
    [
        ("asgdiffusion:overlap=1", 2, "overlap of 1; take an overlap of 0 or 2 or 3$"),
        ("asgdiffusion:overlap=4", 2, "overlap of 4; take"),
        ("asgdiffusion", 6, "work for at most 5 ranks"),
        ("asgdiffusion:weight=2", 2, "weight"),
        ("asgdiffusion:scale=3", 2, "begins at pixel 0, 8 of the large image"),
        ("asgdiffusion:tile=3", 2, "tile"),
    ],
)
def test_tiles_that_cannot_be_are_one_line(word: str, ranks: int, said: str) -> None:
    request = SampleRequest(CLASSES, 3)
    with pytest.raises(UsageError, match=said) as refused:
        TableSampling(denoiser(size=(8, 8)), request, NamedTable(word, ranks))
    assert "\n" not in str(refused.value)


def test_models_whose_images_are_no_tiles_are_refused() -> None:
    request, table = SampleRequest(CLASSES, 3), NamedTable("asgdiffusion", 1)
    with pytest.raises(UsageError, match="7 x 8 pixels are no whole patches of 2 x 2"):
        TableSampling(denoiser(size=(7, 8)), request, table)
    with pytest.raises(UsageError, match="this model makes videos"):
        TableSampling(denoiser(size=(6, 4, 4)), request, table)
    of, both = denoiser(size=(8, 8)), ("exact", "asgdiffusion")
    plans = planned_tables(of, request, 2, SamplingDevice(1e9), 0, both)
    assert plans[-1].refused == "makes other images, of 16 x 16 pixels; ask for it by name"  # fmt: skip


def with_guides(*guides: GuideBlock) -> SamplingTable:
    """A table in which tile 1 has these guides in step 2."""
    shape = SamplingShape(2, 4, 1, SIDE, SIDE)
    table = sampling_table_of(Tiling().word(), shape).source
    rows = [
        row._replace(guides=guides) if (row.step, row.queries) == (2, (1,)) else row
        for row in table.rows
    ]
    return replace(table, rows=tuple(rows))


@pytest.mark.parametrize(
    ("guides", "said"),
    [
        ([GuideBlock(4, 0)], "guided by block 4 of step 2, which no row predicts; add a row"),
        ([GuideBlock(4, -1)], "of step 3, which no row predicts"),
        ([GuideBlock(7, 1)], "block 7 of step 1, which no row predicts"),
        ([GuideBlock(4, 3)], "of step -1, which no row predicts"),
        ([GuideBlock(0, 1)], "shares no tokens with it"),
        ([GuideBlock(4, 2), GuideBlock(4, 2)], "guided by a block twice"),
        ([GuideBlock(1, 1)], "or by itself"),
    ],
)  # fmt: skip
def test_a_guide_that_is_none_is_named(guides: list[GuideBlock], said: str) -> None:
    validate_sampling(with_guides(GuideBlock(4, 2)))
    with pytest.raises(SamplingTableError, match=said) as refused:
        validate_sampling(with_guides(*guides))
    assert "\n" not in str(refused.value)


def test_rows_without_tiles_have_no_guides() -> None:
    table = sampling_table_of("exact", SamplingShape(2, 2, 1, SIDE, SIDE)).source
    rows = tuple(row._replace(guides=(GuideBlock(0),)) for row in table.rows)
    with pytest.raises(SamplingTableError, match="the table has no tiles"):
        validate_sampling(replace(table, rows=rows))
