"""Mixtures: shares that move, to within one sample of their integral, and what weighting does in place of sampling."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.label_factors import source_factor
from weft.data.mix_plan import MixFacts, describe_mix, leg_of, mixture_of
from weft.data.order import Order, Stream, hash_keys
from weft.data.order_inverse import sample_of_row, samples_drawn
from weft.errors import UsageError
from weft.recipe import Data


def rows_of(count: int, first: int = 0) -> Stream:
    """A stream of ``count`` rows of 4 tokens, which are all different."""
    return Stream(
        np.arange(first, first + count * 4, dtype=np.uint32),
        np.arange(count) * 4,
        np.full(count, 4),
        4,
        first,
        "one",
    )


def facts(*rows: int, **change: Any) -> MixFacts:
    names = "abcdef"[: len(rows)]
    known = MixFacts([*names], [1.0] * len(rows), [4 * r for r in rows], rows, 4, 400)
    return known._replace(**change)


def section(mix: str, sources: int = 3, **change: Any) -> Data:
    named = [{"kind": "text", "path": name} for name in "abcdef"[:sources]]
    return Data(sources=named, mix=mix, **change)


def order_of(data: Data, known: MixFacts) -> Order:
    """The order of a mixture, from its description as a checkpoint keeps it."""
    about = json.loads(json.dumps(describe_mix(data, known)))
    leg = leg_of(0, [0] * len(known.names), about)
    streams = tuple(rows_of(count, 1000 * i) for i, count in enumerate(known.rows))
    return Order(streams, tuple(known.weights), 0, legs=(leg,))


def integral(points: list[tuple[int, list[float]]], to: int, linear: bool) -> Any:
    """The integral of a schedule's shares by a plain sum over samples; ``points``: their first samples and weights."""
    at = np.arange(to) + 0.5
    edges = [sample for sample, _ in points]
    shares = np.array([np.array(w) / sum(w) for _, w in points])
    if linear:
        moved = [np.interp(at, edges, column) for column in shares.T]
        return np.array([column.sum() for column in moved])
    return shares[np.searchsorted(edges, at, "right") - 1].sum(0)


weight = st.sampled_from([0.0, 0.0, 0.001, 0.3, 1.0, 7.0])
weights = st.lists(weight, min_size=4, max_size=4).filter(lambda w: sum(w) > 0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(weights, min_size=1, max_size=5),
    st.lists(st.integers(1, 90), min_size=4, max_size=4, unique=True),
    st.booleans(),
)
def test_a_schedule_is_kept_to_within_one_sample(
    points: list[list[float]], moments: list[int], linear: bool
) -> None:
    """At the end of each block every source has given the integral of its share, though shares may be 0 for a while."""
    steps = [0, *sorted(moments)][: len(points)]
    schedule = [{"at": s, "weights": w} for s, w in zip(steps, points, strict=True)]
    data = section(
        "schedule",
        4,
        mix_schedule=schedule,
        mix_between="linear" if linear else "stepped",
    )
    known = facts(9, 9, 9, 9, batch=16, steps=100)
    plan = order_of(data, known).legs[0].plan
    drawn = np.array([plan.drawn(blocks) for blocks in range(30)])
    samples = [(16 * s, w) for s, w in zip(steps, points, strict=True)]
    wanted = [integral(samples, blocks * plan.block, linear) for blocks in range(30)]
    assert np.abs(drawn - wanted).max() < 1 + 1e-6
    assert (np.diff(drawn, axis=0) >= 0).all()
    assert (drawn.sum(1) == plan.block * np.arange(30)).all()


def test_an_order_is_a_pure_function_of_the_sample() -> None:
    schedule = [{"at": 0, "weights": [1, 0, 2]}, {"at": 0.7, "weights": [0, 3, 1]}]
    data = section("schedule", mix_schedule=schedule)
    forwards, backwards = (order_of(data, facts(20, 7, 3)) for _ in range(2))
    samples = range(1600)
    there = [forwards.locate(i) for i in samples]
    assert there == [backwards.locate(i) for i in reversed(samples)][::-1]
    assert there[700:703] == [(1, 162), (1, 163), (1, 164)]  # checkpoints rely on it
    for source in range(3):  # every row of a source in turn, none twice
        indices = sorted(index for which, index in there if which == source)
        assert indices == [*range(len(indices))]
    counted = np.bincount([source for source, _ in there[:777]], minlength=3)
    assert samples_drawn(forwards, 777) == counted.tolist()
    assert [sample_of_row(forwards, *place) for place in there] == [*samples]


def test_temperature_falls_from_alike_to_by_size() -> None:
    data = section(
        "temperature",
        2,
        mix_temperature=5.0,
        mix_final_temperature=1.0,
        mix_cooldown=[100, 0.75],
    )
    about = describe_mix(data, facts(500, 10))
    mixture = mixture_of(about)
    first, last = mixture.shares(0, 100), mixture.shares(1300, 1301)
    assert first[0] / first[1] == pytest.approx(50 ** (1 / 5))
    assert last[0] / last[1] == pytest.approx(50)
    middle = mixture.shares(799, 801)  # of the cool-down from sample 400 to 1,200
    assert middle[0] / middle[1] == pytest.approx(50 ** (1 / 3))


