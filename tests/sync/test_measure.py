"""Links that are measured over streams, between hosts on this machine, and the ring that is chosen by them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hosts import Host, hosts, unavailable

from tests.cases import recipe, write_corpus
from tests.measured import until_true
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.net.endpoint import Endpoint
from weft.recipe import Sync, build_recipe
from weft.sync.collectives import ring_sum
from weft.sync.measure import WORTH, best_ring, measured_links, measured_ring
from weft.sync.streams import Streams, streams_by_store
from weft.train.setup import prepare
from weft.train.training import train_job

MBIT = 1e6 / 8


def on_hosts(at: Sequence[Host], work: Callable[[Streams], Any]) -> list[Any]:
    """What ``work`` gives on islands of one rank, each a thread of this process on a host."""
    store = dist.HashStore()

    def live(island: int) -> Any:
        at[island].enter()
        endpoint = Endpoint(at[island].address)
        streams = streams_by_store(island, len(at), 0, store, endpoint, 60)
        try:
            return work(streams)
        finally:
            streams.close()

    with ThreadPoolExecutor(len(at)) as threads:
        return list(threads.map(live, range(len(at))))


def sum_times(
    streams: Streams, orders: Sequence[Sequence[int]], size: int, tries: int = 2
) -> list[float]:
    """Seconds that a sum of so many elements takes around each ring, the best of some tries."""
    found = []
    for number, order in enumerate(orders):
        times = []
        for turn in range(tries):
            flat = torch.full((size,), float(streams.island))
            ring_sum(
                streams, torch.zeros(len(order)), order, f"together {number} {turn}"
            )
            begun = time.perf_counter()
            ring_sum(streams, flat, order, f"{number} {turn}", 1 << 14)
            times.append(time.perf_counter() - begun)
            assert flat.eq(sum(order)).all()
        found.append(min(times))
    return found


def limit_to(host: Host, rates: Mapping[str, str]) -> None:
    """Let no more than ``rates[address]`` go out of ``host`` to each of these addresses."""
    tc = ("ip", "netns", "exec", host.name, "tc")
    words = [(*tc, "qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "htb")]
    for number, (address, rate) in enumerate(rates.items(), 1):
        shape = (
            "htb",
            "rate",
            rate,
            "burst",
            "32kb",
            "cburst",
            "32kb",
            "quantum",
            "15000",
        )
        words.append(
            (
                *tc,
                "class",
                "add",
                "dev",
                "eth0",
                "parent",
                "1:",
                "classid",
                f"1:{number}",
                *shape,
            )
        )
        match = ("u32", "match", "ip", "dst", f"{address}/32", "flowid", f"1:{number}")
        words.append(
            (
                *tc,
                "filter",
                "add",
                "dev",
                "eth0",
                "parent",
                "1:",
                "protocol",
                "ip",
                "prio",
                "1",
                *match,
            )
        )
    for each in words:
        subprocess.run(each, check=True)


def rings(islands: int) -> list[tuple[int, ...]]:
    """Each once, in one direction."""
    return [
        (0, *rest) for rest in permutations(range(1, islands)) if rest[0] < rest[-1]
    ]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_the_ring_of_fast_links_is_found_among_six() -> None:
    """Four islands with six links, of which those of one ring are four times as fast, whichever it is."""
    slow = ({0, 1}, {2, 3})

    def work(streams: Streams) -> tuple[np.ndarray, list[int], str, list[float]]:
        links = measured_links(streams, 1e6)
        said = measured_ring(streams, 1e6)
        return links, streams.order, said, sum_times(streams, rings(4), 250_000)

    def measure() -> list[tuple[np.ndarray, list[int], str, list[float]]]:
        with hosts(4) as made:
            for a, host in enumerate(made):
                others = [(b, other.address) for b, other in enumerate(made) if b != a]
                limit_to(
                    host,
                    {
                        address: "20mbit" if {a, b} in slow else "80mbit"
                        for b, address in others
                    },
                )
            found = on_hosts(made, work)
        # whatever it is, all go around the same ring
        assert all(one[1] == found[0][1] for one in found)
        return found

    def holds(found: list[tuple[np.ndarray, list[int], str, list[float]]]) -> bool:
        times = dict(zip(rings(4), np.max([one[3] for one in found], 0), strict=True))
        taken = times[(0, 2, 1, 3)]
        alike = all(
            links[b, 0] / MBIT == pytest.approx(20 if {a, b} in slow else 80, rel=0.4)
            for a, (links, *_) in enumerate(found) for b in {0, 1, 2, 3} - {a}
        )  # fmt: skip
        ring = found[0][1] in ([0, 2, 1, 3], [0, 3, 1, 2])
        told = all(one[2].startswith("islands agree in the ring 0 ") for one in found)
        return (
            alike
            and ring
            and told
            and taken == min(times.values())
            and max(times.values()) >= 1.8 * taken
        )

    until_true(measure, holds)


def test_links_that_are_alike_leave_islands_in_their_order() -> None:
    random = np.random.default_rng(0)
    rows = np.stack(
        [1e7 * random.uniform(0.95, 1.05, (5, 5)), np.full((5, 5), 1e-3)], -1
    )
    order, gain = best_ring(rows, 1e6)
    assert order == [0, 1, 2, 3, 4] and 1 <= gain < WORTH


def ringed(values: dict[str, Any], out: str) -> tuple[list[int], float]:
    """Train on this rank: the ring that it went around, and the validation loss of its island."""
    asked, seen = build_recipe(values), []

    def watched(streams: Streams, nbytes: float) -> str:
        said = measured_ring(streams, nbytes)
        seen.extend(streams.order)
        return said

    with patch("weft.train.islands.measured_ring", watched):
        outcome = train_job(prepare(asked), Mesh.create(asked.layout, "cpu"), Path(out))
    return seen, outcome.validations[-1]


@pytest.mark.slow
def test_a_run_measures_its_links_once_for_all_ranks(pool: Any, tmp_path: Path) -> None:
    values = recipe(write_corpus(tmp_path), validation__every=3).model_dump(mode="json")
    values["layout"] = Layout.parse("island=3,shard=2").model_dump(mode="json")
    losses = []
    for order in ("numbered", "measured"):
        values["sync"] = Sync(every=2, update="nesterov", order=order).model_dump()
        found = pool.run(6, ringed, values, str(tmp_path / order), timeout=200)
        assert [ring for ring, _ in found] == (
            [found[0][0]] * 6 if order == "measured" else [[]] * 6
        )
        losses.append([loss for _, loss in found])
    assert sorted(found[0][0]) == [0, 1, 2] and losses[1] == pytest.approx(
        losses[0], rel=1e-10
    )
