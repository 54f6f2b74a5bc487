"""Nodes are assigned to places of a layout by measured links: exactly for few, by annealing for many."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Command
from weft.errors import UsageError
from weft.layout.layout import Layout
from weft.planner import node_mapping
from weft.planner.node_mapping import checked_links, flow_seconds, flows_of, map_nodes


def planted(
    layout: Layout, per_node: int, seed: int
) -> tuple[list[node_mapping.Flows], np.ndarray, np.ndarray]:
    """Return the flows of a layout, links that are fast where a hidden order of nodes needs them, and this order."""
    flows = flows_of(layout, per_node, {"pp": 1.0, "dp": 4.0})
    nodes = layout.world // per_node
    hidden = np.random.default_rng(seed).permutation(nodes)
    links = np.full((nodes, nodes), 2.0)
    for flow in flows:
        source, target = np.nonzero(flow.counts)
        links[hidden[source], hidden[target]] = 20.0
    return flows, links, hidden


def test_flows_are_the_pairs_of_nodes_that_talk() -> None:
    pipeline, replicas = flows_of(
        Layout(pp=2, dp=2, tp=4), 4, {"pp": 1.0, "dp": 1.0, "tp": 1.0}
    )
    # [stage, replica]: nodes 0 1 are stage 0, nodes 2 3 stage 1; four ranks of a node each send their own
    assert np.argwhere(pipeline.counts).tolist() == [[0, 2], [1, 3]]
    assert np.argwhere(replicas.counts).tolist() == [[0, 1], [1, 0], [2, 3], [3, 2]]
    assert pipeline.counts.max() == replicas.counts.max() == 4
    assert not flows_of(Layout(tp=8), 8, {"tp": 1.0})


def test_few_nodes_are_tried_in_every_order() -> None:
    flows, links, _ = planted(Layout(pp=3, dp=2, tp=2), 2, seed=3)
    mapping = map_nodes(flows, links)
    speed = np.where(np.eye(6, dtype=bool), np.inf, links)
    least = min(
        sum(flow_seconds(flows, speed, np.array(order)).values())
        for order in permutations(range(6))
    )
    assert mapping.exact and mapping.mapped == pytest.approx(least)
    assert mapping.saved == pytest.approx(0.9)


def test_annealing_finds_a_planted_order_of_eight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_mapping, "SWAPS", 1500)
    flows, links, _ = planted(Layout(pp=4, dp=2, tp=4), 4, seed=1)
    mapping = map_nodes(flows, links)
    assert not mapping.exact and mapping.saved == pytest.approx(0.9)
    assert sorted(mapping.nodes) == list(range(8))
    assert mapping == map_nodes(flows, links)


def test_even_links_leave_the_nodes_in_their_own_order() -> None:
    flows, links, _ = planted(Layout(pp=2, dp=2, tp=2), 2, seed=0)
    mapping = map_nodes(flows, np.full_like(links, 7.0))
    assert mapping.nodes == (0, 1, 2, 3) and mapping.saved == 0


@pytest.mark.parametrize(
    "links", [[[0, 1]], [[0, 1], [1, 0]], [[0, 0, 1], [1, 0, 1], [1, 1, 0]]]
)
def test_tables_of_links_that_are_none(links: list[list[float]]) -> None:
    with pytest.raises(UsageError, match="GB/s"):
        checked_links(links, 3)


def test_the_command_names_the_nodes(tmp_path: Path, command: Command) -> None:
    rows = [[100.0] * 4 for _ in range(4)]
    for slow, other in ((0, 1), (1, 0), (2, 3), (3, 2)):
        rows[slow][other] = 5.0
    path = tmp_path / "cluster.toml"
    path.write_text(
        f'device = "A100-80GB"\ncount = 32\nnetwork = 12.5\nlinks = {rows}\n'
    )
    pins = [
        w
        for pin in ("pp=2", "tp=8", "shard=2", "schedule=1f1b")
        for w in ("--pin", pin)
    ]
    code, text, _ = command(
        "plan", "llama3-8b", "--cluster", path, "--batch", 64, "--seq", 2048, *pins
    )
    assert code == 0
    order = text.split("nodes   ")[1].split(" (")[0].split()
    # replicas avoid the two slow links: stages hold nodes of different pairs
    assert {order[0], order[1]} not in ({"0", "1"}, {"2", "3"})
    path.write_text('device = "A100-80GB"\ncount = 32\nlinks = [[0, 1], [1, 0]]\n')
    code, _, error = command(
        "plan", "llama3-8b", "--cluster", path, "--batch", 64, "--seq", 2048, *pins
    )
    assert code == 2 and "a row for each of 4 nodes" in error
