"""GraphSAGE on sampled neighbours, and communities on a power-law graph to try it on."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import nn

from examples.neighbours.sampling import NeighbourGraph, SampledHops, power_law_graph

T = torch.Tensor


class SampledSage(nn.Module):
    """GraphSAGE with the mean aggregator on the hops of a mini-batch. ``widths``: of features, layers and classes."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = [*itertools.pairwise(widths)]
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.near = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)

    def forward(self, rows: T, places: T, sampled: SampledHops) -> T:
        """Return the logits ``[seeds, classes]``. ``rows``, ``places``: features of the nodes of ``sampled``."""
        sizes = [hop.numel() for hop in sampled.hops]
        parts = rows[places].split(sizes)
        hidden = [x.view(*hop.shape, -1) for x, hop in zip(parts, sampled.hops, strict=True)]  # fmt: skip
        for layer, (own, near) in enumerate(zip(self.own, self.near, strict=True)):
            hidden = [own(x) + near(y.mean(-2)) for x, y in itertools.pairwise(hidden)]
            if layer < len(self.own) - 1:
                hidden = [x.relu() for x in hidden]
        return hidden[0]


class LabelledGraph(NamedTuple):
    """A graph with ``features`` ``[nodes, width]``, ``labels`` and ``train``, which nodes are for training."""

    graph: NeighbourGraph
    features: T
    labels: T
    train: T


def communities(
    nodes: int, classes: int, seed: int, degree: int = 15, width: int = 32
) -> LabelledGraph:
    """Return a power-law graph with a class for each node, of which neighbours share it in two of three edges.

    Features are noisy, so that the neighbours' are needed.
    """
    rng = torch.Generator().manual_seed(seed)
    graph = power_law_graph(nodes, degree, 2.2, seed)
    labels = torch.randint(classes, (nodes,), generator=rng)
    members = labels.argsort(stable=True)
    sizes = torch.bincount(labels, minlength=classes)
    firsts = sizes.cumsum(0) - sizes
    # the neighbour of the same class that has the same place among the class's nodes
    rank = torch.empty_like(members)
    rank[members] = torch.arange(nodes) - firsts[labels[members]]
    target = labels.repeat_interleave(degree)
    mates = members[firsts[target] + rank[graph.sources] % sizes[target]]
    inside = torch.rand(len(mates), generator=rng) < 2 / 3
    sources = torch.where(inside, mates, graph.sources)
    centres = torch.randn(classes, width, generator=rng)
    features = centres[labels] + 4 * torch.randn(nodes, width, generator=rng)
    train = torch.rand(nodes, generator=rng) < 0.5
    return LabelledGraph(
        NeighbourGraph(graph.offsets, sources), features, labels, train
    )
