"""Train GraphSAGE on mini-batches of sampled neighbours: ``python -m examples.neighbours``, in the repository's root.

``--tier FOLDER`` has the features rest in a file there. ``--geometric`` trains torch-geometric's ``SAGEConv`` on the
batches of its ``NodeLoader`` (pip install torch-geometric), which gathers the same way. The last line has the bytes
that were asked for, and those of the unique rows that were read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from examples.gnnpipe.rows import Rows
from examples.neighbours.model import LabelledGraph, SampledSage, communities
from examples.neighbours.sampling import FeatureGather, sample_hops
from weft.memory.tier_file import TierFile

T = torch.Tensor


def batches(seeds: T, size: int, rng: torch.Generator) -> Iterator[T]:
    """Yield the ``seeds`` of an epoch in a random order, ``size`` at a time."""
    yield from seeds[torch.randperm(len(seeds), generator=rng)].split(size)


def train(
    about: LabelledGraph,
    gather: FeatureGather,
    fan_outs: list[int],
    batch: int,
    epochs: int,
) -> float:
    """Train on sampled neighbours, and return the accuracy on the nodes that are not for training."""
    torch.manual_seed(0)
    rng, classes = torch.Generator().manual_seed(0), int(about.labels.max()) + 1
    model = SampledSage(about.features.shape[1], *[64] * (len(fan_outs) - 1), classes)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)

    def logits(seeds: T) -> T:
        sampled = sample_hops(about.graph, seeds, fan_outs, rng)
        answer: T = model(*gather(sampled.all), sampled)
        return answer

    for _ in range(epochs):
        for seeds in batches(about.train.nonzero()[:, 0], batch, rng):
            loss = nn.functional.cross_entropy(logits(seeds), about.labels[seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    tests = (~about.train).nonzero()[:, 0]
    with torch.no_grad():
        right = sum(
            int((logits(part).argmax(1) == about.labels[part]).sum())
            for part in tests.split(batch)
        )
    return right / len(tests)


def train_geometric(
    about: LabelledGraph,
    gather: FeatureGather,
    fan_outs: list[int],
    batch: int,
    epochs: int,
) -> float:
    """Train torch-geometric's layers on batches of its loader; return the accuracy as :func:`train` does."""
    from torch_geometric.nn import GraphSAGE

    from examples.neighbours.geometric import node_loader

    torch.manual_seed(0)
    classes = int(about.labels.max()) + 1
    model = GraphSAGE(about.features.shape[1], 64, len(fan_outs), classes)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    seeds = about.train.nonzero()[:, 0], (~about.train).nonzero()[:, 0]
    learned, tested = (
        node_loader(about.graph, about.labels, nodes, gather, fan_outs, batch, seed)
        for seed, nodes in enumerate(seeds)
    )
    for _ in range(epochs):
        for part in learned:
            out = model(part.x, part.edge_index)[: part.batch_size]
            loss = nn.functional.cross_entropy(out, part.y[: part.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = sum(
            int(
                (
                    model(p.x, p.edge_index)[: p.batch_size].argmax(1)
                    == p.y[: p.batch_size]
                ).sum()
            )
            for p in tested
        )
    return right / len(seeds[1])


def main() -> None:
    words = argparse.ArgumentParser(
        "python -m examples.neighbours", description=__doc__
    )
    for name, default in (
        ("nodes", 20_000),
        ("classes", 8),
        ("batch", 256),
        ("epochs", 2),
    ):
        words.add_argument(f"--{name}", type=int, default=default)
    words.add_argument("--fan-outs", type=int, nargs="+", default=[10, 10])
    words.add_argument(
        "--tier", type=Path, help="a folder on a local disk, for the features"
    )
    words.add_argument(
        "--geometric", action="store_true", help="torch-geometric's loader and layers"
    )
    given = words.parse_args()
    about = communities(given.nodes, given.classes, seed=0)
    table = Rows(about.features, TierFile(given.tier)) if given.tier else about.features
    gather = FeatureGather(table)
    way = train_geometric if given.geometric else train
    accuracy = way(about, gather, given.fan_outs, given.batch, given.epochs)
    asked, unique = gather.bytes["asked"], gather.bytes["unique"]
    print(f"accuracy {accuracy:.3f} of {1 / given.classes:.3f} by chance")
    print(
        f"asked {asked / 2**20:.1f} MiB, unique rows {unique / 2**20:.1f} MiB, {asked / unique:.2f} times less"
    )


if __name__ == "__main__":
    main()
