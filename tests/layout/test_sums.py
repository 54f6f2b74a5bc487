"""All-reduces for slow links: every rank gets the same bits, by as many messages and bytes as each formula says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from weft.layout.sums import FEW, MANY, WATCHED, MeasuredSum, TokenSums, total_in_order
from weft.net import rank_links

NAMES = ("direct", "ring", "star", "two-level", "gloo")
COUNT = 1001


def sums_of_all(hosts: list[list[int]]) -> dict[str, Any]:
    """On every rank: the sum by each all-reduce, in two types, with messages and bytes; and the joined parts."""
    rank, found = dist.get_rank(), dict[str, Any]()
    for name in NAMES:
        sums = TokenSums(dist.group.WORLD, name)
        sums.links.hosts = hosts
        for dtype in (torch.float64, torch.bfloat16):
            x = torch.arange(COUNT).div(7 + rank).sin().to(dtype).view(7, -1)
            before = sums.links.messages, sums.links.bytes_sent
            total = sums.add(x)
            counted = (
                sums.links.messages - before[0],
                sums.links.bytes_sent - before[1],
            )
            found[name, dtype] = x, total, *counted
        own = torch.full((2, 1, rank + 1), float(rank))
        joined = sums.gather(own, [1, 2, 3, 4])
        found[name, "joined"] = joined
        sums.close()
    return found


def test_every_rank_gets_the_same_sum(pool: Any) -> None:
    hosts = [[0, 2], [1], [3]]
    by_rank = pool.run(4, sums_of_all, hosts)
    sent = {
        "direct": [(3, 3.0)] * 4,
        "star": [(3, 3.0), *[(1, 1.0)] * 3],
        # two rounds of three pieces, of which one is larger
        "ring": [(6, 1.5)] * 4,
        # a rank that is not its host's first; of the others, two other hosts, and the host's own
        "two-level": [(3, 3.0), (2, 2.0), (1, 1.0), (2, 2.0)],
        "gloo": [(0, 0.0)] * 4,
    }
    for name in NAMES:
        for dtype in (torch.float64, torch.bfloat16):
            rows = [found[name, dtype] for found in by_rank]
            exact = sum(x.double() for x, *_ in rows)
            for (_, total, messages, bytes_), (count, share) in zip(
                rows, sent[name], strict=True
            ):
                assert total.dtype == dtype and torch.equal(total, rows[0][1]), name
                near = 1e-14 if dtype == torch.float64 else 3e-2
                assert float((total.double() - exact).abs().max()) < near, name
                assert messages == count, name
                size = COUNT * dtype.itemsize
                assert abs(bytes_ - share * size) <= 4 * dtype.itemsize, name
        first, *rest = (found[name, "joined"] for found in by_rank)
        assert first[0, 0].tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]
        assert [x.shape[-1] for x in rest] == [2, 3, 4]


def measured_choice() -> tuple[list[MeasuredSum], list[str], str]:
    sums = TokenSums(dist.group.WORLD, "auto")
    sums.measure((1, 4096), 64, torch.float32)
    sums._recent.extend([1.0] * WATCHED)
    assert not sums.slowed
    sums._recent.extend([3.0] * WATCHED)
    assert sums.slowed
    sums.measure((1, 4096), 64, torch.float32)
    assert not sums.slowed
    chosen = [sums.chosen(size) for size in (1, 256, 2**19, 2**24)]
    sums.close()
    return sums.measured, chosen, sums.line()


def test_all_ranks_choose_alike_what_is_fastest(pool: Any) -> None:
    by_rank = pool.run(3, measured_choice)
    measured, chosen, line = by_rank[0]
    assert by_rank == [by_rank[0]] * 3
    # on one host the two levels are the star
    assert set(measured[0].seconds) == {*NAMES} - {"two-level"}
    assert chosen == [measured[0].fastest] * 2 + [measured[1].fastest] * 2
    assert "1 token: " in line and "4096 tokens: " in line


def test_candidates_take_turns_and_near_ones_have_more() -> None:
    """What the links carry besides grows while they are measured, and delays all alike."""
    calls, sums = list[str](), TokenSums.__new__(TokenSums)
    base = {"slow": 3.0, "second": 1.1, "first": 1.0}
    sums.ways = {name: (lambda x, name=name: name) for name in base}  # type: ignore[misc]

    def seconds(way: Any, x: Any) -> float:
        calls.append(way(x))
        return base[calls[-1]] * 0.01 * (1 + 0.2 * len(calls))

    with mock.patch.object(sums, "_seconds", seconds):
        found = sums._compared(torch.zeros(1))
    assert min(found, key=lambda name: found[name]) == "first"
    assert calls[:6] == [*base] * 2
    assert [calls.count(name) for name in base] == [FEW, MANY, MANY]


def test_the_order_of_summands_decides_the_bits() -> None:
    parts = [torch.tensor([v], dtype=torch.float32) for v in (1e8, 1.0, -1e8)]
    assert total_in_order(parts) == 0
    assert total_in_order(parts[::-1]) == 0
    assert total_in_order([parts[0], parts[2], parts[1]]) == 1
    narrow = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    # in bfloat16 each 1 would be lost
    assert total_in_order(narrow) == 258
    assert narrow[0] == 256


def lose_a_rank(name: str) -> str:
    sums = TokenSums(dist.group.WORLD, name)
    if dist.get_rank() == 2:
        sums.close()
        return ""
    try:
        sums.add(torch.ones(4))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_is_gone_is_named(pool: Any) -> None:
    lost = pool.run(3, lose_a_rank, "direct")
    assert lost[0].startswith("PeerLost: rank 2 is gone"), lost


def connect_alone(rank: int) -> str:
    if dist.get_rank() == rank:
        return ""
    with mock.patch.object(rank_links, "limit", lambda: timedelta(seconds=0.3)):
        try:
            TokenSums(dist.group.WORLD, "direct")
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_rank_that_makes_no_connections_is_named(pool: Any) -> None:
    said = pool.run(2, connect_alone, 1)[0]
    assert said.startswith("PeerLost: rank 1 has not answered for 0.3 s: rank 0"), said
    assert "waits for it to make its connections" in said and "\n" not in said
