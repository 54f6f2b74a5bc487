"""The benchmarks run, and what they compare computes the same. Their figures are not tested here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts import unavailable

BENCH = Path(__file__).parents[1] / "bench"


def figures_of(name: str, folder: Path, *words: str, timeout: float = 300) -> Any:
    """What the benchmark ``name`` writes to ``--json``."""
    path = folder / f"{name}.json"
    command = [sys.executable, str(BENCH / f"{name}.py"), "--json", str(path), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    sorted(path.stem for path in [*BENCH.glob("*.py"), *BENCH.glob("planner/*.py")]),
)
def test_every_benchmark_finds_what_it_imports(name: str) -> None:
    """One of them runs every day, most others with ``make soak``."""
    importlib.import_module(name)


@pytest.mark.soak
def test_step(tmp_path: Path) -> None:
    job = figures_of(
        "step", tmp_path, "--job", "smoke", "--rounds", "2", "--steps", "1"
    )["jobs"]["smoke"]
    assert set(job["single"]) == {"weft", "hand-written", "transformers"}
    assert all(
        row["ratio"] > 0
        for table in (job["single"], job["ranks"])
        for name, row in table.items()
        if name != "weft"
    )


@pytest.mark.soak
def test_widened(tmp_path: Path) -> None:
    """On a CPU without bfloat16, LoRA in it has half of the bytes and most of the pace of float32."""
    found = figures_of(
        "widened", tmp_path, "--layers", "1", "--rounds", "1", "--length", "64"
    )
    narrow, wide = (found["lora"][dtype] for dtype in ("bfloat16", "float32"))
    assert (
        narrow["products in float32"]
        and 2 * narrow["bytes of frozen weights"] == wide["bytes of frozen weights"]
    )
    assert found["bfloat16 over float32"] > 0.5 and narrow["losses"] == pytest.approx(
        wide["losses"], rel=0.01
    )


@pytest.mark.soak
def test_pipeline(tmp_path: Path) -> None:
    found = figures_of("pipeline", tmp_path, "--quick")
    assert all(
        row["ratio"] > 0
        for table in found["steps"].values()
        for name, row in table.items()
        if name != "weft"
    )
    # nothing ends before it can
    assert all(row["deviation"] > -0.01 for row in found["simulated"].values())


@pytest.mark.soak
def test_alternating(tmp_path: Path) -> None:
    """Every number of units on the device ends at the same bits (asserted there)."""
    (found,) = figures_of("alternating", tmp_path, "--quick", "--rounds", "1")["links"]
    assert 0 < found["chosen"] < found["units"] and found["host over chosen"] > 1


@pytest.mark.soak
def test_balance(tmp_path: Path) -> None:
    """Every side trains the same (asserted there), static context parallelism waits, and plans by length hardly do."""
    found = figures_of(
        "balance",
        tmp_path,
        "--quick",
        "--only",
        "slept4",
        "trained",
        "simulated",
        "planning",
    )
    for part in ("slept4", "simulated"):
        for table in found[part].values():
            assert (
                table["cp"]["simulated_ratio"] > 1
                and table["greedy"]["simulated_idle"] < 0.2
            )
            assert all(row["ratio"] > 0 for row in table.values())
    assert found["trained"] and found["planning"]["greedy_over_flexsp"]["worst"] < 1.2


@pytest.mark.soak
def test_activations(tmp_path: Path) -> None:
    """Keeping, recomputing and moving end at the same bits (asserted there); a slower disk takes fewer blocks."""
    found = figures_of(
        "activations", tmp_path, "--quick", "--rounds", "1", "--folder", str(tmp_path)
    )
    assert found["places"]["rows"]["file, all but the last"]["saved_share"] <= 0.55
    fast, *_, slow = (row["predicted"] for row in found["amount"].values())
    assert fast > slow > 0


@pytest.mark.soak  # equality with one device, bytes and balance daily: tests/parallel/test_experts.py
def test_placement(tmp_path: Path) -> None:
    """Static and sharded experts report the same losses (asserted there), and the latter even out the ranks' loads."""
    words = ("--rounds", "2", "--ranks", "4", "--slow", "5", "--only", "zipf")
    found = figures_of("placement", tmp_path, *words)["4 ranks"]["zipf"]
    assert (
        found["static"]["max_over_mean"] > 1.5
        and found["sharded"]["max_over_mean"] < 1.1
        and found["ratio"] > 0
    )
    assert found["prediction error"] == found["drift"] == 0


