"""Updates of a state on the host and, by turns, on a device behind a link: what every number of units there takes.

There is no device here: a second thread takes its place. All sides do their real work (AdamW on float32, copies there
and back) and then sleep for as long as their stated rates ask, so that the figures stand whatever else two cores do.
With ``--products`` nobody sleeps: they multiply matrices and copy memory instead, as often as the rates ask of an idle
core, so that host, device and link compete for two cores; last, no work is added and the second core is the device.
For every link "auto" chooses by rates that it measures; then all numbers of units take turns. Peers: all on the host
(ZeRO-Offload), and half of the units on the device.

    OMP_NUM_THREADS=1 python bench/alternating.py [--rounds 3] [--json bench/results/alternating.json]
    OMP_NUM_THREADS=1 python bench/alternating.py --products [--json bench/results/alternating_products.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from step import machine

from weft.layout.mesh import Mesh
from weft.memory.heap import keep_heap
from weft.parallel.alternating import (
    PROFILED,
    Alternating,
    UnitUpdate,
    update_alternating,
)
from weft.parallel.build import parallelize
from weft.parallel.state import State
from weft.recipe import Memory, ModelShape, Optimizer, Train
from weft.schedule.actions import Action
from weft.schedule.alternate import BRING, ON_DEVICE, ON_HOST, RETURN, simulated
from weft.train.rule_optimizer import RuleOptimizer

RESULTS = Path(__file__).parent / "results" / "alternating.json"
WORKED = RESULTS.with_name("alternating_products.json")
#: Blocks, and how wide they are, with stated rates and without.
SHAPES = {True: (12, 128), False: (6, 384)}
#: Seconds of a block's update on the host, and how many times as fast a device is.
BLOCK, FASTER = 0.04, 10
#: How many host updates a block's way to the device takes.
LINKS = (0.5, 1.0, 2.0, 4.0)


class Shared(NamedTuple):
    """A state at rest on the host, and what updates a share of it elsewhere."""

    state: State
    alternating: Alternating


def built(
    share: float | str,
    paced: bool,
    report: Callable[[dict[str, Any]], None] = lambda chosen: None,
) -> Shared:
    """A new state whose updates are shared."""
    layers, wide = SHAPES[paced]
    shape = ModelShape(
        vocab=256, layers=layers, embed=wide, heads=4, kv_heads=4, ffn=3 * wide
    )
    _, state = parallelize(
        shape,
        Mesh.single(),
        Train(dtype="float32"),
        memory=Memory(weights="host"),
        optimizer=RuleOptimizer(Optimizer(), Mesh.single()),
    )
    return Shared(state, Alternating(torch.device("cpu"), share, report))


def updated(shared: Shared) -> float:
    """Seconds for an update of all units."""
    state, alternating = shared
    grads = {h.name: torch.full_like(h.local, 0.01) for h in state.learning}
    begun = time.perf_counter()
    update_alternating(state, alternating, lambda unit: grads, 1e-3)
    return time.perf_counter() - begun


def sizes_of(state: State) -> list[int]:
    return [
        UnitUpdate(unit.held, [h.local for h in unit.held]).size for unit in state.units
    ]


def pace(shared: Shared, link: float | None) -> dict[str, float]:
    """Have every action take what its rate says, if it is not slower by itself. Returns the rates, seconds per byte."""
    sizes = sizes_of(shared.state)
    host = BLOCK / statistics.median(sizes)
    rates = {
        ON_HOST: host,
        ON_DEVICE: host / FASTER,
        BRING: (link or 0) * host,
        RETURN: (link or 0) * host,
    }

    def paced(a: Action, work: Any) -> None:
        begun = time.perf_counter()
        work()
        time.sleep(
            max(0.0, rates[a.kind] * sizes[a.stage] - (time.perf_counter() - begun))
        )

    if link is not None:
        shared.alternating.wrap = paced
    return rates


def turns_per_second(work: Callable[[], Any]) -> float:
    """How often a core that is as idle as this machine's can do ``work`` in a second: the best of some trials."""
    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(10):
            work()
        best = min(best, (time.perf_counter() - begun) / 10)
    return 1 / best


