"""The same mini-batches through torch-geometric's loader: its ``NodeLoader``, with this sampler and this gather.

torch-geometric's own ``NeighborLoader`` samples with pyg-lib or torch-sparse, which are compiled for one release of
PyTorch each; ``NodeLoader`` takes any sampler. The features stay where they are, such as in a file, and the loader's
``transform`` gathers the rows of a batch's nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput

from examples.neighbours.sampling import FeatureGather, NeighbourGraph, sample_hops

T = torch.Tensor


class HopSampler(BaseSampler):
    """Sampler of torch-geometric that draws by :func:`sample_hops`. ``seed``: of the draws, which go on per batch."""

    def __init__(
        self, graph: NeighbourGraph, fan_outs: Sequence[int], seed: int
    ) -> None:
        self.graph, self.fan_outs = graph, fan_outs
        self.rng = torch.Generator().manual_seed(seed)

    def sample_from_nodes(self, inputs: NodeSamplerInput, **_: Any) -> SamplerOutput:
        """Return the sampled nodes, the seeds first, and the edges between them."""
        sampled = sample_hops(self.graph, inputs.node, self.fan_outs, self.rng)
        others = sampled.all.unique()
        others = others[~torch.isin(others, inputs.node)]
        nodes = torch.cat([inputs.node, others])
        local = torch.full((self.graph.nodes,), -1)
        local[nodes] = torch.arange(len(nodes))
        rows, columns = [], []
        for near, far in zip(sampled.hops[:-1], sampled.hops[1:], strict=True):
            rows.append(local[far.flatten()])
            columns.append(local[near.flatten()].repeat_interleave(far.shape[-1]))
        about = (inputs.input_id, inputs.time)
        edges = torch.cat(rows), torch.cat(columns)
        return SamplerOutput(nodes, *edges, edge=None, batch=None, metadata=about)

    def sample_from_edges(self, *_: Any, **__: Any) -> SamplerOutput:
        """Raise :class:`NotImplementedError`: batches are of nodes."""
        raise NotImplementedError("batches are of nodes")


def node_loader(
    graph: NeighbourGraph,
    labels: T,
    seeds: T,
    gather: FeatureGather,
    fan_outs: Sequence[int],
    batch: int,
    seed: int,
) -> NodeLoader:
    """Return torch-geometric's loader of mini-batches of ``seeds``, with the features ``x`` that ``gather`` reads."""
    targets = torch.arange(graph.nodes).repeat_interleave(graph.offsets.diff())
    data = Data(
        edge_index=torch.stack([graph.sources, targets]),
        y=labels,
        num_nodes=graph.nodes,
    )

    def attach(part: Data) -> Data:
        found = gather(part.n_id)
        part.x = found.rows[found.places]
        return part

    return NodeLoader(
        data,
        HopSampler(graph, fan_outs, seed),
        seeds,
        batch_size=batch,
        shuffle=True,
        transform=attach,
    )
