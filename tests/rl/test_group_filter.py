"""Groups without signal are replaced and counted."""

from __future__ import annotations

import pytest

from weft.rl.group_filter import GroupFilter, has_signal

NAN = float("nan")


@pytest.mark.parametrize(
    ("rewards", "signal"),
    [
        ([1, 0], True),
        ([1, 1, 1], False),
        ([0, 0.0, -0.0], False),
        ([None, 1, 0], True),
        ([NAN, 1, 1], False),
        ([NAN, None], False),
        ([1], False),
        ([], False),
    ],
)
def test_signal(rewards: list[float | None], signal: bool) -> None:
    assert has_signal(rewards) is signal


def test_a_batch_is_filled_with_groups_that_have_signal() -> None:
    batch = GroupFilter(wanted=2, most=6)
    assert batch.missing == 2
    assert not batch.add(0, [1, 1])
    assert batch.add(1, [1, 0])
    assert batch.missing == 1 and batch.share == 0.5
    assert not batch.add(2, [None, 1])
    assert batch.add(3, [0, 0.5])
    assert batch.missing == 0 and batch.batch == [1, 3]
    assert (batch.spare, batch.unscored) == ([0, 2], 1)


def test_a_batch_ends_though_nothing_has_signal() -> None:
    batch, number = GroupFilter(wanted=3, most=5), 0
    while batch.missing:
        for _ in range(batch.missing):
            batch.add(number, [number == 4, 0.0])
            number += 1
    assert number == 5
    assert batch.batch == [0, 1, 4]
    assert batch.share == 0.8


def test_the_order_of_arrival_does_not_matter() -> None:
    groups = {0: [1.0, 1.0], 1: [1.0, 0.0], 2: [0.0, 0.0], 3: [0.0, 1.0]}
    batches = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        batch = GroupFilter(wanted=3, most=4)
        for number in order:
            batch.add(number, groups[number])
        batches.append(batch.batch)
    assert batches == [[0, 1, 3]] * 2
