"""SkipPipe: what paths must keep, and what skipping a quarter of the stages gains between two sites."""

from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.schedule.actions import Table, Value, assemble
from weft.schedule.build import builder_of
from weft.schedule.build.greedy import list_schedule
from weft.schedule.simulate import Costs, Simulation, simulate
from weft.schedule.skip import Holders, plan_paths, stage_lengths
from weft.schedule.times import EQUAL

RANKS = 8
HOLDERS = [[r] for r in range(RANKS)]

#: An 8B model on 8 ranks of 40 TFLOP/s: forward of 1B parameters on 4096 tokens; activations of width 4096 in bf16.
FORWARD = 2 * 1e9 * 4096 / 40e12  # s
ACTIVATIONS = 8 * 4096 * 4096 * 2  # bit


def two_sites(lengths: list[float], wan: float) -> Costs:
    """Ranks 0-3 and 4-7, 25 Gbit/s inside (0.06 of a forward), ``wan`` bit/s and 20 ms between; links are exclusive."""
    took = {"F": FORWARD, "I": FORWARD, "W": FORWARD, "B": 2 * FORWARD}

    def move(value: Value, source: int, target: int) -> float:
        return (
            ACTIVATIONS / 25e9 + 1e-4
            if source // 4 == target // 4
            else ACTIVATIONS / wan + 0.02
        )

    def size(value: Value) -> float:
        return lengths[value.stage] * (value.name in ("saved", "tape"))

    return Costs(lambda a: took[a.kind] * lengths[a.stage], move, size, exclusive=True)


def skip_pipe(
    holders: Holders, microbatches: int, ratio: float, costs: Costs, ranks: int, limit: float | None = None,
    split: bool = True,
) -> Table:  # fmt: skip
    """The table of a partial pipeline: planned paths, list-scheduled."""
    paths = plan_paths(holders, microbatches, ratio, costs, split=split)
    return list_schedule(
        "skip", holders, paths, costs, ranks=ranks, limit=limit, split=split
    )


def best_full(microbatches: int, wan: float, limit: float, split: bool) -> float:
    """Makespan of the fastest pipeline over all stages that stays below the limit, stages of equal length."""
    costs, paths = two_sites([1.0] * RANKS, wan), [range(RANKS)] * microbatches
    tables = [
        list_schedule(
            "full", HOLDERS, paths, costs, ranks=RANKS, limit=limit, split=split
        )
    ]
    for name in ("1f1b", *(("zb-h1", "zb-h2") if split else ())):
        orders = builder_of(name).orders(RANKS, microbatches, 1, EQUAL)
        tables.append(assemble("full", orders, RANKS, paths))
    ran = [simulate(table, costs) for table in tables]
    return min(s.makespan for s in ran if max(s.peaks) <= limit + 1e-6)