@pytest.mark.soak
def test_placement_by_routing_of_a_real_run(tmp_path: Path) -> None:
    words = (
        "--rounds",
        "2",
        "--ranks",
        "4",
        "--slow",
        "5",
        "--trained",
        "14",
        "--only",
        "trained",
    )
    found = figures_of("placement", tmp_path, *words)["4 ranks"]["trained"]
    assert 0 < found["prediction error"] < found["drift"] < 1
    assert found["sharded"]["max_over_mean"] < found["static"]["max_over_mean"]


@pytest.mark.soak
def test_experts(tmp_path: Path) -> None:
    """Weft and transformers, and all ways to spread experts, report the same losses (asserted there).

    Experts that were placed by what tokens choose keep more of them on a rank, on text that was not counted.
    """
    found = figures_of(
        "experts", tmp_path, "--job", "smoke", "--rounds", "2", "--steps", "40"
    )
    placed, smoke = found["placed"], found["jobs"]["smoke"]
    assert smoke["single"].keys() == {"weft", "transformers"} and smoke[
        "ranks"
    ].keys() > {"weft", "all-to-all"}
    assert min(placed[ranks]["affinity"]["fewer"] for ranks in "248") > 1.2
    assert all(
        placed[ranks]["load"]["load"] < placed[ranks]["random"]["load"]
        for ranks in "248"
    )


@pytest.mark.soak
def test_rows(tmp_path: Path) -> None:
    """All sides give the same rows (asserted there), and ours reads what it counts, far less than a map does."""
    found = figures_of(
        "gathered_rows",
        tmp_path,
        "--mib",
        "64",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path),
    )
    for name, table in found.items():
        for row in table.values() if name.startswith("rows of") else ():
            assert row["touched"] <= row["read_by_count"] and set(row["sides"]) > {
                "weft",
                "np.memmap",
                "torch.from_file",
            }


@pytest.mark.soak
def test_rl_weights(tmp_path: Path) -> None:
    """All sides leave the same weights (asserted there); ours receives what is lacking, and holds less on the way."""
    words = ("--rounds", "2", "--layers", "1", "--cases", "1", "--bucket", "8")
    found = figures_of("rl_weights", tmp_path, *words)
    (row,) = found["cases"].values()
    moved = row["bytes by rank"]
    lacking = zip(moved["generates"], moved["trained"], strict=True)
    # norms, which each rank has whole, are shared
    assert all(
        abs(got - (need - own)) < 2**17
        for got, (need, own) in zip(moved["received"], lacking, strict=True)
    )
    assert max(moved["buffer"]) <= found["bucket"] and row["share"] > 0


@pytest.mark.soak
def test_resting(tmp_path: Path) -> None:
    """Experts in a file make the same logits, and bytes are counted (asserted there)."""
    found = figures_of(
        "resting", tmp_path, "--folder", str(tmp_path), "--turns", "1", "--tokens", "2"
    )
    assert all(one["ratio"] > 0 and one["tokens"]["ahead"]["read"] > 0 for one in found)


@pytest.mark.soak
def test_snapshot(tmp_path: Path) -> None:
    """Steps run with and without a copy of the state after each, of which all that one rank alone has is sent."""
    found = figures_of("snapshot", tmp_path, "--quick", "--rounds", "3")
    assert (
        0 < found["bytes_sent"] < found["bytes"]
        and found["ratio"] > 0
        and found["cpu_ratio"] > 0
    )


