"""A service over several hosts (network namespaces): every stream is whole while cables are pulled and ranks die."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import unavailable

BENCH = Path(__file__).parents[2] / "bench/cluster_hosts.py"


@pytest.mark.soak
@pytest.mark.skipif(bool(why := unavailable()), reason=why)
def test_streams_are_whole_while_hosts_are_cut_off(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--clients", "6", "--json", str(out), "--keep", str(tmp_path / "kept")]
    done = subprocess.run([sys.executable, str(BENCH), *words], timeout=1500)
    mixed, roles = json.loads(out.read_text())["services"]
    assert done.returncode == 0 and mixed["wrong"] == roles["wrong"] == []
    steps = {row["what"]: row for row in mixed["steps"]}
    assert all(row["streams"] for row in steps.values())
    assert steps["cable of an engine"]["noticed_s"] < 5
    assert steps["a rank is stopped"]["noticed_s"] < 5
    assert steps["a rank is killed"]["processes_left"] == 0
    (row,) = roles["steps"]
    assert row["moved_bytes"] and row["moved_bytes"] % row["bytes_of_a_token"] == 0
    # what the engine of prompts has sent is what has moved, and tokens and signs of life
    assert row["sent_bytes"][1] >= row["moved_bytes"]
