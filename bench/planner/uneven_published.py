"""Steps that others measured on uneven clusters (uneven_rows.toml), beside what the planner's presets predict.

    python bench/planner/uneven_published.py [--out bench/results/planner_uneven_published.json] [--rows]

Each row's cluster, placement and cut are those that its source states; nothing is fitted to the rows. ``error`` is
predicted over measured seconds, less one; by paper the median and mean of its absolute value, and how many rows are
within 15 %. ``regret``: how much slower the layout predicted to be fastest is than the fastest of the same job and
nodes, mean over jobs. ``timed``: the same error if layers take what the source has timed on one node of each kind of
device (``timed`` in the rows), so that only what is made of them is predicted: pipelines, transfers, sums. ``plain``:
the same error if every device counts as the weakest one and every link as the slowest one, by the closed form, as
before.
"""

import argparse
import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from script import run

from weft.planner.cost import MicrobatchSeconds, Plan, schedule_number, step_time
from weft.planner.engine_constants import ENGINES, EngineConstants
from weft.planner.finalists import finalists
from weft.planner.layout_search import Pin, describe, search
from weft.planner.machine import Cluster, validated_cluster
from weft.planner.placed_pipeline import PlacedPipeline, group_speeds
from weft.recipe.toml import read_toml
from weft.schedule.build import build
from weft.schedule.stages import Stage
from weft.shapes.shape import Shape, shape_of_sizes

ROWS = Path(__file__).with_name("uneven_rows.toml")
#: Sailor's nodes: device; GB/s inside a node by tp (intra_node_bandwidths.json), summed over half as many pairs that
#: send at once (networking/test_sendrecv.py); GB/s to a node of the same kind.
NODES = {
    "t": ("TITAN RTX", {2: 10.82, 4: 12.33, 8: 24.3}, {"a": 2.94, "b": 2.94}),
    "o": ("RTX 2080 Ti", {2: 10.76, 4: 22.67, 8: 24.55}, {"a": 2.94, "b": 0.1175}),
    "n": ("RTX 3090", {2: 49.77, 4: 7.86, 8: 5.33}, {"a": 2.94, "b": 0.1174}),
}
#: GB/s from a node of one kind to a node of another.
ACROSS = {"a": 2.94, "b": 0.1155}


@dataclass(frozen=True)
class Row:
    """A measured step: its name, seconds, cluster, layout, and the nodes and layers of its pipeline ranks."""

    name: str
    seconds: float
    cluster: Cluster
    plan: Plan
    nodes: tuple[tuple[int, ...], ...]
    stages: tuple[Stage, ...]
    layers: tuple[MicrobatchSeconds, ...] = ()

    def predicted(
        self, shape: Shape, engine: EngineConstants, timed: bool = False
    ) -> float:
        """Return the predicted seconds of the step; ``timed``: with the layers that the source has timed."""
        pp = int(self.plan.pp)
        table = build("1f1b", pp, int(self.plan.microbatches), None)
        placed = PlacedPipeline(
            shape, engine, self.cluster, self.plan, self.nodes, self.stages, range(pp)
        )
        if timed:
            speeds = group_speeds(shape, engine, self.cluster, self.plan)
            pairs = zip(speeds, self.layers, strict=True)
            placed = replace(placed, measured=[replace(s, times=t) for s, t in pairs])
        return float(placed.step([table], checked=False).seconds)

    def plain(self, shape: Shape, engine: EngineConstants) -> float:
        """Return the seconds of the closed form, for which all devices are the weakest and all links the slowest."""
        return float(
            step_time(
                shape, self.cluster.machine(int(self.plan.bits)), self.plan, engine
            ).total
        )


def stages_of(counts: list[int]) -> tuple[Stage, ...]:
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return tuple(
        Stage(range(a, b), i == 0, i == len(counts) - 1)
        for i, (a, b) in enumerate(pairwise(ends))
    )


def plan_of(paper: dict[str, Any], **sizes: float) -> Plan:
    return Plan(zero=0, seq=paper["seq"], bits=paper["bits"], schedule=schedule_number("1f1b"), **sizes)  # fmt: skip