class Labour:
    """Real work of stated amounts: products of matrices for updates, copies of memory for the link."""

    def __init__(self) -> None:
        local = threading.local()

        def product() -> None:
            if not hasattr(local, "a"):
                local.a, local.b = torch.ones(160, 160), torch.empty(160, 160)
            torch.mm(local.a, local.a, out=local.b)

        def copy() -> None:
            if not hasattr(local, "c"):
                local.c, local.d = torch.ones(2, 1 << 18)
            local.d.copy_(local.c)

        self.work = dict.fromkeys((ON_HOST, ON_DEVICE), product)
        self.work |= dict.fromkeys((BRING, RETURN), copy)
        self.per_second = {work: turns_per_second(work) for work in (product, copy)}

    def give(self, shared: Shared, link: float) -> None:
        """Have every action do as much work as an idle core does in the time that its rate says."""
        rates, sizes = pace(shared, link), sizes_of(shared.state)

        def working(a: Action, work: Any) -> None:
            work()
            again = self.work[a.kind]
            count = rates[a.kind] * sizes[a.stage] * self.per_second[again]
            for _ in range(round(count)):
                again()

        shared.alternating.wrap = working


def compared(
    link: float | None, rounds: int, labour: Labour | None = None
) -> dict[str, Any]:
    """Times of every number of units, the fastest of the rounds.

    ``link`` None: nothing is added to the updates. ``labour``: real work in place of sleeps.
    """

    def paced(shared: Shared) -> None:
        if labour is not None and link is not None:
            labour.give(shared, link)
        else:
            pace(shared, link)

    found: list[dict[str, Any]] = []
    auto = built("auto", link is not None, found.append)
    paced(auto)
    for _ in range(PROFILED + 1):
        updated(auto)
    units = len(auto.state.units)
    states = {
        count: built(count / units, link is not None) for count in range(units + 1)
    }
    for state in states.values():
        paced(state)
    times: dict[int, list[float]] = {count: [] for count in states}
    for turn in range(rounds + 1):
        for count, state in states.items():
            seconds = updated(state)
            if turn:
                times[count].append(seconds)
    for state in states.values():
        mine, first = state.state.tensors(), states[0].state.tensors()
        assert all(
            torch.equal(part.values, first[name].values) for name, part in mine.items()
        )
    fastest = {count: min(values) for count, values in times.items()}
    best, chosen = min(fastest, key=fastest.__getitem__), found[0]["device"]
    rates = found[0]["rates"]
    predicted = {
        count: simulated(count, sizes_of(auto.state), rates).elapsed for count in states
    }
    return {
        "link": link, "units": units, "chosen": chosen, "best": best, "seconds": fastest, "predicted": predicted,
        "chosen over best": fastest[chosen] / fastest[best], "host over chosen": fastest[0] / fastest[chosen],
        "half over chosen": fastest[round(units / 2)] / fastest[chosen],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one link, to see that it runs"
    )
    parser.add_argument(
        "--products", action="store_true", help="real work in place of sleeps"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    links: list[float | None] = [1.0] if given.quick else [*LINKS, None]
    found = []
    labour = Labour() if given.products else None
    for link in links:
        found.append(one := compared(link, given.rounds, labour))
        print(
            f"link {link}: {one['chosen']} of {one['units']} units on the device by measured rates, "
            f"{one['best']} are best: "
            f"{one['seconds'][one['chosen']]:.3f} s is {one['chosen over best']:.3f} of the best; all on the host "
            f"{one['host over chosen']:.2f} times as long, half on the device {one['half over chosen']:.2f}",
            flush=True,
        )
    place = given.json or (WORKED if given.products else RESULTS)
    place.write_text(
        json.dumps({"machine": machine(), "links": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
