"""Neighbour sampling (GraphSAGE, Hamilton et al. 2017) on a graph in compressed rows, and the gather of its features.

A mini-batch of 1,024 nodes with ten neighbours each, of which each has ten again, asks for 113,664 rows of features.
Well-connected nodes are among them many times. Here the rows are made unique and sorted before they are read, so that
a table on the host or in a file gives each row once, in the order in which it lies there (PyTorch-Direct, Min et al.
2021, reads such rows from a GPU).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from examples.gnnpipe.rows import Rows

T = torch.Tensor


class NeighbourGraph(NamedTuple):
    """Directed graph. The neighbours of node ``i`` are ``sources[offsets[i]:offsets[i + 1]]``, int64."""

    offsets: T
    sources: T

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.offsets) - 1


class SampledHops(NamedTuple):
    """Sampled neighbours. ``hops``: numbers of the nodes, ``[seeds]``, then ``[seeds, fan-out]``, then ``[seeds,
    fan-out, fan-out of the second hop]`` and so on: the neighbours of each node of the hop before.
    """

    hops: list[T]

    @property
    def all(self) -> T:
        """The nodes of all hops, one after the other, as often as they were sampled."""
        return torch.cat([hop.flatten() for hop in self.hops])


class UniqueRows(NamedTuple):
    """Rows of a table, each once. ``rows``: the rows in the order of their numbers. ``places``: for each number that
    was asked for, the index of its row in ``rows``.
    """

    rows: T
    places: T


@dataclass
class FeatureGather:
    """Gathers rows of ``table`` for sampled nodes, each row once.

    ``bytes`` counts over all calls: ``asked``, the bytes of all rows that were asked for, and ``unique``, those of the
    rows that were read.
    """

    table: T | Rows
    bytes: Counter[str] = field(default_factory=Counter)

    def __call__(self, numbers: T) -> UniqueRows:
        """Return the rows ``numbers``, int64 of any shape."""
        unique, places = numbers.unique(return_inverse=True)  # sorted
        rows = self.table[unique]
        stride = rows.element_size() * rows.shape[1:].numel()
        self.bytes.update(
            asked=numbers.numel() * stride, unique=unique.numel() * stride
        )
        return UniqueRows(rows, places)


def power_law_graph(
    nodes: int, degree: int, exponent: float, seed: int
) -> NeighbourGraph:
    """Return a graph in which every node has ``degree`` neighbours, and node ``i`` is a neighbour about as often as
    ``i ** -1/(exponent - 1)`` says, after a random renumbering: the degrees follow a power law with ``exponent``.
    """
    rng = torch.Generator().manual_seed(seed)
    weights = torch.arange(1, nodes + 1, dtype=torch.float64) ** (-1 / (exponent - 1))
    edges = weights.cumsum(0) / weights.sum()
    drawn = torch.rand(nodes * degree, generator=rng, dtype=torch.float64)
    ranks = torch.searchsorted(edges, drawn).clamp(max=nodes - 1)
    names = torch.randperm(nodes, generator=rng)
    return NeighbourGraph(torch.arange(nodes + 1) * degree, names[ranks])


def sample_hops(
    graph: NeighbourGraph, seeds: T, fan_outs: Sequence[int], rng: torch.Generator
) -> SampledHops:
    """Draw ``fan_outs[h]`` neighbours, with replacement, of each node of hop ``h``, beginning with ``seeds``.

    A node without neighbours stands for its own.
    """
    hops = [seeds]
    for fan_out in fan_outs:
        nodes = hops[-1]
        first, count = graph.offsets[nodes], graph.offsets[nodes + 1] - graph.offsets[nodes]  # fmt: skip
        drawn = torch.rand(*nodes.shape, fan_out, generator=rng, dtype=torch.float64)
        at = first[..., None] + (drawn * count[..., None]).long()
        own = nodes[..., None].expand_as(at)
        at = at.clamp(max=max(0, len(graph.sources) - 1))
        near = graph.sources[at] if len(graph.sources) else own
        hops.append(torch.where(count[..., None] > 0, near, own))
    return SampledHops(hops)