@pytest.mark.soak
def test_coded(tmp_path: Path) -> None:
    """What every code decodes is the sum (asserted there)."""
    found = figures_of(
        "coded",
        tmp_path,
        "--rounds",
        "1",
        "--ranks",
        "4",
        "--jobs",
        "4",
        "--traces",
        "0",
    )
    for table in found.values():
        if isinstance(table, dict) and "slept" in table:
            slept = table["slept"]
            assert slept["m-sgc"]["load"] <= slept["gradient"]["load"] and all(
                row["ratio"] > 0 for row in slept.values()
            )


@pytest.mark.soak
@pytest.mark.skipif(bool(WHY := unavailable()), reason=WHY)
def test_islands(tmp_path: Path) -> None:
    """All sides take their steps over a slow cable; those that agree in every step report the same losses."""
    words = (
        "--quick",
        "--picture",
        str(tmp_path / "islands.svg"),
        "--only",
        "PyTorch's DDP",
        "CO2",
    )
    found = figures_of("islands", tmp_path, *words, timeout=600)
    plain, ddp, _ = found["trained"].values()
    assert ddp["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    (table,) = found["timed"].values()
    # Of a ring over four ranks two ways cross the cable, each with 3/2 of the gradients, in float32.
    assert table["PyTorch's DDP"]["wire"] == pytest.approx(
        2 * 1.5 * 4 * found["parameters"], rel=0.1
    )
    assert "polyline" in (tmp_path / "islands.svg").read_text()


@pytest.mark.soak
def test_noloco(tmp_path: Path) -> None:
    """Of many islands a pair's agreement takes as long as of few; one of all takes longer, level by level."""
    found = figures_of(
        "noloco",
        tmp_path,
        "--islands",
        "2",
        "--seeds",
        "1",
        "--steps",
        "4",
        "--every",
        "2",
        "--rounds",
        "100",
    )
    assert all(
        loss > 0
        for name, loss in found["trained"][0].items()
        if name.startswith(("DiLoCo", "NoLoCo"))
    )
    times = {row["islands"]: row for row in found["simulated"]}
    assert times[1024]["noloco_s"] < 1.15 * times[64]["noloco_s"]
    assert times[1024]["tree_s"] > 1.5 * times[64]["tree_s"] > 3 * times[64]["noloco_s"]


@pytest.mark.soak
def test_serve(tmp_path: Path) -> None:
    """Batch after batch writes what joining requests do (asserted there), and each policy is good for something."""
    found = figures_of(
        "serve",
        tmp_path,
        "--turns",
        "1",
        "--only",
        "injected",
        "static",
        "shared",
        timeout=600,
    )
    assert (
        found["injected"]["chunked / whole"] < 0.6
        and found["shared"]["known / new"] < 0.4
    )
    assert found["static"]["continuous / static"] > 1.5


@pytest.mark.soak
def test_rl_staleness(tmp_path: Path) -> None:
    words = ("--updates", "6", "--turns", "1", "--bounds", "0", "1")
    rows = figures_of("rl_staleness", tmp_path, *words)
    for kind in ("uniform", "lognormal", "logged"):
        assert set(rows[kind]["0"]["lags"]) == {"0"}
        assert set(rows[kind]["1"]["lags"]) == {"0", "1"}
        assert rows[kind]["1"]["seconds"] < rows[kind]["0"]["seconds"]


@pytest.mark.soak
def test_rl_faults(tmp_path: Path) -> None:
    words = ("--faults", "8", "--trainers", "1", "--pause", "2")
    row = figures_of("rl_faults", tmp_path, *words, timeout=600)
    assert row["all_faults"] == 8
    assert row["other_answers"] == row["processes_left_behind"] == 0
    assert row["answers"] == 12 * row["updates"]
