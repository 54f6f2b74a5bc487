"""Flows that share the uplinks of a fat tree: exact means against draws, and what the planner makes of them."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Command
from weft.errors import UsageError
from weft.planner.fat_tree import fullest_link, uplink_share
from weft.planner.machine import Cluster


@pytest.mark.parametrize(("flows", "links"), [(1, 1), (2, 2), (4, 3), (5, 2), (3, 4)])
def test_the_fullest_link_is_the_mean_over_all_placements(
    flows: int, links: int
) -> None:
    placements = list(product(range(links), repeat=flows))
    fullest = [max(np.bincount(places)) for places in placements]
    assert fullest_link(flows, links) == pytest.approx(np.mean(fullest), rel=1e-9)


def test_draws_of_many_flows_agree() -> None:
    draw = np.random.default_rng(0)
    drawn = [np.bincount(draw.integers(16, size=32)).max() for _ in range(4000)]
    assert fullest_link(32, 16) == pytest.approx(np.mean(drawn), rel=0.02)


def test_split_flows_lie_between_a_single_path_and_sprayed_packets() -> None:
    single, split, multipath = (
        uplink_share(16, 16, way) for way in ("single", "split", "multipath")
    )
    assert single < split < multipath == 1
    assert uplink_share(16, 8, "multipath") == 0.5  # two devices to an uplink
    assert uplink_share(1, 1, "single") == 1


def test_clusters_of_one_switch_have_no_uplinks() -> None:
    tree = {"device": "H100-80GB", "leaf": 16, "routing": "single", "network": 50.0}
    small, large = (
        float(Cluster(count=count, **tree).machine().network) for count in (16, 32)
    )
    assert small == 50e9 and large == pytest.approx(
        50e9 * uplink_share(16, 16, "single")
    )
    with pytest.raises(UsageError, match="leaf is missing"):
        Cluster(device="H100-80GB", count=32, routing="single")


def test_the_plan_slows_with_collisions(tmp_path: Path, command: Command) -> None:
    steps = []
    for routing in ("multipath", "single"):
        path = tmp_path / "tree.toml"
        path.write_text(
            f'device = "H100-80GB"\ncount = 32\nleaf = 16\nrouting = "{routing}"\n'
        )
        words = (
            "--batch",
            64,
            "--seq",
            2048,
            "--pin",
            "pp=1",
            "--pin",
            "tp=1",
            "--pin",
            "zero=3",
            "--top",
            1,
            "--json",
        )
        code, text, _ = command("plan", "llama3-8b", "--cluster", path, *words)
        assert code == 0
        steps.append(json.loads(text)["layouts"][0]["seconds"])
    assert steps[0] < steps[1]