def amp_row(paper: dict[str, Any], row: list[Any]) -> Row:
    tp, dp, pp, micro, seconds, starts = row
    cluster = validated_cluster(
        {
            "per_node": 4,
            "across": 1.25 / 4,
            "groups": [
                {"device": "V100", "count": 12, "memory": 16, "network": 1.25 / 4, "link": 21.25, "card": "ethernet"},
                {"device": "T4", "count": 4, "network": 6.25 / 4, "link": 6.25, "card": "ethernet"},
            ],
        },
        "amp",
    )  # fmt: skip
    nodes = tuple(
        tuple((rank * dp * tp + replica * tp) // 4 for replica in range(dp))
        for rank in range(pp)
    )
    counts = [sum(2 <= i < 26 for i in range(a, b)) for a, b in pairwise(starts)]
    plan = plan_of(paper, tp=tp, dp=dp, pp=pp, micro_batch=micro, batch=paper["batch"])
    name = f"tp={tp} dp={dp} pp={pp} micro_batch={micro}"
    return Row(name, seconds, cluster, plan, nodes, stages_of(counts))


def sailor_row(paper: dict[str, Any], row: list[Any]) -> Row:
    which, file, tp, micro, batch, seconds, *cut = row
    kinds = sorted({kind for _, places in cut for kind in places})
    groups, first, count = [], {}, 0
    for kind in kinds:
        device, links, network = NODES[kind]
        number = sum(places.count(kind) for _, places in cut)
        link = links[tp] * 2 / tp
        groups.append(
            {"device": device, "count": number * tp, "network": network[which] / tp, "link": link}
        )  # fmt: skip
        first[kind] = count
        count += number
    cluster = validated_cluster(
        {"per_node": tp, "across": ACROSS[which] / tp, "groups": groups}, "sailor"
    )
    nodes = []
    for _, places in cut:
        nodes.append([])
        for kind in places:
            nodes[-1].append(first[kind])
            first[kind] += 1
    plan = plan_of(
        paper, tp=tp, dp=len(cut[0][1]), pp=len(cut), micro_batch=micro, batch=batch
    )
    stages = stages_of([layers for layers, _ in cut])
    timed = {
        kind: layer_seconds(*layout_and_times[2:])
        for kind, *layout_and_times in paper["timed"]
        if layout_and_times[:2] == [tp, micro]
    }
    layers = tuple(timed[kind] for kind in kinds)
    return Row(f"{which} {file}", seconds, cluster, plan, tuple(map(tuple, nodes)), stages, layers)  # fmt: skip


def layer_seconds(forward: float, backward: float, *head: float) -> MicrobatchSeconds:
    """Return the seconds of a microbatch in a layer and in the output layer, from those that a source has timed."""
    nothing = dict.fromkeys(("again", "tp", "cp", "ep", "hop"), 0.0)
    known = {"forward": forward, "backward": backward, "weight": backward / 2}
    return MicrobatchSeconds(count=2.0, head=sum(head), **known, **nothing)


READERS = {"amp": amp_row, "sailor": sailor_row}


def rounds(paper: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of islands: the steps of a node as the planner lays them out, and agreements as stated."""
    sizes = {
        name: paper[name] for name in ("embed", "heads", "kv_heads", "ffn", "vocab")
    }
    shape = shape_of_sizes(paper["layers"], gated=1, tied=0, **sizes)
    node = Cluster(device="H100-80GB", count=8)
    pins = [Pin.parse(pin) for pin in ("cp=1", "pp=1", "tp=1")]
    searched = search(
        shape, node, ENGINES["compiled"], paper["batch"], paper["seq"], 16, pins
    )
    final = finalists(searched, 3)[0]
    rows = []
    for where, seconds, agreement in paper["rows"]:
        predicted = paper["every"] * final.seconds + agreement
        rows.append(
            {
                "row": f"{where}: {describe(final.plan)}",
                "seconds": seconds,
                "predicted": round(predicted, 1),
                "error": round(predicted / seconds - 1, 3),
            }
        )
    return rows


def regret_of(rows: list[dict[str, Any]]) -> float:
    """Return how much slower the row predicted to be fastest is than the fastest, as a share of its time."""
    best = min(rows, key=lambda row: row["predicted"])
    return float(best["seconds"] / min(row["seconds"] for row in rows) - 1)


def judged(name: str, paper: dict[str, Any]) -> dict[str, Any]:
    """Return a paper's rows with predictions, and its errors."""
    if "every" in paper:
        rows = rounds(paper)
        sizes = [abs(row["error"]) for row in rows]
        about = {key: paper[key] for key in ("paper", "source", "about")}
        return about | {"rows": rows} | summary(sizes)
    embed = paper["embed"]
    shape = shape_of_sizes(paper["layers"], embed=embed, heads=paper["heads"], ffn=4 * embed, vocab=paper["vocab"],
                           gated=0, tied=1)  # fmt: skip
    engine = replace(ENGINES[paper["program"]], gradient=4.0)
    if paper["network"]:
        engine = replace(engine, network=paper["network"])
    rows = []
    for line in paper["rows"]:
        row = READERS[name](paper, line)
        seconds = row.predicted(shape, engine)
        plain = row.plain(shape, engine)
        entry = {
            "row": row.name,
            "seconds": row.seconds,
            "predicted": round(seconds, 3),
            "error": round(seconds / row.seconds - 1, 3),
            "plain": round(plain / row.seconds - 1, 3),
        }
        if row.layers:
            timed = row.predicted(shape, engine, timed=True)
            entry["timed"] = round(timed / row.seconds - 1, 3)
        rows.append(entry)
    jobs: dict[Any, list[dict[str, Any]]] = {}
    for row, line in zip(rows, paper["rows"], strict=True):
        job = (line[0], line[4], line[1].split("_")[0]) if name == "sailor" else name
        jobs.setdefault(job, []).append(row)
    regrets = [regret_of(job) for job in jobs.values()]
    about = {key: paper[key] for key in ("paper", "source", "about")}
    plain = [abs(row["plain"]) for row in rows]
    return (
        about
        | {"rows": rows}
        | summary([abs(row["error"]) for row in rows])
        | {
            "plain median": round(median(plain), 3),
            "plain mean": round(fmean(plain), 3),
            "regret": round(fmean(regrets), 3),
        }
        | timed_summary(rows)
    )


def timed_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the summary of the errors with timed layers; nothing if the source has timed none."""
    sizes = [abs(row["timed"]) for row in rows if "timed" in row]
    if not sizes:
        return {}
    return {f"timed {key}": value for key, value in summary(sizes).items()}


def summary(sizes: list[float]) -> dict[str, Any]:
    """Return how many errors there are, their median and mean, and how many are within 15 %."""
    return {
        "count": len(sizes),
        "median": round(median(sizes), 3),
        "mean": round(fmean(sizes), 3),
        "within 15 %": sum(size <= 0.15 for size in sizes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, metavar="FILE")
    parser.add_argument("--rows", action="store_true", help="print every row")
    options = parser.parse_args()
    papers = {name: judged(name, paper) for name, paper in read_toml(ROWS).items()}
    for name, paper in papers.items():
        line = f"{name}: {paper['count']} rows, error median {paper['median']:.1%}, mean {paper['mean']:.1%}, "
        line += f"{paper['within 15 %']} within 15 %"
        if "regret" in paper:
            line += f"; as the weakest {paper['plain median']:.1%} and {paper['plain mean']:.1%}"
            line += f"; regret {paper['regret']:.1%}"
        if "timed median" in paper:
            line += f"; with timed layers {paper['timed median']:.1%} and {paper['timed mean']:.1%}, "
            line += f"{paper['timed within 15 %']} within 15 %"
        print(line)
        for row in paper["rows"] if options.rows else ():
            print(
                f"  {row['row']:36} {row['seconds']:8.2f} s, predicted {row['predicted']:8.2f} ({row['error']:+.0%})"
                + (f", timed ({row['timed']:+.0%})" if "timed" in row else "")
            )
    if options.out:
        found = {
            "command": "python bench/planner/uneven_published.py",
            "papers": papers,
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    run(main)
