"""Bytes of features that mini-batches of sampled neighbours read: rows as often as asked for, and unique sorted rows.

Power-law graphs of several sizes and exponents, batches of 1,024 nodes with fan-out 10 x 10. The rows that come are
compared with indexing the table, in memory and in a file; of the file it is counted which bytes were really read.

    OMP_NUM_THREADS=1 nice python bench/graph_gather.py [--json bench/results/graph_gather.json]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from examples.gnnpipe.rows import Rows
from examples.neighbours.sampling import FeatureGather, power_law_graph, sample_hops
from weft.memory.tier_file import TierFile

#: Nodes of a batch, its fan-outs, width of the features, and batches.
BATCH, FAN_OUTS, WIDTH, BATCHES = 1024, (10, 10), 128, 5


def case(nodes: int, exponent: float, folder: Path) -> dict[str, Any]:
    """Gather the features of some batches, and return bytes and whether all rows were right."""
    graph = power_law_graph(nodes, 15, exponent, seed=0)
    rng = torch.Generator().manual_seed(1)
    table = torch.randn(nodes, WIDTH, generator=rng)
    memory, file = (
        FeatureGather(table),
        FeatureGather(Rows(table, TierFile(folder), near=0)),
    )
    equal, direct_s, unique_s = True, 0.0, 0.0
    for _ in range(BATCHES):
        seeds = torch.randperm(nodes, generator=rng)[:BATCH]
        asked = sample_hops(graph, seeds, FAN_OUTS, rng).all
        begun = time.perf_counter()
        direct = table[asked]
        direct_s += time.perf_counter() - begun
        begun = time.perf_counter()
        found = memory(asked)
        unique_s += time.perf_counter() - begun
        stored = file(asked)
        for part in (found, stored):
            equal &= bool(torch.equal(part.rows[part.places], direct))
    assert isinstance(file.table, Rows)
    stride = WIDTH * table.element_size()
    return {
        "nodes": nodes,
        "exponent": exponent,
        "rows_asked": memory.bytes["asked"] // stride,
        "rows_unique": memory.bytes["unique"] // stride,
        "equal_to_table": equal,
        "saved": round(memory.bytes["asked"] / memory.bytes["unique"], 3),
        "file_read_bytes": file.table.bytes["read"],
        "unique_bytes": memory.bytes["unique"],
        "asked_bytes": memory.bytes["asked"],
        "direct_s": round(direct_s, 4),
        "unique_s": round(unique_s, 4),
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--json", type=Path)
    given = words.parse_args()
    results: dict[str, Any] = {"batch": BATCH, "fan_outs": FAN_OUTS, "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        for nodes in (50_000, 200_000, 500_000):
            for exponent in (2.1, 2.5):
                results["cases"].append(case(nodes, exponent, Path(folder)))
                print(json.dumps(results["cases"][-1]), flush=True)
    results["least_saved"] = min(each["saved"] for each in results["cases"])
    results["most_saved"] = max(each["saved"] for each in results["cases"])
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
