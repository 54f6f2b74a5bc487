"""A graph network, GraphSAGE with the mean aggregator (Hamilton et al. 2017), and planted communities to try it on."""

import warnings
from dataclasses import dataclass

import torch
from torch import nn

from examples.gnnpipe.rows import Rows

T = torch.Tensor


@dataclass(frozen=True)
class Graph:
    """``features``: [nodes, width]; ``labels``: [nodes]; ``train``: [nodes], bool, the other nodes are for testing.

    ``edges``: [2, edges], no pair twice: node ``edges[1]`` aggregates node ``edges[0]``. Features may rest in a file.
    """

    features: T | Rows
    labels: T
    train: T
    edges: T

    def renumbered(self, order: T) -> "Graph":
        """The same graph with node ``order[i]`` as number ``i``."""
        return Graph(
            self.features[order],
            self.labels[order],
            self.train[order],
            order.argsort()[self.edges],
        )


def planted(
    nodes: int,
    classes: int,
    seed: int,
    degree: int = 12,
    inside: float = 0.8,
    noise: float = 2.0,
) -> Graph:
    """Communities of equal size, numbered one after another; ``classes`` noisy features; 3 of 10 nodes for training.

    Nodes have about ``degree`` edges, of which a share of ``inside`` is drawn within the community.
    """
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(nodes) * classes // nodes
    ends = torch.randint(nodes, (2, nodes * degree // 2), generator=rng)
    mates = (labels[ends[0]] * nodes // classes + ends[1] % (nodes // classes)).clamp(
        max=nodes - 1
    )
    ends[1] = torch.where(
        torch.rand(ends.shape[1], generator=rng) < inside, mates, ends[1]
    )
    ends = ends[:, ends[0] != ends[1]]
    features = nn.functional.one_hot(labels, classes) + noise * torch.randn(
        nodes, classes, generator=rng
    )
    train = torch.rand(nodes, generator=rng) < 0.3
    return Graph(
        features, labels, train, torch.cat([ends, ends.flip(0)], 1).unique(dim=1)
    )


def mean_matrix(graph: Graph, targets: range, sources: range) -> T:
    """What ``sources`` contribute to the mean over neighbours at ``targets``. CSR, [targets, sources]."""
    source, target = graph.edges
    here = (
        (source >= sources.start)
        & (source < sources.stop)
        & (target >= targets.start)
        & (target < targets.stop)
    )
    shares = (
        torch.bincount(target, minlength=len(graph.labels))[target[here]]
        .to(graph.features.dtype)
        .reciprocal()
    )
    index = torch.stack([target[here] - targets.start, source[here] - sources.start])
    with warnings.catch_warnings():  # PyTorch calls the CSR layout a beta
        warnings.simplefilter("ignore", UserWarning)
        size = (len(targets), len(sources))
        return (
            torch.sparse_coo_tensor(index, shares, size, check_invariants=True)
            .coalesce()
            .to_sparse_csr()
        )


def columns_used(matrix: T) -> tuple[T, T]:
    """The columns in which a CSR matrix has anything, and the matrix of these alone."""
    used, places = matrix.col_indices().unique(return_inverse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        size = (matrix.shape[0], len(used))
        return used, torch.sparse_csr_tensor(
            matrix.crow_indices(), places, matrix.values(), size, check_invariants=True
        )


class Layer(nn.Module):
    """``relu(W x + b + V mean)``, where ``mean`` is that of the neighbours' ``x``; a last layer is without the relu."""

    def __init__(self, width_in: int, width_out: int, last: bool) -> None:
        super().__init__()
        self.own, self.near = (
            nn.Linear(width_in, width_out),
            nn.Linear(width_in, width_out, bias=False),
        )
        self.last = last

    def forward(self, x: T, mean: T) -> T:
        y = self.own(x) + self.near(mean)
        return y if self.last else y.relu()


class GNN(nn.Module):
    """``layers`` layers of width ``hidden``. Called with a graph, gives the logits [nodes, classes]."""

    def __init__(self, features: int, hidden: int, classes: int, layers: int) -> None:
        super().__init__()
        widths = [features, *[hidden] * (layers - 1), classes]
        self.hidden = hidden
        self.layers = nn.ModuleList(
            Layer(widths[i], widths[i + 1], i + 1 == layers) for i in range(layers)
        )

    def forward(self, graph: Graph) -> T:
        everyone = range(len(graph.labels))
        x, matrix = (
            graph.features[torch.arange(len(everyone))],
            mean_matrix(graph, everyone, everyone),
        )
        for layer in self.layers:
            x = layer(x, matrix @ x)
        return x