def test_temperature_one_is_by_size_and_infinity_is_alike() -> None:
    known = facts(30, 10, weights=[1.0, 2.0])
    by_size = mixture_of(
        describe_mix(section("temperature", 2, mix_temperature=1), known)
    )
    alike = mixture_of(
        describe_mix(section("temperature", 2, mix_temperature=1e9), known)
    )
    assert by_size.shares(0, 1) == pytest.approx([0.6, 0.4])
    assert alike.shares(0, 1) == pytest.approx([1 / 3, 2 / 3])


def test_static_has_no_legs_and_samples_as_ever() -> None:
    """The static order with legs, as it is after a resume, is the plain one sample by sample."""
    plain = Order((rows_of(9), rows_of(5)), (3.0, 1.0), 7)
    about = describe_mix(section("static", 2), facts(9, 5, weights=[3.0, 1.0]))
    same = Order(plain.streams, plain.weights, 7, legs=(leg_of(0, [0, 0], about),))
    assert [plain.locate(i) for i in range(1500)] == [
        same.locate(i) for i in range(1500)
    ]


def test_weighting_weighs_by_share_over_size() -> None:
    """All rows come equally often, and labels of a source weigh its share divided by its size."""
    data = section("static", 2, mix_by="weighting")
    order = order_of(data, facts(30, 10))
    located = [order.locate(i)[0] for i in range(1024)]
    assert np.bincount(located).tolist() == [768, 256]
    for sample in range(8):
        source = order.locate(sample)[0]
        row = order.row(sample)
        assert row.weights is not None and row.weights.dtype == np.float64
        assert row.weights.tolist() == [0.5 / (0.75, 0.25)[source]] * 4


def test_full_batches_have_equal_gradients_by_sampling_and_by_weighting() -> None:
    """The mean over a whole number of epochs of each source is the same to 1e-12 (Li et al. 2025)."""
    rng = np.random.default_rng(0)
    of_row = [rng.normal(size=(30, 5)), rng.normal(size=(10, 5))]

    def mean(data: Data, samples: int) -> np.ndarray:
        order = order_of(data, facts(30, 10, weights=[1.0, 1.0]))
        total, weight = np.zeros(5), 0.0
        for sample in range(samples):
            source, index = order.locate(sample)
            weights = order.row(sample).weights
            factor = 1.0 if weights is None else float(weights[0])
            total += factor * of_row[source][index % len(of_row[source])]
            weight += factor
        return total / weight

    sampled = mean(section("static", 2), 1024 * 15)  # 256 and 768 epochs
    weighed = mean(section("static", 2, mix_by="weighting"), 1024 * 5)
    assert np.abs(sampled - weighed).max() < 1e-12


def test_weighting_is_noisier_by_the_published_formula() -> None:
    """Variances of a gradient's estimate: (sum p m - g^2) / B against (sum p w m - g^2) / B, within 5 percent."""
    rng = np.random.default_rng(1)
    rows, batch = (98_000, 2000), 32
    gradients = [rng.normal(0.3, 1, rows[0]), rng.normal(-0.2, 2, rows[1])]
    moments = np.array([np.mean(own**2) for own in gradients])
    mean = float(np.mean([own.mean() for own in gradients]))
    weigh = 0.5 / np.array([0.98, 0.02])
    formula = (np.mean(weigh * moments) - mean**2) / (np.mean(moments) - mean**2)

    def variance(**change: Any) -> float:
        """Of the mean over a batch, measured over many batches of the order."""
        order = order_of(section("static", 2, **change), facts(*rows))
        leg, each = order.legs[0], []
        factors = np.array([source_factor(leg, 0, source) for source in range(2)])
        for block in range(800):
            source, index = order.block_samples(0, block)
            drawn = hash_keys(5, index)  # as rows are shuffled in every epoch
            values = [own[drawn % np.uint64(len(own))] for own in gradients]
            each.append(factors[source] * np.where(source == 0, *values))
        return float(np.concatenate(each).reshape(-1, batch).mean(1).var())

    measured = variance(mix_by="weighting") / variance()
    assert measured == pytest.approx(formula, rel=0.05) and formula > 10


@pytest.mark.parametrize(
    ("mix", "change", "line"),
    [
        ("schedule", {}, "has no weights"),
        ("schedule", {"mix_schedule": [{"at": 3, "weights": [1, 1, 1]}]}, "has a gap"),
        (
            "schedule",
            {"mix_schedule": [{"at": 0, "weights": [1, 1]}]},
            "2 weights for 3",
        ),
        ("schedule", {"mix_schedule": [{"at": 0, "weights": [0, 0, 0]}]}, "above it"),
        ("schedule", {"mix_schedule": [{"at": 0, "weights": [2, -1, 0]}]}, "below 0"),
        ("schedule", {"mix_schedule": [{"at": 0, "weights": {"d": 1}}]}, "called 'd'"),
        (
            "schedule",
            {"mix_schedule": [{"at": a, "weights": [1, 1, 1]} for a in (0, 9, 5)]},
            "at = 5 does not come after",
        ),
        (
            "schedule",
            {"mix_schedule": [{"at": a, "weights": [1, 1, 1]} for a in (0, 1.5)]},
            "above 1",
        ),
        (
            "temperature",
            {"mix_final_temperature": 1.0, "mix_cooldown": [50, 50]},
            "ends before it begins",
        ),
    ],
)
def test_what_cannot_be_mixed(mix: str, change: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line) as raised:
        describe_mix(section(mix, **change), facts(4, 4, 4))
    assert "\n" not in str(raised.value) and str(raised.value).startswith("data.mix")
