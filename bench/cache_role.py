"""Prompts that begin alike, at three engines with and without a cache engine: first tokens, hits, bytes; and simulated.

Each prompt is one of some long beginnings and a part of its own. All beginnings together are longer than the cache of
an engine. The engines are those of ``weft serve --cluster FILE`` on devices that are emulated
(``bench/emulated_device.py``): a pass takes as long as there, whatever else this machine does. Each turn plays another
load in all four services: dispatched by load or by cached prefix, without and with a cache engine. Hits are the share
of all prompt tokens that were not computed. The bytes of fetched blocks are compared with the formula.

    python bench/cache_role.py [--quick] [--seconds 60] [--turns 3] [--slow 1] [--json bench/results/cache_role.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from service_faults import SHAPE, export_tiny, metrics, metrics_text
from service_placements import (
    BLOCK,
    Costs,
    Lengths,
    Placement,
    arrived,
    figures,
    fitted_rates,
    play,
    requests_of,
    service,
)
from step import machine

from weft.serve.block_link import BlockLink
from weft.serve.cluster_simulation import ClusterRequest, ServiceDelays
from weft.serve.load_requests import RequestOutcome

#: Tokens of an engine's cache, and the load: 40 beginnings of 1,200 tokens are three times as many.
ROOM = 16_384
LOAD = Lengths(8.0, 60, 16, prefix=1200, sessions=40)
ARMS = [
    Placement(3, dispatch=dispatch, caches=caches, room=ROOM)
    for dispatch in ("load", "cached-prefix")
    for caches in (0, 1)
]
#: Bytes of a block: 2 x layers x kv heads x head dim x tokens x width.
BYTES = 2 * SHAPE.layers * SHAPE.kv_heads * (SHAPE.embed // SHAPE.heads) * BLOCK * 4
#: Of the simulator: seconds and bytes per second of a fetch between processes of this machine.
LINK = BlockLink(0.004, 1e8, BYTES / BLOCK)


async def counts(port: int) -> dict[str, float]:
    """Return tokens of prompts and those that were hits, and what engines have fetched from cache engines."""
    sums, text = await metrics(port), await metrics_text(port)
    for name, value in re.findall(r'(?m)^weft_(\w+)_total\{engine="[^"]+",source="caches"\} (\S+)$', text):  # fmt: skip
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


async def measured(
    folder: Path, arm: Placement, load: list[ClusterRequest]
) -> tuple[list[RequestOutcome], dict[str, float]]:
    async with service(folder, arm) as port:
        before = await counts(port)
        outcomes = await play(port, load)
        after = await counts(port)
    return outcomes, {name: after[name] - before.get(name, 0.0) for name in after}


def row_of(
    costs: Costs, arm: Placement, load: list[ClusterRequest], real: list[RequestOutcome], grown: dict[str, float]
) -> dict[str, Any]:  # fmt: skip
    """Return the real and simulated figures of one run."""
    if failed := [each.error for each in real if each.error]:
        raise SystemExit(f"{arm}: {len(failed)} requests failed: {failed[0]}")
    fetched = grown.get("kept_blocks_fetched", 0.0)
    size = grown.get("kept_bytes_fetched", 0.0)
    assert size == fetched * BYTES, (size, fetched, BYTES)
    simulated = costs.simulated(arm, arrived(load, real, 0.0, 0))
    return {
        "load of the machine": os.getloadavg()[0],
        "hits": grown["prefix_hit_tokens"] / grown["prompt_tokens"],
        "fetched_blocks": fetched,
        "bytes_of_a_block": BYTES,
        "real": figures([real], costs.slow),
        "simulated": figures([simulated], costs.slow),
    }


async def run(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    os.environ["EMULATED_SLOW"] = str(given.slow)
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    export_tiny(folder)
    costs = Costs(fitted_rates(folder, [40, 240, 960]), slow=given.slow)
    costs.delays = ServiceDelays(0.003, 0.003, 0.001)
    costs.link = LINK
    rows: dict[str, list[dict[str, Any]]] = {str(arm): [] for arm in ARMS}
    for turn in range(given.turns):
        load = [
            each._replace(time=each.time * given.slow)
            for each in requests_of(LOAD, given.seconds, turn)
        ]
        for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
            real, grown = await measured(folder, arm, load)
            rows[str(arm)].append(row_of(costs, arm, load, real, grown))
            print(arm, json.dumps(rows[str(arm)][-1]), flush=True)
    return {"machine": machine(), "load": LOAD._asdict(), "room": ROOM, "seconds": given.seconds,
            "slow": given.slow, "summary": summary(rows), "runs": rows}  # fmt: skip


def summary(rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians over all turns, and the ratio of first tokens with a cache engine to those without."""
    said: dict[str, Any] = {}
    for name, each in rows.items():
        said[name] = {
            "hits": median(row["hits"] for row in each),
            "mean_ttft_ms": median(row["real"]["mean_ttft_ms"] for row in each),
            "p99_ttft_ms": median(row["real"]["p99_ttft_ms"] for row in each),
            "simulated_mean_ttft_ms": median(
                row["simulated"]["mean_ttft_ms"] for row in each
            ),
        }
    for without, beside in zip(ARMS[::2], ARMS[1::2], strict=True):
        pairs = zip(rows[str(without)], rows[str(beside)], strict=True)
        ratios = [b["real"]["mean_ttft_ms"] / a["real"]["mean_ttft_ms"] for a, b in pairs]  # fmt: skip
        said[f"first tokens with a cache engine over without, {without.dispatch}"] = median(ratios)  # fmt: skip
    return said


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.quick:
        given.seconds, given.turns = 15.0, 1
    with tempfile.TemporaryDirectory() as folder:
        said = asyncio.run(run(given, Path(folder)))
    print(json.dumps(said["summary"], indent=1))
    if given.json:
        given.json.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
