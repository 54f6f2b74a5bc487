"""The list scheduler: legal, within memory, never worse than no pipeline; and the published zero-bubble figures."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.schedule.actions import ScheduleError, Table, Value, assemble
from weft.schedule.build import build, builder_of
from weft.schedule.build.greedy import TAPE, list_schedule
from weft.schedule.simulate import Costs, simulate
from weft.schedule.times import Times

#: 2401.10241, tables 4, 5 and 9, 8 ranks: microbatches; ms of F, B, W and move; bubble rate of ZB-1p and of ZB-2p.
PUBLISHED = [
    (24, 18.522, 18.086, 9.337, 0.601, 0.1585, 0.0433),
    (32, 18.513, 18.086, 9.331, 0.626, 0.1242, 0.0039),
    (64, 18.546, 18.097, 9.321, 0.762, 0.0674, 0.0026),
    (24, 29.718, 29.444, 19.927, 0.527, 0.1323, 0.0029),
    (32, 29.802, 29.428, 19.530, 0.577, 0.1045, 0.0022),
    (64, 29.935, 29.621, 19.388, 0.535, 0.0554, 0.0010),
]

Holders = Sequence[Sequence[int]]
Paths = Sequence[Sequence[int]]


def one_by_one(holders: Holders, paths: Paths, ranks: int, split: bool) -> Table:
    """No pipeline: a microbatch starts when the one before it has ended (on the first holder of every stage)."""
    orders: list[list[tuple[str, int, int]]] = [[] for _ in range(ranks)]
    for m, path in enumerate(paths):
        for s in path:
            orders[holders[s][0]].append(("F", s, m))
        for s in reversed(path):
            orders[holders[s][0]] += [(kind, s, m) for kind in ("IW" if split else "B")]
    return assemble("one by one", orders, len(holders), paths)


def complete(table: Table, split: bool) -> None:
    """Every stage of every path has its forward and backward once, all on one rank."""
    backward = ("I", "W") if split else ("B",)
    count = Counter(a.key for a in table)
    assert count == Counter(
        (k, s, m)
        for m, path in enumerate(table.paths)
        for s in path
        for k in ("F", *backward)
    )
    where: dict[tuple[int, int], int] = {}
    assert all(
        where.setdefault((a.stage, a.microbatch), a.rank) == a.rank for a in table
    )


@st.composite
def problems(
    draw: st.DrawFn, twice: bool = False
) -> tuple[int, Holders, Paths, Costs, list[float], bool]:
    """Ranks, holders, paths, costs, the memory that the largest microbatch needs on each rank, and split."""
    ranks = draw(st.integers(1, 8))
    stages = draw(st.integers(1, 2 * ranks))
    rank = st.integers(0, ranks - 1)
    holders = [
        draw(st.lists(rank, min_size=1, max_size=2 if twice else 1, unique=True))
        for _ in range(stages)
    ]
    split, exclusive = draw(st.booleans()), draw(st.booleans())
    every = draw(st.permutations(range(stages)))
    path = st.lists(st.sampled_from(range(stages)), min_size=1, unique=True) | st.just(
        list(every)
    )
    paths = draw(
        st.lists(
            path | st.just(list(range(stages))),
            min_size=1,
            max_size=draw(st.integers(1, 24)),
        )
    )
    time = st.sampled_from([0.1, 0.5, 1.0, 1.3, 2.0])
    took = {key: draw(time) for key in "FIW"}
    took["B"] = took["I"] + took["W"]
    slow = [draw(time) for _ in range(ranks)]
    move, far = draw(st.sampled_from([0.0, 0.1])), draw(st.sampled_from([0.1, 3.0]))
    saved = [draw(st.sampled_from([0.5, 1.0, 1 / 3, 2.0])) for _ in range(stages)]
    tape = draw(st.sampled_from([0.0, 0.4, 1.0, 1.5]))
    costs = Costs(
        lambda a: took[a.kind] * slow[a.rank],
        lambda value, source, target: (
            far if abs(source - target) > ranks // 2 else move
        ),
        lambda v: saved[v.stage] * {"saved": 1.0, "tape": tape}.get(v.name, 0.0),
        exclusive,
    )
    need = [0.0] * ranks
    for m in range(len(paths)):
        alone = simulate(one_by_one(holders, [paths[m]], ranks, split), costs)
        need = [max(pair) for pair in zip(need, alone.peaks, strict=True)]
    return ranks, holders, paths, costs, need, split


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(problems(), st.none() | st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_any_paths_under_any_limit(
    problem: tuple[int, Holders, Paths, Costs, list[float], bool], extra: float | None
) -> None:
    ranks, holders, paths, costs, need, split = problem
    limit = None if extra is None else [n + extra for n in need]
    table = list_schedule(
        "any", holders, paths, costs, ranks=ranks, limit=limit, split=split
    )
    complete(table, split)
    ran = simulate(table, costs)  # no deadlock
    if limit is not None:
        assert all(
            peak <= most + 1e-6 for peak, most in zip(ran.peaks, limit, strict=True)
        )
    assert (
        ran.makespan
        <= simulate(one_by_one(holders, paths, ranks, split), costs).makespan + 1e-6
    )


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(problems(twice=True), st.none() | st.sampled_from([0.0, 1.0]))
def test_stages_with_several_holders(
    problem: tuple[int, Holders, Paths, Costs, list[float], bool], extra: float | None
) -> None:
    ranks, holders, paths, costs, need, split = problem
    limit = None if extra is None else max(need) + extra
    table = list_schedule(
        "twice", holders, paths, costs, ranks=ranks, limit=limit, split=split
    )
    complete(table, split)
    assert all(a.rank in holders[a.stage] for a in table)
    ran = simulate(table, costs)
    assert limit is None or max(ran.peaks) <= limit + 1e-6


def test_too_little_memory_names_rank_need_and_limit() -> None:
    costs = Costs(lambda a: 1.0)
    with pytest.raises(
        ScheduleError,
        match=r"microbatch 0 alone needs 2 of memory on rank 1, whose limit is 1\.5",
    ):
        list_schedule("small", [[0], [1], [1]], [[0, 1, 2]], costs, ranks=2, limit=1.5)


def test_is_deterministic() -> None:
    costs = Costs(lambda a: 1.0 + 0.1 * a.stage, exclusive=True)
    holders, paths = (
        [[0, 1], [1, 2], [2, 3], [3]],
        [[0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 3]] * 3,
    )
    one, two = (
        list_schedule("same", holders, paths, costs, ranks=4, limit=4.0)
        for _ in range(2)
    )
    assert one == two


def test_the_faster_of_two_holders_runs_more() -> None:
    costs = Costs(lambda a: 2.0 if a.rank == 1 else 1.0)
    table = list_schedule("speeds", [[0], [1, 2], [3]], [range(3)] * 24, costs, ranks=4)
    share = [sum(a.kind == "F" for a in actions) for actions in table.ranks]
    assert 24 > share[2] > share[1] > 0


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("row", PUBLISHED)
def test_published_bubble_rates(
    row: tuple[int, float, float, float, float, float, float],
) -> None:
    microbatches, f, b, w, move, one, two = row
    took = {"F": f, "I": b, "W": w}
    for name, published, limit, tape in (
        ("zb-1p", one, 8, 1.0),
        ("zb-2p", two, 16, TAPE),
    ):

        def size(value: Value, tape: float = tape) -> float:
            return {"saved": 1.0, "tape": tape}.get(value.name, 0.0)

        table = build(name, 8, microbatches, times=Times(f, b, w, move))
        ran = simulate(
            table,
            Costs(
                lambda a: took[a.kind], lambda value, source, target, t=move: t, size
            ),
        )
        bubble = 1 - max(ran.busy) / ran.makespan
        assert abs(bubble - published) <= 0.002
        assert max(ran.peaks) <= limit + 1e-6


@pytest.mark.sampled(4)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_as_good_as_the_handmade(ranks: int) -> None:
    """In the same memory, for few microbatches and many."""
    costs = Costs(lambda a: 1.0)
    for microbatches in (1, 2, 5, ranks, 24):
        made = assemble(
            "zb-h1",
            builder_of("zb-h1").orders(ranks, microbatches, 1, Times()),
            ranks,
            [range(ranks)] * microbatches,
        )
        found = build("zb-1p", ranks, microbatches)
        complete(found, split=True)
        ran = simulate(found, costs)
        assert ran.makespan <= simulate(made, costs).makespan + 1e-6
        assert max(ran.peaks) <= ranks


def test_with_more_memory_there_is_less_bubble() -> None:
    times = Times(1.0, 1.0, 0.8, 0.05)
    took = {"F": 1.0, "I": 1.0, "W": 0.8}
    costs = Costs(lambda a: took[a.kind], lambda value, source, target: 0.05)
    spans = [
        simulate(build(name, 4, 12, times=times), costs).makespan
        for name in ("zb-1p", "zb-2p")
    ]
    assert spans[1] < spans[0]
