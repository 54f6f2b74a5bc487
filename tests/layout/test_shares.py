"""Shares of unequal ranks: whole heads by the largest remainder, by speed as far as memory allows."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import UsageError
from weft.layout import rank_power
from weft.layout.dims import part
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.layout.rank_power import RankPower, measured_line, power_line, shares_by
from weft.layout.shares import cuts_groups, uneven_part, uneven_sizes

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(st.integers(0, 40), SHARES)
def test_parts_are_as_near_to_the_shares_as_whole_elements_can_be(
    count: int, shares: list[int]
) -> None:
    sizes = uneven_sizes(count, shares)
    parts = [uneven_part(count, shares, i) for i in range(len(shares))]
    assert sum(sizes) == count
    assert [hi - lo for lo, hi in parts] == sizes
    assert [lo for lo, _ in parts] == [sum(sizes[:i]) for i in range(len(sizes))]
    if count >= len(shares):
        assert min(sizes) >= 1
    if count * min(shares) >= sum(shares):  # nobody is raised to one
        exact = [count * share / sum(shares) for share in shares]
        assert all(abs(a - b) < 1 for a, b in zip(sizes, exact, strict=True))
    if len(set(shares)) == 1:
        assert parts == [part(count, len(shares), i) for i in range(len(shares))]


def test_wide_parts_are_of_whole_blocks() -> None:
    assert uneven_sizes(8192, [2, 2, 2, 1]) == [2368, 2368, 2304, 1152]
    assert uneven_sizes(8193, [2, 2, 2, 1]) == [2341, 2341, 2341, 1170]
    assert uneven_sizes(640, [2, 2, 2, 1]) == [183, 183, 183, 91]
    assert uneven_sizes(8192, [3, 3, 3]) == [2731, 2731, 2730]


def test_groups_of_heads_that_a_cut_keeps_together() -> None:
    for shares, whole in (([2, 1], True), ([1, 1, 1], True), ([1, 1], False)):
        assert cuts_groups(6, 3, shares) is whole
    assert cuts_groups(5, 5, [3, 1])


def test_shares_are_by_speed_where_memory_allows() -> None:
    plenty = [1e12] * 4
    assert shares_by([1.0, 1.0, 0.5, 1.0], plenty, 1e9) == (2, 2, 1, 2)
    # two measurements of one device
    assert shares_by([1.0, 0.9, 0.85, 1.0], plenty, 1e9) == (1, 1, 1, 1)
    assert shares_by([1.0, 0.01], plenty[:2], 1e9) == (8, 1)
    # the fast rank holds a quarter, which the others take over
    first, *rest = shares_by([1.0, 0.5, 0.5], [0.25e9, 9e9, 9e9], 1e9)
    assert (first, rest) == (2, [3, 3])
    # whoever takes over may be full then, too
    shares = shares_by([1.0, 1.0, 1.0], [0.1e9, 0.35e9, 9e9], 1e9)
    assert [round(s / sum(shares), 2) for s in shares] == [0.1, 0.35, 0.55]
    with pytest.raises(
        UsageError, match=re.escape("4 GB do not fit the ranks of tp, which have room")
    ):
        shares_by([1.0, 1.0], [1e9, 2e9], 4e9)


def test_a_slow_host_is_named_in_one_line() -> None:
    powers = [
        RankPower(f"10.0.0.{i}", rate, rate, 1e9) for i, rate in enumerate((8, 4, 8))
    ]
    line = power_line(Layout(tp=3, tp_shares=[2, 1, 2]), powers, 9)
    assert line == (
        "heads are cut 4, 2, 3 (tp_shares=2:1:2): rank 1 (10.0.0.1) has 0.5 of the fastest rank's speed -> 2 of 9 heads"
    )
    even = power_line(Layout(tp=3), powers, 9)
    assert even.startswith(
        "hosts of different speed under an even cut: rank 1 (10.0.0.1)"
    )
    assert even.endswith("all wait for the slowest, which tp_shares=auto gives less")
    assert not power_line(Layout(tp=3), [powers[0]] * 3, 9)


def measured_mesh() -> tuple[object, str]:
    speed = (4.0, 4.0, 2.0)[dist.get_rank()]
    with mock.patch.object(rank_power, "_rate", lambda rows, device: speed):
        mesh = Mesh.create(Layout(tp=3, tp_shares="auto"), "cpu", needed=1e6)
    return mesh.layout.tp_shares, measured_line(mesh.layout, mesh.device, 10)


def test_ranks_measure_their_shares_alike(pool: Any) -> None:
    (shares, line), *others = pool.run(3, measured_mesh)
    assert shares == (2, 2, 1) and others == [(shares, line)] * 2
    assert line.endswith("has 0.5 of the fastest rank's speed -> 2 of 10 heads")


def test_shares_that_are_still_to_be_measured() -> None:
    with pytest.raises(UsageError, match="is measured by the ranks"):
        uneven_sizes(4, "auto")


def measure_alone(rank: int) -> str:
    if dist.get_rank() == rank:
        return ""
    late = mock.Mock(side_effect=RuntimeError("timed out"))
    with mock.patch.object(dist, "barrier", late):
        try:
            rank_power.measure_ranks(torch.device("cpu"))
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_does_not_measure_is_named(pool: Any) -> None:
    said = pool.run(2, measure_alone, 1)[0]
    assert said.startswith("PeerLost: rank 1 has not answered"), said
    assert "rank 0 waited for it to measure its device" in said
