"""Every builder gives a legal table for any size, and the bubble and the peak that its paper states."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from weft.errors import UsageError
from weft.schedule.actions import Action
from weft.schedule.build import Times, build, builders
from weft.schedule.build.greedy import TAPE
from weft.schedule.simulate import Costs, Simulation, simulate, uniform_costs

EQUAL = Times()
UNEQUAL = Times(1.0, 1.2, 0.8, 0.1)


def clock(
    name: str,
    ranks: int,
    microbatches: int,
    virtual: int | None = None,
    times: Times = EQUAL,
    aware: bool = True,
) -> Simulation:
    table = build(name, ranks, microbatches, virtual, times if aware else EQUAL)
    return simulate(table, uniform_costs(table, times))


def bubble(
    name: str, ranks: int, microbatches: int, virtual: int | None = None
) -> float:
    """Idle time with F = I = W = 1."""
    return clock(name, ranks, microbatches, virtual).makespan - 3 * microbatches


SIZES = [
    (name, ranks, virtual)
    for name, builder in builders().items()
    for ranks in (1, 2, 3, 4, 8)
    for virtual in ((1, 2, 3) if builder.free else (None,))
    if not (builder.twice and ranks % 2)
]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("name", "ranks", "virtual"), SIZES)
def test_every_size_is_legal(name: str, ranks: int, virtual: int | None) -> None:
    counts = {
        1,
        2,
        3,
        5,
        8,
        11,
        ranks - 1,
        ranks,
        2 * ranks - 1,
        2 * ranks,
        3 * ranks,
    } - {0}
    builder = builders()[name]
    chunks = virtual or builder.chunks
    for microbatches in sorted(counts):
        for times in (EQUAL, UNEQUAL)[: 1 + (name[0] in "zv" and microbatches == 11)]:
            table = build(name, ranks, microbatches, virtual, times)
            result = simulate(table, uniform_costs(table))  # raises if it blocks
            kinds = Counter(a.key for a in table)
            assert max(kinds.values()) == 1
            for stage in range(table.stages):
                for m in range(microbatches):
                    assert kinds["F", stage, m] == 1
                    backward = tuple(kinds[k, stage, m] for k in "BIW")
                    assert backward == (1, 0, 0) or (
                        builder.splits and backward == (0, 1, 1)
                    )
            assert len(result.timeline) == ranks
            for a in table:
                where = (
                    a.stage % ranks
                    if builder.free
                    else min(a.stage, 2 * ranks - 1 - a.stage)
                )
                if builder.twice and a.microbatch >= (microbatches + 1) // 2:
                    where = ranks - 1 - a.stage
                assert a.rank == where
            assert table.stages == (ranks if builder.twice else ranks * chunks)


#: How far the closed form of a bubble may be off at unequal times, as a share of the step; others are exact.
ROUGH = {
    "zb-1p": 0.05, "zb-2p": 0.09, "zb-v": 0.03, "v-half": 0.02, "v-min": 0.05, "dualpipe": 0.01, "dualpipe-v": 0.02
}  # fmt: skip


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", builders())
def test_closed_forms_agree_with_the_simulator(name: str) -> None:
    """Bubble and activations held, as the builder states them, on a grid of sizes, chunks and times."""
    builder = builders()[name]
    for ranks, rounds in ((2, 2), (3, 4), (4, 3), (5, 2), (8, 2)):
        if (builder.twice and ranks % 2) or (name in ("zb-1p", "zb-2p") and ranks > 4):
            continue
        m = rounds * ranks
        for times in (
            EQUAL,
            Times(1.0, 1.2, 0.8),
            Times(1.0, 1.0, 0.5),
            Times(0.8, 1.3, 1.0),
        ):
            if name in ("v-half", "v-min") and times != EQUAL and ranks < 4:
                # there is more room between so few blocks than the form knows of
                continue
            for chunks in (1, 2, 4) if builder.free else (builder.chunks,):
                result = clock(name, ranks, m, chunks if builder.free else None, times)
                step = m * (times.forward + times.backward)
                rough = 0.0 if times == EQUAL else ROUGH.get(name, 0.0)
                found = step + builder.bubble(ranks, m, chunks, times)
                assert found == pytest.approx(result.makespan, rel=rough + 1e-9), (
                    name,
                    ranks,
                    chunks,
                    times,
                )
                if name == "zb-2p":  # whose limit counts tapes as less
                    costs = Costs(
                        lambda a: 1.0,
                        size=lambda value: {"saved": 1.0, "tape": TAPE}.get(
                            value.name, 0.0
                        ),
                    )
                    result = simulate(build(name, ranks, m, times=times), costs)
                    assert (
                        2 * ranks - 0.7
                        <= max(result.peaks)
                        <= builder.in_flight(ranks, 1, 0) + 1e-9
                    )
                    continue
                held = [
                    min(m, builder.in_flight(ranks, chunks, r)) for r in range(ranks)
                ]
                assert max(held) == pytest.approx(
                    max(result.peaks), abs=0.55 * (name == "v-min")
                )
                assert all(
                    bound >= peak - 1e-9
                    for bound, peak in zip(held, result.peaks, strict=True)
                )
                if name in (
                    "gpipe",
                    "1f1b",
                    "interleaved-1f1b",
                    "breadth-first",
                    "zb-h1",
                    "zb-h2",
                ):
                    assert held == pytest.approx(list(result.peaks))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_closed_forms_hold_for_few_microbatches(name: str) -> None:
    for ranks, m in ((4, 1), (4, 2), (8, 3), (8, 8), (8, 11)):
        for times in (
            EQUAL,
            Times(1.0, 1.2, 0.8),
            Times(1.0, 1.0, 0.5),
            Times(0.8, 1.3, 1.0),
        ):
            found = m * (times.forward + times.backward) + builders()[name].bubble(
                ranks, m, 1, times
            )
            assert found == pytest.approx(
                clock(name, ranks, m, times=times).makespan
            ), (ranks, m, times)


def test_closed_forms_take_arrays() -> None:
    """A planner asks for all its layouts at once."""
    ranks, chunks = np.array([2, 4, 8]), np.array([2, 2, 4])
    for builder in builders().values():
        bubbles = builder.bubble(ranks, 4 * ranks, chunks, UNEQUAL) + 0 * ranks
        held = np.minimum(4 * ranks, builder.in_flight(ranks, chunks, 0))
        for i, (p, v) in enumerate(zip(ranks, chunks, strict=True)):
            assert bubbles[i] == pytest.approx(
                builder.bubble(int(p), 4 * int(p), int(v), UNEQUAL)
            )
            assert held[i] == pytest.approx(
                min(4 * p, builder.in_flight(int(p), int(v), 0))
            )


#: What the papers state at F = I = W = 1: bubble and peak of ``p`` ranks.
STATED = {
    "gpipe": lambda p, m: (3 * (p - 1), m),
    "1f1b": lambda p, m: (3 * (p - 1), p),
    "interleaved-1f1b": lambda p, m: (1.5 * (p - 1), p + (p - 1) / 2),
    "breadth-first": lambda p, m: (1.5 * (p - 1), m),
    "zb-h1": lambda p, m: (p - 1, p),
    "zb-h2": lambda p, m: (0, 2 * p - 1),
    "zb-v": lambda p, m: (0, p),
    # 1F1B's 3 (p - 1), halved; its peak p, halved, plus 1 or 3/2.
    "v-half": lambda p, m: (
        1.5 * p - (4 if p % 2 else 3) if p > 2 else 0.5,
        (p + 3) / 2 if p % 2 else p / 2 + 1,
    ),
    # Two thirds of 1F1B's bubble is 2 (p - 1); a third of its peak, plus at most 4/3.
    "v-min": lambda p, m: (2 * p - 2.5, (p + 4) / 3),
    "dualpipe": lambda p, m: (p / 2 - 1, p + 1),
    "dualpipe-v": lambda p, m: ((p - 1) / 2, p + 0.5),
}


@pytest.mark.parametrize("name", STATED)
def test_closed_forms_are_those_of_the_papers(name: str) -> None:
    builder = builders()[name]
    for p in (2, 3, 4, 8, 9):
        found = (
            builder.bubble(p, 3 * p, builder.chunks, EQUAL),
            min(3 * p, builder.in_flight(p, builder.chunks, 0)),
        )
        assert found == pytest.approx(STATED[name](p, 3 * p)), p


@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_interleaving_divides_the_bubble(virtual: int) -> None:
    result = clock("interleaved-1f1b", 4, 12, virtual)
    assert result.makespan - 36 == pytest.approx(9 / virtual)
    assert max(result.peaks) == pytest.approx(
        4 * (1 + 3 / (4 * virtual)) if virtual > 1 else 7
    )
    assert bubble("breadth-first", 4, 12, virtual) == pytest.approx(9 / virtual)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("dualpipe", 4), ("dualpipe", 8), ("dualpipe-v", 2), ("dualpipe-v", 4)],
)
def test_deepseeks_bubble_when_a_pair_is_one_action(name: str, ranks: int) -> None:
    """(PP/2 - 1)(F&B + B - 3W), exact for F = I: a fused pair hands on both results at its end."""
    table = build(name, ranks, 4 * ranks)
    chunk = table.stages / ranks
    forward, back_input, weight = 1.0, 1.0, 0.75
    alone = {"F": forward, "I": back_input, "W": weight, "B": back_input + weight}
    pairs = [
        (a, b)
        for actions in table.ranks
        for a, b in pairwise(actions)
        if (a.kind, b.kind) == ("F", "B")
    ]
    first, second = {a for a, _ in pairs}, {b for _, b in pairs}

    def compute(action: Action) -> float:
        pair = alone["F"] + alone["B"]
        return (
            pair if action in first else 0.0 if action in second else alone[action.kind]
        ) / chunk

    formula = (
        (table.stages // 2 - 1)
        * ((forward + alone["B"]) + alone["B"] - 3 * weight)
        / chunk
    )
    assert simulate(table, Costs(compute)).makespan - 4 * ranks * 2.75 == pytest.approx(
        formula
    )


def test_one_forward_one_backward_with_few_microbatches() -> None:
    result = clock("1f1b", 8, 3)
    assert result.peaks == (3, 3, 3, 3, 3, 3, 2, 1)
    assert result.elapsed == pytest.approx(3 * (8 - 1) + 3 * 3)


#: (m, F, I, W, move, 1F1B, interleaved, its chunks, ZB-H1, ZB-H2) with 8 ranks: 2401.10241, tables 4, 5 and 9.
PUBLISHED = [
    (24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1055, 3, 0.1585, 0.1083),
    (32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.0818, 3, 0.1242, 0.0837),
    (64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0443, 3, 0.0674, 0.0444),
    (24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.0808, 4, 0.1323, 0.0698),
    (32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.0628, 4, 0.1045, 0.0559),
    (64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0320, 4, 0.0554, 0.0294),
]


@pytest.mark.parametrize("row", PUBLISHED)
def test_published_bubbles(row: tuple[float, ...]) -> None:
    m, *measured, plain, interleaved, chunks, h1, h2 = row
    times = Times(*measured)
    for name, rate in (("1f1b", plain), ("zb-h1", h1), ("zb-h2", h2)):
        assert clock(name, 8, int(m), times=times).bubble_rate == pytest.approx(
            rate, abs=6e-5
        ), name
    # A chunk is one layer.
    result = clock("interleaved-1f1b", 8, int(m), int(chunks), times)
    assert result.bubble_rate == pytest.approx(interleaved, abs=1e-4)


#: 2401.10241, table 8: 6.2B on 16 ranks. Its times are not stated; W / (F + I + W) = 0.2515 and move / (F + I + W) =
#: 0.0209 follow from its figures for ZB-H1, ZB-H2 and 1F1B, which are linear in them.
def test_published_bubbles_on_16_ranks() -> None:
    times = Times(0.376, 0.3725, 0.2515, 0.0209)
    rates = (
        ("1f1b", 0.2668, 1e-3),
        ("zb-h1", 0.1536, 1e-3),
        ("zb-h2", 0.0823, 1e-3),
        ("zb-v", 0.0697, 4e-3),
    )
    for name, rate, within in rates:
        assert clock(name, 16, 48, times=times).bubble_rate == pytest.approx(
            rate, abs=within
        ), name


def test_unequal_times_keep_the_ranking_and_the_peaks() -> None:
    names = ("zb-v", "zb-h1", "v-half", "1f1b")
    results = [clock(name, 8, 24, times=UNEQUAL) for name in names]
    assert [r.makespan for r in results] == sorted(r.makespan for r in results)
    assert [max(r.peaks) for r in results] == [8, 8, 5, 8]
    # Knowing the times pays: the same schedule built for equal ones is no better.
    for name in ("zb-v", "v-half"):
        assert (
            clock(name, 8, 24, times=UNEQUAL).makespan
            <= clock(name, 8, 24, times=UNEQUAL, aware=False).makespan
        )


def test_tables_do_not_depend_on_luck() -> None:
    for name in builders():
        assert build(name, 4, 9, times=UNEQUAL) == build(name, 4, 9, times=UNEQUAL)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("zb-h3", 4, 8), "did you mean 'zb-h"),
        (("1f1b", 0, 8), "at least 1 rank, got 0"),
        (("1f1b", 4, 0), "at least 1 microbatch, got 0"),
        (("dualpipe", 3, 8), "even number of ranks, got 3"),
        (("zb-v", 4, 8, 3), "2 chunk.* per rank, not 3.*interleaved-1f1b"),
        (("1f1b", 4, 8, 2), "1 chunk.* per rank, not 2"),
        (("interleaved-1f1b", 4, 8, 0), "at least 1 chunk per rank, got 0"),
    ],
)
def test_requests_that_cannot_be_met(
    arguments: tuple[str, int, int], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        build(*arguments)
