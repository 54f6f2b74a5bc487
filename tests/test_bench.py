"""The benchmarks run, and what they compare computes the same. Their figures are not tested here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from weft.resilience.hosts import unavailable

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("name", sorted(path.stem for path in [*BENCH.glob("*.py"), *BENCH.glob("planner/*.py")]))
def test_every_benchmark_finds_what_it_imports(name: str) -> None:
    """Two of them run every day, most others with ``make soak``."""
    importlib.import_module(name)


@pytest.mark.slow
def test_step(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "bench" / "step.py"
    path = tmp_path / "step.json"
    command = [sys.executable, str(script), "--job", "smoke", "--rounds", "2", "--steps", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    job = json.loads(path.read_text())["jobs"]["smoke"]
    assert set(job["single"]) == {"weft", "hand-written", "transformers"}
    assert all(
        row["ratio"] > 0 for table in (job["single"], job["ranks"]) for name, row in table.items() if name != "weft"
    )


@pytest.mark.soak
def test_pipeline(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "bench" / "pipeline.py"
    path = tmp_path / "pipeline.json"
    done = subprocess.run(
        [sys.executable, str(script), "--quick", "--json", str(path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert all(row["ratio"] > 0 for table in found["steps"].values() for name, row in table.items() if name != "weft")
    assert all(row["deviation"] > -0.01 for row in found["simulated"].values())  # nothing ends before it can


@pytest.mark.soak
def test_balance(tmp_path: Path) -> None:
    """Every side trains the same (asserted there), static context parallelism waits, and plans by length hardly do."""
    script, path = Path(__file__).parents[1] / "bench" / "balance.py", tmp_path / "balance.json"
    command = [sys.executable, str(script), "--quick", "--json", str(path), "--only"]
    done = subprocess.run(
        [*command, "slept4", "trained", "simulated", "planning"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    for part in ("slept4", "simulated"):
        for table in found[part].values():
            assert table["cp"]["simulated_ratio"] > 1 and table["greedy"]["simulated_idle"] < 0.2
            assert all(row["ratio"] > 0 for row in table.values())
    assert found["trained"] and found["planning"]["greedy_over_flexsp"]["worst"] < 1.2


@pytest.mark.soak
def test_activations(tmp_path: Path) -> None:
    """Keeping, recomputing and moving end at the same bits (asserted there); a slower disk takes fewer blocks."""
    script, path = Path(__file__).parents[1] / "bench" / "activations.py", tmp_path / "activations.json"
    command = [sys.executable, str(script), "--quick", "--rounds", "1", "--folder", str(tmp_path), "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["places"]["rows"]["file, all but the last"]["saved_share"] <= 0.55
    fast, *_, slow = (row["predicted"] for row in found["amount"].values())
    assert fast > slow > 0


@pytest.mark.slow
def test_placement(tmp_path: Path) -> None:
    """Static and sharded experts report the same losses (asserted there), and the latter even out the ranks' loads."""
    script, path = Path(__file__).parents[1] / "bench" / "placement.py", tmp_path / "placement.json"
    command = [sys.executable, str(script), "--rounds", "2", "--ranks", "4", "--slow", "20", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["4 ranks"]
    assert found["static"]["max_over_mean"] > 1.5 and found["sharded"]["max_over_mean"] < 1.1 and found["ratio"] > 0


@pytest.mark.soak
def test_experts(tmp_path: Path) -> None:
    """Weft and transformers, and all ways to spread experts, report the same losses (asserted there).

    Experts that were placed by what tokens choose keep more of them on a rank, on text that was not counted.
    """
    script, path = Path(__file__).parents[1] / "bench" / "experts.py", tmp_path / "experts.json"
    command = [sys.executable, str(script), "--job", "smoke", "--rounds", "2", "--steps", "40"]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    placed, smoke = found["placed"], found["jobs"]["smoke"]
    assert smoke["single"].keys() == {"weft", "transformers"} and smoke["ranks"].keys() > {"weft", "all-to-all"}
    assert min(placed[ranks]["affinity"]["fewer"] for ranks in "248") > 1.2
    assert all(placed[ranks]["load"]["load"] < placed[ranks]["random"]["load"] for ranks in "248")


@pytest.mark.soak
def test_rows(tmp_path: Path) -> None:
    """All sides give the same rows (asserted there), and ours reads what it counts, far less than a map does."""
    script, path = Path(__file__).parents[1] / "bench" / "gathered_rows.py", tmp_path / "rows.json"
    command = [
        sys.executable,
        str(script),
        "--mib",
        "64",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path),
        "--json",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, table in json.loads(path.read_text()).items():
        for row in table.values() if name.startswith("rows of") else ():
            assert row["touched"] <= row["read_by_count"] and set(row["sides"]) > {
                "weft",
                "np.memmap",
                "torch.from_file",
            }


@pytest.mark.soak
def test_resting(tmp_path: Path) -> None:
    """Experts in a file make the same logits, and bytes are counted (asserted there)."""
    script, path = Path(__file__).parents[1] / "bench" / "resting.py", tmp_path / "resting.json"
    words = ("--folder", str(tmp_path), "--turns", "1", "--tokens", "2", "--json", str(path))
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all(one["ratio"] > 0 and one["tokens"]["ahead"]["read"] > 0 for one in json.loads(path.read_text()))


@pytest.mark.soak
def test_snapshot(tmp_path: Path) -> None:
    """Steps run with and without a copy of the state after each, of which all that one rank alone has is sent."""
    script, path = Path(__file__).parents[1] / "bench" / "snapshot.py", tmp_path / "snapshot.json"
    command = [sys.executable, str(script), "--quick", "--rounds", "3", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert 0 < found["bytes_sent"] < found["bytes"] and found["ratio"] > 0 and found["cpu_ratio"] > 0


@pytest.mark.soak
def test_coded(tmp_path: Path) -> None:
    """What every code decodes is the sum (asserted there)."""
    script, path = Path(__file__).parents[1] / "bench" / "coded.py", tmp_path / "coded.json"
    words = ("--rounds", "1", "--ranks", "4", "--jobs", "4", "--traces", "0", "--json", str(path))
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for table in json.loads(path.read_text()).values():
        if isinstance(table, dict) and "slept" in table:
            slept = table["slept"]
            assert slept["m-sgc"]["load"] <= slept["gradient"]["load"] and all(
                row["ratio"] > 0 for row in slept.values()
            )


@pytest.mark.soak
@pytest.mark.skipif(bool(WHY := unavailable()), reason=WHY)
def test_islands(tmp_path: Path) -> None:
    """All sides take their steps over a slow cable; those that agree in every step report the same losses."""
    script, path = Path(__file__).parents[1] / "bench" / "islands.py", tmp_path / "islands.json"
    words = ("--quick", "--json", str(path), "--picture", str(tmp_path / "islands.svg"), "--only")
    sides = ("PyTorch's DDP", "CO2")
    done = subprocess.run([sys.executable, str(script), *words, *sides], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    plain, ddp, _ = found["trained"].values()
    assert ddp["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    (table,) = found["timed"].values()
    # Of a ring over four ranks two ways cross the cable, each with 3/2 of the gradients, in float32.
    assert table["PyTorch's DDP"]["wire"] == pytest.approx(2 * 1.5 * 4 * found["parameters"], rel=0.1)
    assert "polyline" in (tmp_path / "islands.svg").read_text()


@pytest.mark.soak
def test_noloco(tmp_path: Path) -> None:
    """Of many islands a pair's agreement takes as long as of few; one of all takes longer, level by level."""
    script, path = Path(__file__).parents[1] / "bench" / "noloco.py", tmp_path / "noloco.json"
    words = ("--islands", "2", "--seeds", "1", "--steps", "4", "--every", "2", "--rounds", "100", "--json", str(path))
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert all(loss > 0 for name, loss in found["trained"][0].items() if name.startswith(("DiLoCo", "NoLoCo")))
    times = {row["islands"]: row for row in found["simulated"]}
    assert times[1024]["noloco_s"] < 1.15 * times[64]["noloco_s"]
    assert times[1024]["tree_s"] > 1.5 * times[64]["tree_s"] > 3 * times[64]["noloco_s"]


@pytest.mark.soak
def test_serve(tmp_path: Path) -> None:
    """Batch after batch writes what joining requests do (asserted there), and each policy is good for something."""
    script, path = Path(__file__).parents[1] / "bench" / "serve.py", tmp_path / "serve.json"
    command = [
        sys.executable,
        str(script),
        "--turns",
        "1",
        "--json",
        str(path),
        "--only",
        "injected",
        "static",
        "shared",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["injected"]["chunked / whole"] < 0.6 and found["shared"]["known / new"] < 0.4
    assert found["static"]["continuous / static"] > 1.5
