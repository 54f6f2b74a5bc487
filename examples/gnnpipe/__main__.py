"""GNNPipe on a planted-community graph, beside full-graph training on one device and graph parallelism's volume.

``python -m examples.gnnpipe --ranks 4 --chunks 8``, in the root of the repository, prints loss and test accuracy of
both as training goes on. ``--tier FOLDER`` has the features rest in a file there, of which a rank reads the rows
that it needs; nothing else changes.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from examples.gnnpipe.model import GNN, planted
from examples.gnnpipe.pipeline import GraphPipeline, volumes
from examples.gnnpipe.rows import Rows
from weft.memory.tier_file import TierFile
from weft.run.launch import launch
from weft.run.rank_processes import in_ranks, init_ranks


def main() -> int:
    parser = argparse.ArgumentParser("python -m examples.gnnpipe", description=__doc__)
    sizes = {
        "ranks": 4,
        "chunks": 8,
        "nodes": 2000,
        "classes": 6,
        "layers": 4,
        "hidden": 32,
        "epochs": 150,
    }
    for name, default in sizes.items():
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"default {default}"
        )
    parser.add_argument("--tier", help="a folder on a local disk, for the features")
    o = parser.parse_args()
    if not 1 <= o.ranks <= o.layers or not 1 <= o.chunks <= o.nodes:
        parser.error("needs a layer per rank and a node per chunk")
    if not in_ranks():
        return launch(
            [], o.ranks, [sys.executable, "-m", "examples.gnnpipe", *sys.argv[1:]]
        )
    init_ranks("cpu", 600)
    graph, models = planted(o.nodes, o.classes, seed=0), []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(GNN(o.classes, o.hidden, o.classes, o.layers))
    rows = Rows(graph.features, TierFile(Path(o.tier))) if o.tier else None
    stored = replace(graph, features=rows) if rows else graph
    ours = GraphPipeline(models[0], stored, o.chunks, o.ranks, dist.group.WORLD)
    # one chunk, one stage: plain full-graph training
    full = GraphPipeline(models[1], graph, 1, 1)
    optimizers = [torch.optim.AdamW(p.parameters(), lr=5e-3) for p in (ours, full)]
    say = print if dist.get_rank() == 0 else lambda *words: None
    for epoch in range(1, o.epochs + 1):
        before = ours.wire.bytes_sent
        losses = [ours.epoch(), full.epoch()]
        sent = torch.tensor(ours.wire.bytes_sent - before)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if epoch % 10 == 0 or epoch == o.epochs:
            accuracies = [ours.accuracy(), full.accuracy()]
            shown = [
                f"loss {loss:.4f} test {a:.2%}"
                for loss, a in zip(losses, accuracies, strict=True)
            ]
            say(
                f"epoch {epoch:3}  {o.ranks} ranks, {o.chunks} chunks: {shown[0]}   one device: {shown[1]}"
            )
    dist.all_reduce(sent)
    say(
        f"sent per epoch: {int(sent):,} bytes; by the formula {volumes(graph, o.ranks, o.hidden, o.layers)[0]:,}"
    )
    if rows:
        asked, touched, read = (
            f"{rows.bytes[kind]:,}" for kind in ("asked", "touched", "read")
        )
        say(
            f"features: {asked} bytes asked for, on pages of {touched}; {read} read from {o.tier}"
        )
    for name, g in (
        ("by community", graph),
        ("at random", graph.renumbered(torch.randperm(o.nodes))),
    ):
        volume = volumes(g, o.ranks, o.hidden, o.layers)[1]
        say(
            f"graph parallelism, nodes cut {name}: {volume:,} bytes, {volume / max(int(sent), 1):.2f} times as much"
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
