"""Measures links between islands over their streams when a run begins, and chooses the fastest ring."""

import json
import time

import numpy as np
import torch

from weft.sync.links import IslandLinks, ring_order, ring_times
from weft.sync.streams import IslandLost, Streams

#: Bytes of the first message that a link's speed is measured with, and of the largest; each is four times the last.
FIRST, LARGEST = 1 << 16, 1 << 24
#: A message that takes so many seconds is long enough.
LONG_S = 0.2
#: Times that a message which is not long is sent, of which the quickest counts.
TRIES = 5
#: So many times as fast as in the order of their numbers a ring must be, or islands stay in that. Which ring it is
#: changes how sums are rounded, and links that are alike never measure alike.
WORTH = 1.3


def measured_ring(streams: Streams, nbytes: float) -> str:
    """Set ``streams.order`` on all ranks to the ring that sums ``nbytes`` soonest; return a line for the user.

    The first rank of each island measures all links, one after the other. The first island puts the result into the
    store, from which all other ranks take it. An island that joins the run later takes the same result. If an island is
    lost during the measurement, islands stay in the order of their numbers.
    """
    store, numbered = streams.shared, json.dumps((streams.order, 1.0))
    assert store is not None
    # else this island comes to a run that is going on
    if streams.place == 0 and not store.check(["weft/ring"]):
        try:
            row = measured_links(streams, nbytes)
            store.set(f"weft/links/{streams.island}", json.dumps(row.tolist()))
            if streams.island == 0:
                rows = [
                    json.loads(store.get(f"weft/links/{i}"))
                    for i in range(streams.islands)
                ]
                store.compare_set(
                    "weft/ring", "", json.dumps(best_ring(np.array(rows), nbytes))
                )
        except IslandLost:
            store.compare_set("weft/ring", "", numbered)
    order, gain = json.loads(store.get("weft/ring"))
    streams.order = order
    ring = " ".join(map(str, order))
    if gain < WORTH:
        return f"islands agree in a ring as they are numbered: no other is {WORTH:g} times as fast"
    return f"islands agree in the ring {ring}, by their links {gain:.2g} times as fast as in the order of their numbers"


def best_ring(rows: np.ndarray, nbytes: float) -> tuple[list[int], float]:
    """Return the fastest order of islands for a ring all-reduce of ``nbytes`` bytes, and its speedup.

    ``rows``: measured links ``[island, island, (bytes/s, seconds)]``. The speedup is relative to the order 0, 1, 2 and
    so on, which is returned unless another order is clearly faster.
    """
    links = IslandLinks(rows[..., 0], rows[..., 1])
    numbered = list(range(len(rows)))
    fastest = ring_order(links, nbytes)
    before, after = ring_times(links, np.array([numbered, fastest]), nbytes)
    gain = float(before / after)
    return (fastest, gain) if gain >= WORTH else (numbered, gain)


def measured_links(streams: Streams, nbytes: float) -> np.ndarray:
    """Measure the links from this island to every island. Returns bytes per second and one-way seconds, ``[islands,
    2]``.

    Links are measured one at a time, island by island, with messages of up to about ``nbytes``. All islands call
    this. ``streams``: connections to the other islands.
    """
    row = np.zeros((streams.islands, 2))
    others = [i for i in range(streams.islands) if i != streams.island]
    for sender in range(streams.islands):
        if sender == streams.island:
            for other in others:
                row[other] = _link_to(streams, other, nbytes)
            for other in others:
                streams.send(
                    other, "measure", torch.empty(0, dtype=torch.uint8), control=True
                )
            streams.flush()
        else:
            while streams.receive(sender, "measure", torch.uint8).numel():
                streams.send(
                    sender, "measured", torch.ones(1, dtype=torch.uint8), control=True
                )
                streams.flush()
    return row


def _link_to(streams: Streams, other: int, nbytes: float) -> tuple[float, float]:
    def trip(message: torch.Tensor) -> float:
        begun = time.perf_counter()
        streams.send(other, "measure", message, control=True)
        streams.receive(other, "measured", torch.uint8)
        return time.perf_counter() - begun

    def quickest(size: int, longest: float) -> float:
        """What else the machine does makes a trip longer, never shorter: the best of up to five, if they are short."""
        message, times = torch.ones(size, dtype=torch.uint8), list[float]()
        while len(times) < TRIES and sum(times) < longest:
            times.append(trip(message))
        return min(times)

    latency, size = quickest(1, 1.0) / 2, FIRST
    largest = min(max(FIRST, int(nbytes)), LARGEST)
    while (spent := quickest(size, LONG_S)) < LONG_S and size * 4 <= largest:
        size *= 4
    return size / max(spent - 2 * latency, 1e-6), latency
