"""Only tables that can run are accepted, whatever is done to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.modelled import replay, sleeping
from weft.schedule.actions import Action, ScheduleError, Table, Value, assemble
from weft.schedule.build import build, builders
from weft.schedule.lower import lower
from weft.schedule.simulate import simulate, uniform_costs
from weft.schedule.validate import run_dry, validate
from weft.schedule.vocab import with_vocabulary

tables = st.builds(
    lambda name, half, count: build(name, 2 * half, count),
    st.sampled_from(sorted(builders())),
    st.integers(1, 3),
    st.integers(1, 9),
)


def runs(table: Table) -> bool:
    """Independent oracle: one process runs all ranks' actions as soon as what they read has been written."""
    try:
        replay(table, sleeping(lambda a: 0.0))
    except ScheduleError:
        return False
    return True


def put(table: Table, rank: int, actions: list[Action]) -> Table:
    return replace(
        table, ranks=(*table.ranks[:rank], tuple(actions), *table.ranks[rank + 1 :])
    )


@given(tables)
@settings(max_examples=60, deadline=None)
def test_built_tables_are_accepted(table: Table) -> None:
    validate(table)
    assert runs(table)


@given(
    tables,
    st.data(),
    st.sampled_from(["drop", "double", "other rank", "other microbatch", "kind"]),
)
@settings(max_examples=100, deadline=None)
def test_tables_with_a_wrong_action_are_rejected(
    table: Table, data: Any, fault: str
) -> None:
    rank = data.draw(st.integers(0, len(table.ranks) - 1))
    actions = list(table.ranks[rank])
    if not actions:
        return
    i = data.draw(st.integers(0, len(actions) - 1))
    a = actions[i]
    if fault == "drop":
        broken = put(table, rank, actions[:i] + actions[i + 1 :])
    elif fault == "double":
        broken = put(table, rank, [*actions[: i + 1], a, *actions[i + 1 :]])
    elif fault == "other rank":
        other = (rank + 1) % len(table.ranks)
        moved = [*table.ranks[other], replace(a, rank=other)]
        broken = put(put(table, rank, actions[:i] + actions[i + 1 :]), other, moved)
    elif fault == "other microbatch":
        broken = put(
            table,
            rank,
            [*actions[:i], replace(a, microbatch=a.microbatch + 1), *actions[i + 1 :]],
        )
    else:
        wrong = {"F": "B", "B": "F", "I": "F", "W": "I"}[a.kind]
        broken = put(
            table, rank, [*actions[:i], replace(a, kind=wrong), *actions[i + 1 :]]
        )
    with pytest.raises(ScheduleError) as caught:
        validate(broken)
    assert str(table.name) in str(caught.value)


@pytest.mark.slow
@given(tables, st.data())
@settings(max_examples=100, deadline=None)
def test_swapped_actions_are_rejected_if_and_only_if_they_cannot_run(
    table: Table, data: Any
) -> None:
    rank = data.draw(st.integers(0, len(table.ranks) - 1))
    actions = list(table.ranks[rank])
    if len(actions) < 2:
        return
    i = data.draw(st.integers(0, len(actions) - 2))
    j = data.draw(st.integers(i + 1, len(actions) - 1))
    actions[i], actions[j] = actions[j], actions[i]
    swapped = put(table, rank, actions)
    if runs(swapped):
        # With buffers that hold every message, a table that can run is accepted.
        validate(swapped, window=10_000)
        simulate(swapped, uniform_costs(swapped))
    else:
        with pytest.raises(ScheduleError, match=r"comes before|deadlocks"):
            validate(swapped)
        with pytest.raises(ScheduleError):
            simulate(swapped, uniform_costs(swapped))


def test_circle_is_named() -> None:
    table = build("1f1b", 2, 2)
    first, last = table.ranks
    # Each rank waits for what the other does next.
    crossed = replace(
        table,
        ranks=(
            (first[0], first[2], first[1], first[3]),
            (last[2], last[3], last[0], last[1]),
        ),
    )
    with pytest.raises(ScheduleError) as caught:
        validate(crossed)
    assert "B(0,0) on rank 0 waits for B(1,0) on rank 1" in str(
        caught.value
    ) or "deadlocks" in str(caught.value)
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


def test_overrun_is_found() -> None:
    """Rank 0 has room for one message to rank 1, which takes the first only when rank 2 has heard of the second."""
    first, second, third, reply = (
        Value(name, 0, 0) for name in ("first", "second", "third", "reply")
    )
    ranks = (
        tuple(
            Action(0, "X", 0, i, writes=(value,))
            for i, value in enumerate((first, second, third))
        ),
        (
            Action(1, "Y", 1, 0, reads=(reply,)),
            Action(1, "Y", 1, 1, reads=(first, second)),
        ),
        (Action(2, "Z", 2, 0, reads=(third,), writes=(reply,)),),
    )
    lowered = lower(Table("custom", ranks, 3, ()))
    assert run_dry(lowered, window=2)[0, 1] == 2
    with pytest.raises(
        ScheduleError, match=r"room for second\(0,0\).*Y\(1,0\) on rank 1 waits for Z"
    ):
        run_dry(lowered, window=1)


def test_values_that_stay_are_not_sent() -> None:
    table = assemble("custom", [[("F", 0, 0)], [("B", 0, 0)]], 1, [[0]])
    with pytest.raises(ScheduleError, match="moves between ranks"):
        validate(table)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ScheduleError, match="unknown kind 'Q'"):
        assemble("custom", [[("Q", 0, 0)]], 1, [[0]])
    with pytest.raises(ScheduleError, match="path"):
        assemble("custom", [[("F", 3, 0)]], 1, [[0]])


def test_dependencies_between_ranks_become_messages() -> None:
    table = build("gpipe", 2, 1)
    waiting = replace(table.ranks[1][1], deps=(("F", 0, 0),))
    table = put(table, 1, [table.ranks[1][0], waiting])
    lowered = validate(table)
    assert any(a.kind == "SEND" and a.reads[0].name == "done:F" for a in lowered)
    with pytest.raises(ScheduleError, match="not in the table"):
        validate(
            put(table, 1, [table.ranks[1][0], replace(waiting, deps=(("F", 9, 9),))])
        )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", sorted(builders()))
@pytest.mark.parametrize("barriers", [1, 2])
def test_vocabulary_passes_fit_into_any_schedule(name: str, barriers: int) -> None:
    for ranks, count in ((2, 1), (2, 5), (4, 3), (4, 8), (8, 16)):
        table = with_vocabulary(build(name, ranks, count), barriers)
        validate(table)
        assert sum(a.kind == "S" for a in table) == ranks * count


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parameters_are_gathered_and_reduced_as_the_stage_says(zero: int) -> None:
    table = build("interleaved-1f1b", 2, 4)
    lowered = lower(table, zero)
    kinds = [a.kind for a in lowered.ranks[0]]
    # stages, or stages x microbatches
    assert kinds.count("REDUCE") == (2 if zero == 1 else 8)
    runs_of_a_stage = 1 + sum(
        a.stage != b.stage
        for a, b in zip(table.ranks[0], table.ranks[0][1:], strict=False)
    )
    assert (
        kinds.count("GATHER")
        == kinds.count("RELEASE")
        == (runs_of_a_stage if zero == 3 else 2)
    )
