"""The repetition-aware law: exact cases, recovery of planted parameters, and what cannot be fitted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from weft.curation.repetition_fit import PoolRun, check_runs, fit_repetition_law
from weft.curation.repetition_law import (
    PoolUtility,
    RepetitionLaw,
    best_pools,
    epoch_ends,
    pool_choices,
)
from weft.errors import WeftError


def law_of(*pools: PoolUtility, scale: float = 1.0, floor: float = 0.3):
    return RepetitionLaw(
        scale, floor, 1.0, {f"pool{i}": pool for i, pool in enumerate(pools)}
    )


@pytest.mark.parametrize("samples", [0.5, 1, 7.25, 64])
def test_without_decay_repeated_samples_are_new_ones(samples: float):
    law = law_of(PoolUtility(-0.1, math.inf, 1.0))
    assert law.loss(["pool0"], samples) == pytest.approx(samples**-0.1 + 0.3, abs=1e-12)


def test_floor_does_not_shrink_with_epochs():
    """The published code multiplies it from the second epoch on, and gets 0.604 for 64 epochs of these 128 samples."""
    law = law_of(PoolUtility(-0.1, math.inf, 128.0))
    assert law.loss(["pool0"], 64 * 128) == pytest.approx(0.706, abs=5e-4)
    assert pytest.approx(0.604, abs=5e-4) == (128**-0.1 + 0.3) * 64**-0.1


def test_only_first_epoch_counts_when_half_life_is_nothing():
    law = law_of(PoolUtility(-0.2, 0.0, 10.0))
    assert law.loss(["pool0"], 95) == pytest.approx(law.loss(["pool0"], 10), abs=1e-12)
    assert law.loss(["pool0"], 5) > law.loss(["pool0"], 10)


def test_copies_of_a_pool_are_a_pool_of_their_size_without_decay():
    pool = PoolUtility(-0.2, math.inf, 10.0)
    both = law_of(pool, pool).loss(["pool0", "pool1"], 55)
    assert both == pytest.approx(
        law_of(replace(pool, size=20)).loss(["pool0"], 55), abs=1e-12
    )


def test_two_equal_pools_follow_the_formula_of_the_paper():
    law = law_of(
        PoolUtility(-0.3, 2.0, 4.0), PoolUtility(-0.1, 5.0, 4.0), scale=2.0, floor=1.0
    )
    product = 2.0
    for epoch, (before, after) in enumerate([(1, 4), (4, 8), (8, 10)]):
        exponent = (
            -0.3 * 0.5 ** (epoch / (2 * 2.0)) - 0.1 * 0.5 ** (epoch / (2 * 5.0))
        ) / 2
        product *= (after / before) ** exponent
    assert law.loss(["pool0", "pool1"], 10) == pytest.approx(product + 1.0, abs=1e-12)


def test_ends_of_epochs():
    assert epoch_ends(10, 4).tolist() == [4, 8, 10]
    assert epoch_ends(8, 4).tolist() == [4, 8]
    assert epoch_ends(3, 4).tolist() == [3]


def test_more_pools_are_chosen_the_longer_the_training():
    law = law_of(
        PoolUtility(-0.30, 1.0, 10.0),
        PoolUtility(-0.25, 1.0, 10.0),
        PoolUtility(-0.05, 1.0, 10.0),
    )
    chosen = [len(best_pools(law, samples).pools) for samples in (10, 100, 3000)]
    assert chosen[0] == 1 and chosen == sorted(chosen) and chosen[-1] > 1
    choices = pool_choices(law, 60)
    assert [choice.epochs for choice in choices] == [6, 3, 2]
    assert choices[1].pools == ("pool0", "pool1")


def planted_runs(law: RepetitionLaw, noise: float, seed: int) -> list[PoolRun]:
    """Runs of 1 to 16 epochs on each pool of four sizes, with a relative error of the loss."""
    random, runs = np.random.default_rng(seed), []
    for name, pool in law.pools.items():
        for size in (30.0, 300.0, 3000.0, 30000.0):
            alone = replace(law, pools={name: replace(pool, size=size)})
            for epochs in (1, 2, 3, 4, 6, 8, 12, 16):
                loss = alone.loss([name], size * epochs)
                runs.append(
                    PoolRun(
                        name,
                        size * epochs,
                        epochs,
                        loss * (1 + random.normal(0, noise)),
                    )
                )
    return runs


PLANTED = RepetitionLaw(
    1.0,
    0.3,
    1.0,
    {
        "clean": PoolUtility(-0.25, 3.0, 30000.0),
        "noisy": PoolUtility(-0.15, 6.0, 30000.0),
    },
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unit", [1.0, None])
def test_planted_parameters_are_recovered(unit: float | None, seed: int):
    fitted = fit_repetition_law(planted_runs(PLANTED, 0.01, seed), unit, resamples=0)
    for name, pool in PLANTED.pools.items():
        assert fitted.law.pools[name].exponent == pytest.approx(pool.exponent, rel=0.1)
        assert fitted.law.pools[name].half_life == pytest.approx(
            pool.half_life, rel=0.2
        )
    assert fitted.noise == pytest.approx(0.01, rel=0.3)


def test_exact_losses_are_fitted_exactly():
    fitted = fit_repetition_law(planted_runs(PLANTED, 0.0, 0), 1.0, resamples=0)
    assert fitted.law.floor == pytest.approx(0.3, rel=1e-3)
    assert fitted.law.pools["clean"].half_life == pytest.approx(3.0, rel=1e-3)


def test_intervals_hold_the_truth_and_narrow_with_the_noise():
    widths = []
    for noise in (0.002, 0.02):
        fitted = fit_repetition_law(planted_runs(PLANTED, noise, 5), 1.0, resamples=20)
        low, high = fitted.loss_interval(["clean"], 60000)
        assert low < PLANTED.loss(["clean"], 60000) < high
        widths.append(high - low)
    assert widths[0] < widths[1] / 3


def test_sizes_are_replaced_in_all_laws():
    fitted = fit_repetition_law(planted_runs(PLANTED, 0.01, 0), 1.0, resamples=2)
    larger = fitted.with_sizes({"clean": 1e9})
    assert all(
        law.pools["clean"].size == 1e9 for law in (larger.law, *larger.resampled)
    )
    with pytest.raises(WeftError, match="no run of pool 'dirty'"):
        fitted.with_sizes({"dirty": 1e9})


def runs_of(name: str, losses: list[float]) -> list[PoolRun]:
    return [
        PoolRun(name, 100.0 * epochs, epochs, loss)
        for epochs, loss in enumerate(losses, 1)
    ]


FALLING = [3.0, 2.5, 2.3, 2.2]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([], "no run in the table"),
        (runs_of("a", FALLING), "of one pool, 'a'"),
        (runs_of("a", FALLING) + runs_of("b", [3.0, 2.9]), "'b' has 2 runs; three"),
        (runs_of("a", FALLING) + runs_of("b", [3.0, 2.9, 3.1]), "'b' rises from 3 at 1"),
        (runs_of("a", FALLING[:3]) + runs_of("b", FALLING[:3]), "6 runs cannot decide"),
        (
            runs_of("a", FALLING) + [PoolRun("b", n, n / 1e3, 5 - n / 1e3) for n in (10, 20, 30, 40)],
            "more than one epoch",
        ),
        (runs_of("a", FALLING) + runs_of("b", [3.0, -1.0, 2.0]), "above 0"),
        (runs_of("a", FALLING) + runs_of("b", [3.0, math.nan, 2.0]), "above 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_fitted_is_said_in_a_line(runs: list[PoolRun], said: str):
    with pytest.raises(WeftError, match=said) as error:
        check_runs(runs)
    assert "\n" not in str(error.value)
