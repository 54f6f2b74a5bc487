"""Pipelines over groups of unlike devices: sized by speed, replicas inside a group, memory of each group kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from weft.errors import UsageError
from weft.planner.engine_constants import ENGINES
from weft.planner.finalists import refine
from weft.planner.layout_search import Pin, search
from weft.planner.machine import Cluster, load_cluster
from weft.planner.mixed_cluster import MixedPlan, mixed_plans
from weft.planner.planned_model import SHAPES

SHAPE = SHAPES["llama3-8b"]


def cluster_file(folder: Path, *groups: dict[str, Any], across: float = 25) -> str:
    lines = [f"across = {across}"]
    for group in groups:
        lines += ["[[groups]]", *(f"{key} = {value!r}" for key, value in group.items())]
    path = folder / "mixed.toml"
    path.write_text("\n".join(lines).replace("'", '"'))
    return str(path)


def planned(cluster: Cluster, *pins: str) -> list[MixedPlan]:
    engine = replace(ENGINES["megatron"], jitter=0.0)
    demands = [Pin.parse(pin) for pin in ("dp=1", "cp=1", "recompute=none", *pins)]
    searched = search(SHAPE, cluster, engine, 64, 2048, 16, demands)
    return mixed_plans(searched, cluster, 16)


def group(device: str, count: int = 16, network: float = 25) -> dict[str, Any]:
    return {
        "name": device.lower(),
        "device": device,
        "count": count,
        "network": network,
    }


PINS = ("pp=4", "tp=2", "schedule=1f1b", "virtual=1", "micro_batch=1")


def test_what_a_recipe_refuses_is_not_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.planner.layout_search.MOST_BESIDE", 3)
    monkeypatch.setattr("weft.planner.mixed_cluster._best_order", pytest.fail)
    cluster = load_cluster(cluster_file(tmp_path, group("A100-80GB"), group("H100-80GB")))  # fmt: skip
    pins = [Pin.parse(pin) for pin in ("tp=2", "schedule=1f1b", "recompute=none")]
    asked: list[object] = []

    def refusal(plan: object, barriers: int = 0) -> str:
        asked.append(plan)
        return "no; mend it"

    searched = search(SHAPE, cluster, ENGINES["megatron"], 64, 2048, 16, pins)
    assert mixed_plans(replace(searched, refusal=refusal), cluster, 16) == []
    assert len(asked) == 3
    assert "for pipelines over groups after 3 refused" in searched.unasked_line()


def test_two_groups_alike_are_one_cluster(tmp_path: Path) -> None:
    cluster = load_cluster(
        cluster_file(tmp_path, group("A100-80GB"), group("A100-80GB"))
    )
    mixed = planned(cluster, *PINS)[0]
    whole = Cluster(device="A100-80GB", count=32, network=25)
    engine = replace(ENGINES["megatron"], jitter=0.0)
    searched = search(
        SHAPE,
        whole,
        engine,
        64,
        2048,
        16,
        [Pin.parse(pin) for pin in ("cp=1", "recompute=none", *PINS)],
    )
    final = refine(searched, mixed.plan, 0.0)
    assert final is not None
    assert mixed.seconds == pytest.approx(final.seconds, rel=0.02)
    assert mixed.layers == tuple(final.layers(rank) for rank in range(4))
    assert mixed.seconds == pytest.approx(mixed.even, rel=1e-9)


def test_stages_are_as_large_as_their_devices_are_fast(tmp_path: Path) -> None:
    cluster = load_cluster(
        cluster_file(tmp_path, group("H100-80GB"), group("A100-80GB"))
    )
    mixed = planned(cluster, *PINS)[0]
    of = dict.fromkeys(("h100-80gb", "a100-80gb"), 0)
    for place, layers in zip(mixed.groups, mixed.layers, strict=True):
        of[place.title] += layers
    assert sum(of.values()) == SHAPE.layers
    assert of["h100-80gb"] / of["a100-80gb"] == pytest.approx(
        989 * 0.88 / (312 * 0.76), rel=0.35
    )
    assert mixed.seconds < 0.7 * mixed.even
    # two pipelines that share the step as their speeds allow, each of one kind, are about as fast
    alone = [
        planned(
            load_cluster(cluster_file(tmp_path, group(device), group(device))), *PINS
        )[0].seconds
        for device in ("H100-80GB", "A100-80GB")
    ]
    together = 2 / (1 / alone[0] + 1 / alone[1])
    assert 0.9 * together < mixed.seconds < 1.2 * together


def test_only_hops_cross_between_groups(tmp_path: Path) -> None:
    groups = group("A100-80GB"), group("A100-80GB")
    near, far = (
        planned(load_cluster(cluster_file(tmp_path, *groups, across=across)), *PINS)[0]
        for across in (25, 0.5)
    )
    hop = 2 * 2048 * SHAPE.embed / 2 / 0.5e9
    # each of 16 microbatches crosses there and back; gradients do not
    assert near.seconds < far.seconds < near.seconds + 2 * (16 + 4) * hop
    slow = replace_network(tmp_path, 0.5)
    assert planned(slow, *PINS)[0].seconds > far.seconds + 0.15


def replace_network(folder: Path, network: float) -> Cluster:
    groups = group("A100-80GB", network=network), group("A100-80GB", network=network)
    return load_cluster(cluster_file(folder, *groups, across=0.5))


def test_each_group_keeps_to_its_memory(tmp_path: Path) -> None:
    small = group("A100-80GB") | {"memory": 24}
    mixed = planned(
        load_cluster(cluster_file(tmp_path, group("A100-80GB"), small)), *PINS
    )
    roomy = planned(
        load_cluster(cluster_file(tmp_path, group("A100-80GB"), group("A100-80GB"))),
        *PINS,
    )
    assert roomy
    for plan in mixed:
        assert plan.gib <= 80
    tiny = group("A100-80GB") | {"memory": 2}
    with pytest.raises(UsageError, match="memory rules out all"):
        planned(load_cluster(cluster_file(tmp_path, tiny, tiny)), *PINS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "across = 3\ndevice = 'V100'\n[[groups]]\ndevice = 'V100'\ncount = 8",
            "device stands beside",
        ),
        ("[[groups]]\ndevice = 'V100'\ncount = 8", "across is missing"),
        ("device = 'V100'\ncount = 8\nacross = 3", "groups is missing"),
        ("across = 3\n[[groups]]\ndevice = 'V1000X'\ncount = 0", "count"),
        ("across = 3\n[[groups]]\ndevice = 'Z80'\ncount = 8", "'Z80' is not known"),
        ("across = 3\ngroups = 3", "groups is no list"),
        (
            "across = 3\n[[groups]]\ndevice = 'V100'\ncount = 8\nper_node = 3",
            "no multiple of its per_node = 3",
        ),
        (
            "across = 3\n[[groups]]\ndevice = 'V100'\ncount = 8\ncard = 'arcnet'",
            "card = 'arcnet'",
        ),
        ("across = 'far'\n[[groups]]\ndevice = 'V100'\ncount = 8", "across = 'far'"),
        (
            "device = 'CPU'\ncount = 4\n[calibration]\nwindows = [[1.0, 'a']]",
            "windows is no table",
        ),
    ],
)
def test_files_that_say_too_little_or_too_much(
    tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UsageError, match=says):
        load_cluster(str(tmp_path / "c.toml"))


def test_the_command_says_where_layers_go(tmp_path: Path, command: Command) -> None:
    path = cluster_file(tmp_path, group("A100-80GB", 8), group("V100", 8), across=3)
    code, text, _ = command(
        "plan",
        "llama3-8b",
        "--cluster",
        path,
        "--batch",
        "32",
        "--seq",
        "1024",
        "--pin",
        "schedule=1f1b",
        "--pin",
        "cp=1",
    )
    assert (
        code == 0
        and "layers by pipeline rank: " in text
        and "v100 " in text
        and "equal stages" in text
    )
