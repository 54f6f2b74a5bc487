"""Every sampling table: what it computes, what travels, what it refuses, and how its errors fall."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.diffusion.standin import Euler, Standin, one_device, whole_noise
from weft.diffusion.coordinated_noise import CoordinatedNoise
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
from weft.diffusion.sampling_ranks import run_over_ranks
from weft.diffusion.sampling_run import SampleSource, SamplingRun
from weft.diffusion.sampling_table import (
    DenoisingRow,
    KeyBlock,
    LayerRange,
    SamplingShape,
    SamplingTable,
    SamplingTableError,
)
from weft.diffusion.threads_as_ranks import run_as_threads
from weft.errors import UsageError
from weft.registry import names

VALUES, BATCH, DOUBLE = 4, 2, 8
#: The stand-in's sizes, and a device whose layers all take equally long.
SIZES, EVEN = DenoiserSizes(8, 16, VALUES, BATCH, bytes=DOUBLE), SamplingDevice(1e9)
#: Every table, with settings that lose nothing.
LOSSLESS = {
    "exact": "exact",
    "distrifusion": "distrifusion:age=0",
    "pcpp": "pcpp:synchronous=99",
    "pipefusion": "pipefusion:age=0,patches=4",
    "video-infinity": "video-infinity:padding=16,everywhere=0",
    "dualparal": "dualparal:frames=16,context=0",
}


def sampled(
    word: str, shape: SamplingShape, threads: bool = True, **model: Any
) -> tuple[torch.Tensor, list[SamplingRun]]:
    """A sample by a table, and the measurements of its ranks: all, or this one's if it is a rank of a group."""
    runnable = sampling_table_of(word, shape)
    denoiser = Standin(layers=shape.layers, steps=shape.steps, **model)
    noise = whole_noise(0, BATCH, shape.units * shape.unit, VALUES)
    done: dict[int, torch.Tensor] = {}

    def of_block(block: int, first: int, end: int) -> torch.Tensor:
        place = runnable.source.places[block]
        return noise[:, place + first : place + end]

    source = SampleSource(BATCH, VALUES, torch.float64, of_block, done.__setitem__)
    sampler = Euler(shape.steps, momentum=0.3)
    if threads:
        runs = run_as_threads(runnable, lambda: denoiser, sampler, source)
    else:
        runs = [run_over_ranks(runnable, denoiser, sampler, source)]
    blocks = [done[block] for block in sorted(done)] or [torch.zeros(0)]
    return torch.cat(blocks, dim=1 if done else 0), runs


def on_one_device(shape: SamplingShape, **model: Any) -> torch.Tensor:
    denoiser = Standin(layers=shape.layers, steps=shape.steps, **model)
    noise = whole_noise(0, BATCH, shape.units * shape.unit, VALUES)
    return one_device(denoiser, Euler(shape.steps, momentum=0.3), noise)


def error(x: torch.Tensor, of: torch.Tensor) -> float:
    return float((x - of).norm() / of.norm())


def test_every_table_has_lossless_settings() -> None:
    # what makes larger images is compared in test_tiles.py
    assert LOSSLESS.keys() == {"exact", *names("sampling-table")} - {"asgdiffusion"}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("word", LOSSLESS.values())
def test_age_0_is_one_device(word: str, ranks: int) -> None:
    shape = SamplingShape(ranks, 3, 8, 16, 1)
    got, _ = sampled(word, shape)
    assert error(got, on_one_device(shape)) < 1e-10
    assert sampling_table_of(word, shape).source.exact()


def test_guided_batches_and_uneven_bands() -> None:
    shape = SamplingShape(3, 3, 4, 7, 3)
    for word in ("exact", "pipefusion:age=0,patches=5"):
        got, _ = sampled(word, shape, copies=2)
        assert error(got, on_one_device(shape, copies=2)) < 1e-10


def over_ranks(words: list[str], shape: SamplingShape) -> list[tuple[Any, SamplingRun]]:
    return [(x, runs[0]) for x, runs in (sampled(w, shape, threads=False) for w in words)]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "ranks",
    [
        2,
        pytest.param(4, marks=pytest.mark.slow(6)),
        pytest.param(8, marks=pytest.mark.slow(12)),
    ],
)
def test_processes_compute_what_threads_do(pool: Any, ranks: int) -> None:
    """Bit for bit, and they send the same bytes."""
    words = [*LOSSLESS.values(), "distrifusion", "pcpp", "pipefusion", "dualparal:frames=2,context=2",
             "video-infinity:padding=2,everywhere=3"]  # fmt: skip
    shape = SamplingShape(ranks, 3, max(ranks, 3), 16, 1)
    answers = pool.run(ranks, over_ranks, words, shape)
    for at, word in enumerate(words):
        expected, runs = sampled(word, shape)
        assert torch.equal(answers[0][at][0], expected), word
        sent = [answer[at][1].bytes_sent for answer in answers]
        assert sent == [run.bytes_sent for run in runs], word
        if word in LOSSLESS.values():
            assert error(expected, on_one_device(shape)) < 1e-10