def partial(microbatches: int, wan: float, limit: float, split: bool) -> Simulation:
    lengths = stage_lengths(RANKS, 0.25)
    costs = two_sites(lengths, wan)
    table = skip_pipe(
        HOLDERS, microbatches, 0.25, costs, ranks=RANKS, limit=limit, split=split
    )
    return simulate(table, costs)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_paths(data: st.DataObject) -> None:
    stages, microbatches = data.draw(st.integers(4, 10)), data.draw(st.integers(1, 24))
    middle = range(1, stages - 1)
    ratio = data.draw(st.floats(0.0, len(middle) / stages / 1.5))
    speed = data.draw(
        st.lists(st.sampled_from([1.0, 1.5, 3.0]), min_size=stages, max_size=stages)
    )
    ranks = data.draw(st.integers(1, stages))
    holders = [[s % ranks] for s in range(stages)]
    costs = Costs(
        lambda a: speed[a.stage], lambda value, source, target: 0.3, exclusive=True
    )
    paths = plan_paths(holders, microbatches, ratio, costs)

    total = round(ratio * stages * microbatches)
    assert len(paths) == microbatches
    assert sum(stages - len(path) for path in paths) == total
    count = Counter(s for path in paths for s in path)
    mean = total / len(middle)  # skips of a stage
    for path in paths:
        assert len(set(path)) == len(path)
        # As many stages as every other microbatch, first and last ones in their places.
        assert stages - len(path) in (total // microbatches, ceil(total / microbatches))
        assert (path[0], path[-1]) == (0, stages - 1)
        # At most one pair of neighbours has changed places.
        moved = [
            i for i, (a, b) in enumerate(zip(path, sorted(path), strict=True)) if a != b
        ]
        assert not moved or (len(moved) == 2 and moved[1] == moved[0] + 1)
    for s in middle:
        assert int(0.5 * mean) <= microbatches - count[s] <= ceil(1.5 * mean + 1e-6)


def test_ratio_0_is_the_full_pipeline() -> None:
    costs = two_sites([1.0] * RANKS, 1e9)
    assert plan_paths(HOLDERS, 12, 0.0, costs) == [tuple(range(RANKS))] * 12
    full = list_schedule(
        "skip", HOLDERS, [tuple(range(RANKS))] * 12, costs, ranks=RANKS
    )
    assert skip_pipe(HOLDERS, 12, 0.0, costs, ranks=RANKS) == full
    assert stage_lengths(RANKS, 0.0) == [1.0] * RANKS


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("wan", [1e9, 0.5e9])
def test_a_quarter_skipped_is_a_third_faster(wan: float, split: bool) -> None:
    """Against the best full pipeline in the same memory, between sites whose link takes 1.4 or 2.7 forwards."""
    ran = partial(16, wan, 16.0, split)
    assert max(ran.peaks) <= 16.0 + 1e-6
    assert best_full(16, wan, 16.0, split) / ran.makespan >= 1.3


def test_the_profile_computes_as_much_on_every_rank() -> None:
    lengths = stage_lengths(RANKS, 0.25)
    assert sum(lengths) == pytest.approx(RANKS)
    ran = partial(24, 1e9, 16.0, True)
    assert max(ran.busy) == pytest.approx(min(ran.busy))
    assert max(ran.busy) == pytest.approx(24 * 3 * FORWARD * 8 / 11)


def test_slow_stages_are_skipped_more_often() -> None:
    slow = {2: 1.5, 5: 1.3}
    costs = Costs(
        lambda a: slow.get(a.stage, 1.0),
        lambda value, source, target: 0.05,
        exclusive=True,
    )
    count = Counter(s for path in plan_paths(HOLDERS, 24, 0.25, costs) for s in path)
    assert count[2] < count[5] < min(count[s] for s in (1, 3, 4, 6))
    # Still within the bounds: mean 1/3 skipped, at most half.
    assert min(count.values()) >= 12


@pytest.mark.slow
def test_the_same_microbatches_do_not_skip_the_same_stages() -> None:
    paths = plan_paths(HOLDERS, 24, 0.25, two_sites([1.0] * RANKS, 1e9))
    left_out = Counter(frozenset(range(RANKS)) - set(path) for path in paths)
    assert len(left_out) >= 3 and max(left_out.values()) <= 8
    assert paths == plan_paths(HOLDERS, 24, 0.25, two_sites([1.0] * RANKS, 1e9))


def test_a_stage_with_nodes_of_two_speeds() -> None:
    """Stages 1 and 2 have a slow and a fast node each; the fast ones take more, and both are used."""
    holders = [[0], [1, 2], [3, 4], [5], [6]]
    costs = Costs(
        lambda a: 2.0 if a.rank in (1, 3) else 1.0,
        lambda value, source, target: 0.1,
        exclusive=True,
    )
    table = skip_pipe(holders, 20, 0.2, costs, ranks=7)
    share = [sum(a.kind == "F" for a in actions) for actions in table.ranks]
    assert 0 < share[1] < share[2] and 0 < share[3] < share[4]


def test_too_much_skipping_is_refused() -> None:
    with pytest.raises(UsageError, match="skip at most 50%"):
        plan_paths(HOLDERS, 8, 0.75, Costs(lambda a: 1.0))
