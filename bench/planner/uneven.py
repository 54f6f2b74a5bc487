"""What orders of nodes and stages sized by speed save, by the planner's own simulation; nothing runs on a device.

    python bench/planner/uneven.py [--draws N] [--out bench/results/planner_uneven.json]

``nodes``: tables of links with a hidden order of nodes in which neighbours are ten times as fast, and tables of links
drawn evenly from 2 to 20 GB/s; share of the communication that annealing saves, beside the best of all orders up to
seven nodes. ``trees``: share of the network's bandwidth that is left on a fat tree, by devices below a switch and
routing. ``mixed``: llama3-8b over two groups, with layers by speed, with equal stages, and in step with the weakest.
"""

import argparse
import json
import tempfile
from itertools import permutations
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from script import run

from weft.layout.layout import Layout
from weft.planner import node_mapping
from weft.planner.engine_constants import ENGINES
from weft.planner.fat_tree import ROUTING, uplink_share
from weft.planner.finalists import finalists
from weft.planner.layout_search import search
from weft.planner.machine import load_cluster
from weft.planner.mixed_cluster import mixed_plans
from weft.planner.node_mapping import Flows, flow_seconds, flows_of, map_nodes
from weft.planner.planned_model import SHAPES

#: Pipeline ranks and replicas, of nodes of four.
SIZES = ((3, 2), (7, 1), (4, 2), (4, 4), (8, 4))
#: Groups of 32 devices, GB/s of their networks, and GB/s between them.
MIXES = {
    "A100 with InfiniBand and with Ethernet": (
        ("A100-80GB", 25.0),
        ("A100-80GB", 3.1),
        3.1,
    ),
    "H100 and A100": (("H100-80GB", 50.0), ("A100-80GB", 25.0), 12.5),
    "A100 and V100": (("A100-80GB", 25.0), ("V100", 12.5), 3.1),
}


def links_of(
    flows: list[Flows], nodes: int, draw: np.random.Generator, planted: bool
) -> Any:
    if not planted:
        return draw.uniform(2, 20, (nodes, nodes))
    links, hidden = np.full((nodes, nodes), 2.0), draw.permutation(nodes)
    for flow in flows:
        source, target = np.nonzero(flow.counts)
        links[hidden[source], hidden[target]] = 20.0
    return links


def nodes_saved(draws: int) -> list[dict[str, Any]]:
    """Return the mean share saved, by size and kind of table."""
    found = []
    for pp, dp in SIZES:
        flows = flows_of(Layout(pp=pp, dp=dp, tp=4), 4, {"pp": 1.0, "dp": 4.0})
        for planted in (True, False):
            annealed, best = [], []
            for seed in range(draws):
                links = links_of(flows, pp * dp, np.random.default_rng(seed), planted)
                speed = np.where(np.eye(pp * dp, dtype=bool), np.inf, links)

                def total(nodes: Any, speed: Any = speed, flows: Any = flows) -> float:
                    return sum(flow_seconds(flows, speed, np.array(nodes)).values())

                usual = total(range(pp * dp))
                order = node_mapping._annealed(total, flows, speed, seed)
                annealed.append(1 - total(order) / usual)
                if pp * dp <= node_mapping.EXACT:
                    best.append(
                        1 - min(map(total, permutations(range(pp * dp)))) / usual
                    )
                else:
                    best.append(map_nodes(flows, links, seed).saved)
            row = {
                "pp": pp,
                "dp": dp,
                "planted": planted,
                "annealed": round(fmean(annealed), 3),
            }
            if pp * dp <= node_mapping.EXACT:
                row["best of all orders"] = round(fmean(best), 3)
            found.append(row)
    return found


def mixed_saved() -> dict[str, Any]:
    """Return seconds of the best pipeline over each mix, with equal stages, and of the best layout in step."""
    found = {}
    for name, (one, other, across) in MIXES.items():
        text = f"across = {across}\n"
        for device, network in (one, other):
            text += (
                f'[[groups]]\ndevice = "{device}"\ncount = 32\nnetwork = {network}\n'
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "mixed.toml"
            path.write_text(text)
            cluster = load_cluster(str(path))
        searched = search(SHAPES["llama3-8b"], cluster, ENGINES["megatron"], 256, 2048)
        best = mixed_plans(searched, cluster, 16)[0]
        step = finalists(searched, 5)[0].seconds
        found[name] = best.record() | {
            "in step": round(step, 3),
            "saved": round(1 - best.seconds / step, 3),
        }
    return found


def trees() -> dict[str, dict[str, float]]:
    """Return the share of the bandwidth that is left, with as many uplinks as devices, by routing."""
    return {
        way: {str(n): round(uplink_share(n, n, way), 3) for n in (8, 16, 32)}
        for way in ROUTING
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Orders of nodes, and stages by speed."
    )
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    command = f"python bench/planner/uneven.py --draws {options.draws}"
    found = {
        "command": command,
        "nodes": nodes_saved(options.draws),
        "trees": trees(),
        "mixed": mixed_saved(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    run(main)
