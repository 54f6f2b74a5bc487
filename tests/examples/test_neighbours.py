"""Mini-batches of sampled neighbours: rows are those of the table, each is read once, and a model learns from them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from examples.gnnpipe.rows import Rows
from examples.neighbours.__main__ import train
from examples.neighbours.model import communities
from examples.neighbours.sampling import (
    FeatureGather,
    NeighbourGraph,
    power_law_graph,
    sample_hops,
)
from weft.memory.tier_file import TierFile


def test_neighbours_are_neighbours() -> None:
    graph = power_law_graph(300, 7, 2.2, seed=0)
    seeds = torch.arange(40)
    hops = sample_hops(graph, seeds, [3, 2], torch.Generator().manual_seed(0)).hops
    assert [tuple(hop.shape) for hop in hops] == [(40,), (40, 3), (40, 3, 2)]
    edges = {
        (node, int(near))
        for node in range(300)
        for near in graph.sources[graph.offsets[node] : graph.offsets[node + 1]]
    }
    for near, far in itertools.pairwise(hops):
        pairs = zip(near.repeat_interleave(far.shape[-1]).tolist(), far.flatten().tolist(), strict=True)  # fmt: skip
        assert {*pairs} <= edges


def test_a_node_without_neighbours_stands_for_its_own() -> None:
    graph = NeighbourGraph(torch.tensor([0, 0, 2, 2]), torch.tensor([0, 2]))
    hops = sample_hops(graph, torch.arange(3), [4], torch.Generator()).hops
    assert (hops[1][0] == 0).all() and (hops[1][2] == 2).all()
    assert {*hops[1][1].tolist()} <= {0, 2}


@pytest.mark.parametrize("stored", [False, True])
def test_each_row_is_read_once_and_is_that_of_the_table(
    stored: bool, tmp_path: Path
) -> None:
    """At the batch and fan-outs of the papers, on a power-law graph: less than half of the bytes that are asked for."""
    rng = torch.Generator().manual_seed(0)
    graph, table = power_law_graph(50_000, 15, 2.5, seed=0), torch.randn(50_000, 8, generator=rng)  # fmt: skip
    asked = sample_hops(graph, torch.randperm(50_000, generator=rng)[:1024], [10, 10], rng).all  # fmt: skip
    gather = FeatureGather(Rows(table, TierFile(tmp_path)) if stored else table)
    rows, places = gather(asked)
    assert torch.equal(rows[places], table[asked])
    assert torch.equal(rows, table[asked.unique()])
    assert gather.bytes["asked"] == len(asked) * 32 == 113_664 * 32
    assert gather.bytes["unique"] == len(asked.unique()) * 32
    assert 2 * gather.bytes["unique"] < gather.bytes["asked"]


@pytest.mark.slow(3)
def test_a_model_learns_from_neighbours(tmp_path: Path) -> None:
    """The same accuracy to the last node whether the features are in memory or in a file."""
    about = communities(1500, 4, seed=0)
    stored = Rows(about.features, TierFile(tmp_path))
    accuracy = train(about, FeatureGather(about.features), [5, 5], 128, 2)
    assert accuracy > 0.6
    assert train(about, FeatureGather(stored), [5, 5], 128, 2) == accuracy
