"""What each rank's device can do, measured when ranks start, and the shares of ``tp`` that suit it.

Under tensor parallelism all ranks wait for the last one in every layer. An even cut over hosts of unequal speed makes
all hosts as slow as the slowest (TPI-LLM, Li et al. 2024, 2410.00531).
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.layout.placement import rank_table
from weft.layout.shares import uneven_sizes
from weft.net.groups import limit
from weft.net.sockets import own_address

T = torch.Tensor

#: Rows of the two products that a device is measured with: one token, which reads the weights, and many.
ROWS = (1, 128)
#: Inputs and outputs of the weights of these products.
WIDTH, OUTPUTS = 1024, 4096
#: How often each of them is measured, and seconds of each time: the best counts, as what else a device does for a
#: moment is not its speed.
TIMES, MEASURED_S = 3, 0.08
#: Devices of speeds within this factor count as equal: two measurements of one device differ so much.
ALIKE = 1.25
#: Speeds are rounded to so many parts of the fastest.
STEPS = 8
#: Share of the free memory that weights may fill; the rest is for the cache and for work.
FILLED = 0.8

#: What shares were chosen by, until a line is made of it.
_CHOSEN_BY: dict[tuple[int, ...], list[RankPower]] = {}


@dataclass(frozen=True)
class RankPower:
    """Speed and free memory of a rank's device.

    ``host``: address of the machine. ``few``, ``many``: matrix products per second with one token, and with many
    tokens. ``free``: bytes of free memory for this rank.
    """

    host: str
    few: float
    many: float
    free: float


def measure_ranks(device: torch.device) -> list[RankPower]:
    """Measure speed and free memory of all ranks' devices at the same time. Collective over the default process
    group.

    Returns the measurements by rank, the same list on every rank.
    """
    # The store of the default process group; PyTorch has no public way to it.
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    key = f"weft/power/{store.add(f'weft/power/count-{rank}', 1)}"
    try:
        dist.barrier()
    except RuntimeError as error:
        raise _absent(error) from error
    rates = [[_rate(rows, device) for rows in ROWS] for _ in range(TIMES)]
    few, many = (max(each) for each in zip(*rates, strict=True))
    store.set(
        f"{key}/{rank}", json.dumps([own_address(), few, many, _free_bytes(device)])
    )
    rows = []
    for other in range(dist.get_world_size()):
        try:
            rows.append(json.loads(store.get(f"{key}/{other}")))
        except RuntimeError as error:  # of the store, which names its key alone
            raise _absent(error, other) from error
    hosts = [host for host, *_ in rows]
    shared = device.type == "cpu"
    return [
        RankPower(host, few, many, free / (hosts.count(host) if shared else 1))
        for host, few, many, free in rows
    ]


def _absent(error: RuntimeError, rank: int | None = None) -> RuntimeError:
    """Return an error that names the rank that did not come to the measurement, if that can be told."""
    from weft.net.lost import PeerLost, peer_lost

    lost = peer_lost(error, rank, "waited for it to measure its device")
    return lost or PeerLost(f"a rank did not come to measure its device: {error}")


def _rate(rows: int, device: torch.device) -> float:
    """Return how many products of ``rows`` tokens with weights of 16 MiB ``device`` computes per second: the median."""
    x = torch.ones(rows, WIDTH, device=device)
    weight = torch.ones(OUTPUTS, WIDTH, device=device)
    times, until = list[float](), time.perf_counter() + MEASURED_S
    with torch.inference_mode():
        torch.nn.functional.linear(x, weight)
        while time.perf_counter() < until or len(times) < 3:
            begun = time.perf_counter()
            total = torch.nn.functional.linear(x, weight)
            float(total[0, 0])  # waits for a GPU
            times.append(time.perf_counter() - begun)
    return 1 / statistics.median(times)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    import psutil

    return float(psutil.virtual_memory().available)


def relative_speeds(powers: Sequence[RankPower]) -> list[float]:
    """Return the speed of each rank's device, relative to the fastest device (1).

    The speed is the geometric mean of the products per second with one token and with many. ``powers``: the
    measurements of all ranks, by rank.
    """
    speeds = [math.sqrt(power.few * power.many) for power in powers]
    return [speed / max(speeds) for speed in speeds]


def shares_by(
    speeds: Sequence[float], rooms: Sequence[float], needed: float
) -> tuple[int, ...]:
    """Return each rank's share of the model as an integer, such that ranks finish together if their memory allows
    it.

    The integers are relative to each other, as in ``layout.tp_shares``. They are equal if the speeds are within a
    factor of :data:`ALIKE`. ``speeds``: speed of each rank; ``rooms``: bytes that each rank may hold; ``needed``:
    bytes of the whole model; 0: memory does not matter. Raises :class:`UsageError` if the ranks together have too
    little memory.
    """
    if needed > sum(rooms):
        have = ", ".join(f"{room / 1e9:.3g}" for room in rooms)
        raise UsageError(
            f"the model's {needed / 1e9:.3g} GB do not fit the ranks of tp, which have room for {have} GB; "
            "use more ranks, or narrower weights"
        )
    alike = min(speeds) * ALIKE >= max(speeds)
    top = max(speeds)
    steps = [1 if alike else max(1, round(STEPS * speed / top)) for speed in speeds]
    caps = [room / needed if needed else 1.0 for room in rooms]
    full: set[int] = set()
    while True:
        rest = 1 - sum(caps[i] for i in full)
        weight = sum(step for i, step in enumerate(steps) if i not in full)
        parts = [
            caps[i] if i in full else rest * step / weight
            for i, step in enumerate(steps)
        ]
        over = {i for i, part in enumerate(parts) if part > caps[i] + 1e-9} - full
        if not over:
            break
        full |= over
    if full:
        # rounded down where memory is the limit
        steps = [max(1, int(1000 * part)) for part in parts]
    common = math.gcd(*steps)
    return tuple(step // common for step in steps)


def with_measured_shares(layout: Layout, device: torch.device, needed: float) -> Layout:
    """Return ``layout`` with measured shares of ``tp`` in place of ``"auto"``. Collective over the default process
    group.

    The shares follow from the memory and speed of the ranks' devices. ``device``: this rank's device. ``needed``: bytes
    of the weights that the ranks of ``tp`` hold together; 0: memory does not matter. A simulated group, whose ranks
    have no devices, gets equal shares.
    """
    if limit() is None:
        return layout.model_copy(update={"tp_shares": ()})
    powers = measure_ranks(device)
    speeds = relative_speeds(powers)
    places = by_place(layout)
    shares = shares_by(
        [min(speeds[rank] for rank in ranks) for ranks in places],
        [FILLED * min(powers[rank].free for rank in ranks) for ranks in places],
        needed,
    )
    _CHOSEN_BY[shares] = powers
    return layout.model_copy(update={"tp_shares": shares})


def by_place(layout: Layout) -> list[list[int]]:
    """Return, for each coordinate along ``tp`` from 0 on, the list of the world ranks at that coordinate."""
    table = np.moveaxis(rank_table(layout), -1, 0)
    return [place.flatten().tolist() for place in table]


def measured_line(layout: Layout, device: torch.device, heads: int) -> str:
    """Return a line for the user on how attention heads are divided among the ranks, by the measured speeds of their
    devices (:func:`power_line`). Collective over all ranks.

    The measurement is the one from which the shares of ``layout`` were chosen, if there is one, else a new one.
    ``device``: this rank's device. ``heads``: number of attention heads.
    """
    assert not isinstance(layout.tp_shares, str)
    powers = _CHOSEN_BY.pop(layout.tp_shares, None) or measure_ranks(device)
    return power_line(layout, powers, heads)


def power_line(layout: Layout, powers: Sequence[RankPower], heads: int) -> str:
    """Return a line for the user on how ``heads`` attention heads are divided among the ranks, and which ranks are
    slow.

    The line is empty if the heads are divided evenly over equally fast devices. ``layout``: the layout with its
    shares; ``powers``: speed and memory of each rank's device.
    """
    speeds, places = relative_speeds(powers), by_place(layout)
    shares = layout.tp_shares or (1,) * layout.tp
    sizes = uneven_sizes(heads, shares)
    slow = [
        f"rank {rank} ({powers[rank].host}) has {speeds[rank]:.2g} of the fastest rank's speed -> "
        f"{sizes[place]} of {heads} heads"
        for place, ranks in enumerate(places)
        for rank in ranks
        if speeds[rank] * ALIKE < 1
    ]
    if layout.tp_shares and len(set(shares)) > 1:
        text = ":".join(map(str, shares))
        cut = f"heads are cut {', '.join(map(str, sizes))} (tp_shares={text})"
        return f"{cut}: {'; '.join(slow) or 'no rank is slower than others'}"
    if not slow:
        return ""
    return (
        f"hosts of different speed under an even cut: {'; '.join(slow)}; all wait for the slowest, which "
        "tp_shares=auto gives less"
    )