# what travels ----------------------------------------------------------------------------------------------------

TOKENS, WIDTH, LAYERS, STEPS = 16, 8, 8, 6


def sent(word: str, ranks: int, units: int = TOKENS, steps: int = STEPS) -> int:
    shape = SamplingShape(ranks, steps, LAYERS, units, 1)
    return sum(run.bytes_sent for run in sampled(word, shape)[1])


def collected(ranks: int, units: int = TOKENS) -> int:
    """What rank 0 gets at the end, from ranks that each have a band."""
    return BATCH * units * VALUES * DOUBLE * (ranks - 1) // ranks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_keys_travel_as_the_formulas_say(ranks: int) -> None:
    keys = BATCH * 2 * WIDTH * DOUBLE  # of a token, in a layer
    whole = STEPS * LAYERS * (ranks - 1) * TOKENS * keys
    assert sent("exact", ranks) == whole + collected(ranks)
    for synchronous in (1, 3):
        word = f"distrifusion:synchronous={synchronous}"
        # a step's keys leave for the next; those of the last synchronous step serve both
        assert sent(word, ranks) == whole * (STEPS - 1) // STEPS + collected(ranks)
    # of each pair of neighbours half a band, both ways, in every step but the first, beside the first whole ones
    near = 2 * (ranks - 1) * (TOKENS // ranks // 2) * keys * LAYERS
    late = (STEPS - 1) * near
    assert sent("pcpp", ranks) == whole // STEPS + late + collected(ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("patches", [4, 8])
def test_activations_travel_once_per_stage(ranks: int, patches: int) -> None:
    """PipeFusion: tokens x width from stage to stage, and the latents from the last stage to the first."""
    activations = STEPS * (ranks - 1) * BATCH * TOKENS * WIDTH * DOUBLE
    latents = STEPS * BATCH * TOKENS * VALUES * DOUBLE
    word = f"pipefusion:patches={patches}"
    assert sent(word, ranks) == activations + latents
    assert sent(f"{word},age=0", ranks) == activations + latents


@pytest.mark.parametrize("clip", [8, 12])
def test_a_clip_gets_its_padding_and_what_all_see(clip: int) -> None:
    """Video-Infinity: at most twice the padding and the global frames per rank and layer, however many clips."""
    padding, everywhere = 2, 4
    shape = SamplingShape(4, STEPS, LAYERS, 4 * clip, 1)
    word = f"video-infinity:padding={padding},everywhere={everywhere}"
    table = sampling_table_of(word, shape).source
    keys = BATCH * 2 * WIDTH * DOUBLE
    # global frames 0, clip, 2 clip, 3 clip: each rank owns one; that of the next clip is padding as well
    foreign = [
        len({f for f in range(4 * clip) if f // clip != r and
             (f % clip == 0 or r * clip - padding <= f < (r + 1) * clip + padding)})
        for r in range(4)
    ]  # fmt: skip
    assert max(foreign) <= 2 * padding + everywhere
    total = sum(run.bytes_sent for run in sampled(word, shape)[1])
    assert total == sum(foreign) * keys * LAYERS * STEPS + collected(4, 4 * clip)
    assert not table.exact()


def test_dualparal_sends_activations_and_latents() -> None:
    """Keys stay; a block's activations, with those of its context, pass from stage to stage."""
    ranks, frames, context, count = 2, 2, 1, 4
    units = frames * count + context
    word = f"dualparal:frames={frames},context={context}"
    blocks = [frames + context, *[frames] * (count - 1)]
    tokens = sum(blocks) + context * (count - 1)  # with the context that joins
    activations = STEPS * (ranks - 1) * tokens * BATCH * WIDTH * DOUBLE
    # latents return to the first stage, or to rank 0 when they are done; context once more
    latents = STEPS * (sum(blocks) + context * (count - 1)) * BATCH * VALUES * DOUBLE
    assert sent(word, ranks, units) == activations + latents


@pytest.mark.parametrize(
    "word",
    [
        "exact",
        "distrifusion",
        "pcpp",
        "pipefusion",
        "video-infinity:padding=2,everywhere=3",
        "dualparal:frames=5,context=1",
    ],
)
def test_planned_bytes_are_those_that_travel(word: str) -> None:
    shape = SamplingShape(4, 3, 4, 16, 2, True)
    planned = bytes_between(sampling_table_of(word, shape), SIZES)
    by_rank = [sum(n for (source, _), n in planned.items() if source == r) for r in range(4)]  # fmt: skip
    assert by_rank == [run.bytes_sent for run in sampled(word, shape)[1]]


# what is counted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("synchronous", [1, 2, 5])
def test_synchronous_steps_are_as_many_as_said(synchronous: int) -> None:
    """The first age is that of step ``synchronous``: not one earlier, not one later."""
    for name in ("distrifusion", "pcpp", "pipefusion"):
        word = f"{name}:synchronous={synchronous}"
        table = sampling_table_of(word, SamplingShape(4, 8, 4, 8, 1)).source
        old = {r.step for r in table.rows if any(k.age for k in r.keys)}
        assert old == set(range(synchronous, 8))
        assert table.synchronous() == synchronous


def test_ages_reach_no_further_back_than_the_first_step() -> None:
    table = sampling_table_of("distrifusion:age=3", SamplingShape(2, 6, 1, 4, 1)).source
    assert [max(k.age for k in r.keys) for r in table.of_rank(0)] == [0, 1, 2, 3, 3, 3]


def test_samples_do_not_depend_on_ranks() -> None:
    """Of a table that cuts the layers, or looks at frames: every number of ranks computes the same sample."""
    words = (
        "pipefusion:patches=4",
        "dualparal:frames=3,context=1",
        "video-infinity:padding=2,everywhere=3",
    )
    for word in words:
        samples = [sampled(word, SamplingShape(n, 3, 4, 16, 1))[0] for n in (1, 2, 4)]
        assert max(error(x, samples[0]) for x in samples[1:]) < 1e-10, word


# DualParal -------------------------------------------------------------------------------------------------------


def queue(count: int, ranks: int = 1, steps: int = 4) -> tuple[torch.Tensor, list[SamplingRun]]:  # fmt: skip
    shape = SamplingShape(ranks, steps, 4, 2 * count + 1, 2, True)
    return sampled("dualparal:frames=2,context=1", shape)


def test_without_context_every_block_is_alone() -> None:
    """With positions of its own, any block is its stand-alone sample, for any number of ranks."""
    for ranks in (1, 2, 4):
        shape = SamplingShape(ranks, 3, 4, 6, 2, True)
        got, _ = sampled("dualparal:frames=2,context=0", shape)
        noise = whole_noise(0, BATCH, 12, VALUES)
        for at in range(0, 12, 4):
            denoiser, sampler = Standin(layers=4, steps=3), Euler(3, momentum=0.3)
            places = torch.arange(at, at + 4)
            alone = one_device(denoiser, sampler, noise[:, at : at + 4], places)
            assert error(got[:, at : at + 4], alone) < 1e-10


def test_memory_of_a_queue_does_not_grow_with_its_length() -> None:
    """At most as many blocks as steps are under way. Of a table without a queue, memory grows."""
    for ranks in (1, 2):
        short, long = (queue(n, ranks)[1] for n in (8, 24))
        assert [r.peak_bytes for r in long] == [r.peak_bytes for r in short]
    whole = [
        max(r.peak_bytes for r in sampled("pipefusion", SamplingShape(2, 4, 4, n, 2))[1])
        for n in (17, 49)
    ]  # fmt: skip
    assert whole[1] > 2 * whole[0]


@pytest.mark.parametrize("steps", [3, 5])
def test_the_first_block_is_there_after_as_many_iterations_as_steps(steps: int) -> None:
    """Iteration i has i + 1 blocks, until the first one leaves; then one block leaves in every iteration."""
    order = queue(8, 1, steps=steps)[1][0].order
    assert [block for block, _ in order] == list(range(8))
    updates = [before for _, before in order]
    assert updates[0] == steps * (steps + 1) // 2
    assert updates[1] == updates[0] + steps


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_queue_keeps_all_stages_busy(ranks: int) -> None:
    """Between start and end no stage waits: utilisation is at least that of min(T, B) microbatches and N stages."""
    steps, count = 6, 12
    shape = SamplingShape(ranks, steps, ranks, 2 * count + 1, 1, True)
    table = sampling_table_of("dualparal:frames=2,context=1", shape)
    used = simulated_sampling(table, SIZES, EVEN).busy
    full = min(steps, count)
    whole = simulated_sampling(table, SIZES, EVEN).elapsed
    assert sum(used) / len(used) / whole >= full / (full + ranks - 1)


def test_an_uneven_video_is_refused() -> None:
    shape = SamplingShape(2, 4, 4, 10, 2, True)
    with pytest.raises(UsageError, match="take 9 frames"):
        sampling_table_of("dualparal:frames=3,context=3", shape)
    with pytest.raises(UsageError, match="longer than a block"):
        sampling_table_of("dualparal:frames=3,context=4", shape)


def test_coordinated_noise_is_gaussian_and_does_not_depend_on_ranks() -> None:
    """A block and the context before it hold each frame of the template once; blocks of one video differ."""
    noise = CoordinatedNoise(
        seed=3, samples=(0, 1), first=5, frames=3, context=2, shape=(4, 6)
    )
    blocks = [noise.block(b) for b in range(6)]
    again = CoordinatedNoise(
        seed=3, samples=(0, 1), first=5, frames=3, context=2, shape=(4, 6)
    )
    assert torch.equal(again.block(4), blocks[4])  # whatever was asked for before
    template = blocks[0].sum(1)
    for before, block in pairwise(blocks):
        together = torch.cat([before[:, -2:], block], 1)
        assert error(together.sum(1), template) < 1e-10
    assert not torch.equal(blocks[1], blocks[2])
    assert not torch.equal(blocks[1][0], blocks[1][1])
    other = CoordinatedNoise(
        seed=4, samples=(0, 1), first=5, frames=3, context=2, shape=(4, 6)
    )
    assert not torch.equal(other.block(4), blocks[4])


# errors of age and of missing context ----------------------------------------------------------------------------


def lost(word: str, steps: int, ranks: int = 4) -> float:
    shape = SamplingShape(ranks, steps, 3, 8, 1)
    return error(sampled(word, shape)[0], on_one_device(shape))


def test_age_is_forgiven_by_steps_and_missing_context_is_not() -> None:
    old = [lost("distrifusion", steps) for steps in (10, 50)]
    assert old[0] / old[1] >= 2.8 and old[1] < 0.1
    for word in ("pcpp", "pcpp:part=0"):
        missing = [lost(word, steps) for steps in (10, 50)]
        assert missing[0] / missing[1] < 1.5 and missing[1] > 2 * old[1]


def test_fresher_keys_and_more_synchronous_steps_lose_less() -> None:
    losses = [lost(f"distrifusion:synchronous={n}", 10) for n in (1, 3, 6, 10)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 1e-10
    assert lost("pipefusion", 10, 3) < lost("distrifusion", 10, 3)
    assert lost("distrifusion", 10) < lost("distrifusion:age=2", 10)


# video -----------------------------------------------------------------------------------------------------------


def windowed_reference(
    frames: int, tokens: int, padding: int, everywhere: int
) -> torch.Tensor:
    """One device with one mask: no zeros beyond the ends, no frame twice."""
    shape = SamplingShape(1, 3, 4, frames, tokens, True)
    sampler = Euler(3, momentum=0.3)
    frame = torch.arange(frames * tokens) // tokens
    near = (frame[:, None] - frame[None]).abs() <= padding
    spread = torch.tensor([f * frames // everywhere for f in range(everywhere)])
    mask = near | torch.isin(frame, spread)[None]

    class Masked(Standin):
        def layer(self, index: int, hidden: Any, prepared: Any, attend: Any) -> Any:
            def inside(q: Any, k: Any, v: Any) -> Any:
                scores = (q @ k.mT / self.head_dim**0.5).masked_fill(~mask, -torch.inf)
                return scores.softmax(-1) @ v

            return super().layer(index, hidden, prepared, inside)

    masked = Masked(layers=4, steps=3)
    return one_device(
        masked, sampler, whole_noise(0, BATCH, shape.units * tokens, VALUES)
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("padding", "everywhere"), [(1, 0), (2, 3), (0, 4), (3, 12)])
def test_clips_are_one_masked_attention(ranks: int, padding: int, everywhere: int) -> None:  # fmt: skip
    word = f"video-infinity:padding={padding},everywhere={everywhere}"
    got, _ = sampled(word, SamplingShape(ranks, 3, 4, 12, 2, True))
    assert error(got, windowed_reference(12, 2, padding, everywhere)) < 1e-10


# what is refused -------------------------------------------------------------------------------------------------


def small_table(**change: Any) -> SamplingTable:
    table = sampling_table_of("distrifusion", SamplingShape(2, 3, 2, 4, 1)).source
    return replace(table, **change)


ROW = DenoisingRow(1, 0, LayerRange(0, 2), (0,), (KeyBlock(0, 0, 2), KeyBlock(1, 0, 2, 1)))  # fmt: skip


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (ROW._replace(keys=(*ROW.keys, KeyBlock(1, 1, 2))), "counts token 1 of block 1 twice"),
        (ROW._replace(keys=(*ROW.keys, KeyBlock(1, 1, 2, 0, True))), "counts token 1 of block 1 twice"),
        (ROW._replace(keys=(KeyBlock(0, 0, 2), KeyBlock(1, 0, 2, 2))), "before the first step"),
        (ROW._replace(keys=(KeyBlock(0, 0, 2), KeyBlock(1, 0, 2, -1))), "is of a later step"),
        (ROW._replace(keys=(KeyBlock(0, 0, 1), KeyBlock(1, 0, 2))), "all fresh keys of its own block 0"),
        (ROW._replace(keys=(KeyBlock(0, 0, 2, 1),)), "all fresh keys of its own block 0"),
        (ROW._replace(keys=(KeyBlock(0, 0, 2), KeyBlock(1, 0, 3))), "does not exist"),
        (ROW._replace(rank=1), "stay|updated on ranks"),
        (ROW._replace(rank=2), "none of 2 ranks"),
        (ROW._replace(layers=LayerRange(0, 1)), "layer 1 of block 0 in step 1 is computed by no row"),
        (ROW._replace(layers=LayerRange(0, 3)), "none of 2 layers"),
        (ROW._replace(queries=(1,)), "all fresh keys of its own block 1"),
        (ROW._replace(step=0, keys=(KeyBlock(0, 0, 2),)), "computed twice"),
        (ROW._replace(queries=(0, 5)), "beyond the table's 2"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(row: DenoisingRow, said: str) -> None:
    rows = [row if (r.step, r.rank) == (1, 0) else r for r in small_table().rows]
    with pytest.raises(SamplingTableError, match=said) as refused:
        validate_sampling(small_table(rows=tuple(rows)))
    assert "\n" not in str(refused.value)


def test_rows_that_wait_for_each_other_are_named() -> None:
    """Fresh keys of a patch that the stage computes later can never come."""
    table = sampling_table_of("pipefusion", SamplingShape(2, 2, 2, 4, 1)).source
    fresh = tuple(
        row._replace(keys=tuple(k._replace(age=0) for k in row.keys))
        for row in table.rows
    )
    with pytest.raises(SamplingTableError, match="computes later"):
        RunnableTable(replace(table, rows=fresh))


@pytest.mark.parametrize(
    ("word", "shape", "said"),
    [
        (
            "distrifusion",
            SamplingShape(4, 2, 2, 3, 1),
            "3 rows of patches cannot be cut into 4 blocks",
        ),
        (
            "video-infinity",
            SamplingShape(4, 2, 2, 3, 1, True),
            "3 frames cannot be cut into 4 blocks",
        ),
        (
            "pipefusion",
            SamplingShape(4, 2, 2, 8, 1),
            "2 layers cannot be cut into 4 stages",
        ),
        ("pipefusion:patch=2", SamplingShape(2, 2, 2, 8, 1), "patch"),
        ("distrifusion:age=x", SamplingShape(2, 2, 2, 8, 1), "age"),
        ("distrifusion:age", SamplingShape(2, 2, 2, 8, 1), "key=value"),
        ("distrifusing", SamplingShape(2, 2, 2, 8, 1), "did you mean 'distrifusion'"),
        ("exact:age=1", SamplingShape(2, 2, 2, 8, 1), "exact has no settings"),
    ],
)
def test_what_no_table_can_do_is_one_line(word: str, shape: SamplingShape, said: str) -> None:  # fmt: skip
    with pytest.raises(UsageError, match=said) as refused:
        sampling_table_of(word, shape)
    assert "\n" not in str(refused.value)


def test_kinds_are_apart_from_those_of_training() -> None:
    """Both may be imported by one process, as the planner does."""
    import weft.diffusion.sampling_actions as sampling
    import weft.schedule.vocab as vocab

    kinds = [sampling.N, sampling.E, sampling.K, sampling.A, sampling.U, sampling.O]
    assert len(set(kinds)) == 6 and vocab.E not in kinds
