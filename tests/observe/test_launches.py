"""``weft profile``: TKLQT and busy time of traces made by hand, the knee among them, and a model traced on a CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.serve.running import build
from weft.observe.launches import Launches, knee, launches_of, trace_events


def trace(
    path: Path, launches: list[float], starts: list[float], length: float
) -> Path:
    """Kernels of ``length`` us, launched and started when the lists say, inside one operator."""
    whole = max(starts) + length
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": whole, "tid": 1, "args": {}},
        {"ph": "M", "name": "process_name", "args": {}}, {"ph": "X", "cat": "cuda_runtime", "ts": 3, "dur": 1},
    ]  # fmt: skip
    for number, (launch, start) in enumerate(zip(launches, starts, strict=True)):
        args = {"correlation": number}
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": launch,
                "dur": 2,
                "args": args,
            }
        )
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm",
                "ts": start,
                "dur": length,
                "args": args,
            }
        )
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def read_launches(path: Path) -> Launches:
    return launches_of(path, trace_events(path))


def queue(
    path: Path, length: float, pause: float = 10, floor: float = 4, count: int = 50
) -> Launches:
    """A host that launches every ``pause`` us, and a device that takes one kernel of ``length`` after the other."""
    starts, free = [], 0.0
    for number in range(count):
        starts.append(max(number * pause + floor, free))
        free = starts[-1] + length
    return read_launches(
        trace(path, [number * pause for number in range(count)], starts, length)
    )


def test_tklqt_by_hand(tmp_path: Path) -> None:
    found = read_launches(trace(tmp_path / "a.json", [0, 10, 20], [4, 24, 44], 20))
    assert (
        found.kernels == 3
        and found.waited == pytest.approx(4 + 14 + 24)
        and found.queued == pytest.approx(14)
    )
    assert (
        found.busy == pytest.approx(60 / 60)
        and found.mean == 20
        and found.seconds == pytest.approx(60e-6)
    )
    idle = read_launches(trace(tmp_path / "b.json", [0, 50], [5, 55], 10))
    assert (
        idle.busy == pytest.approx(20 / 60)
        and idle.verdict.startswith("launch-bound")
        and "67%" in idle.verdict
    )


def test_the_knee_is_where_kernels_begin_to_queue(tmp_path: Path) -> None:
    """Kernels as long as a tenth, half, a little more than one and five of the host's pauses."""
    found = [queue(tmp_path / f"{length}.json", length) for length in (1, 5, 10.3, 50)]
    assert [one.verdict.split(":")[0] for one in found] == ["launch-bound"] * 2 + [
        "compute-bound"
    ] * 2
    at = knee(found)
    assert (
        at is not None
        and at.name == "10.3.json"
        and found[0].queued == found[1].queued == 4
    )
    assert knee(found[:2]) is None and knee([]) is None


def test_a_model_on_a_cpu(tmp_path: Path, command: Command, monkeypatch: Any) -> None:
    """Two batches of a tiny model: what is said is of operators alone. How long they take is the machine's."""
    from weft.generate.decoding_trace import trace_decoding

    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    files = [trace_decoding(build(), batch, 9, 4, tmp_path) for batch in (1, 3)]
    # the profiler's library writes nothing into the table
    assert os.environ["KINETO_LOG_LEVEL"] == "99"
    code, out, error = command("profile", *files, "--json")
    found = json.loads(out)
    assert code == 0, error
    assert [one["name"] for one in found] == ["batch-1.json", "batch-3.json"]
    assert all(
        one["kernels"] == 0 and "no device in the trace" in one["verdict"]
        for one in found
    )
    assert all(
        one["mean"] > 0 and 0 < one["between"] < 1 and 0 < one["small"] <= 1
        for one in found
    )
    code, out, _ = command("profile", *files)
    assert code == 0 and "no device in the trace" in out and "launch-bound" not in out
    # into a pipe: whole names, no lines drawn
    rows = [line.split("\t") for line in out.splitlines() if "\t" in line]
    assert [row[0] for row in rows] == ["trace", "batch-1.json", "batch-3.json"] and {
        *map(len, rows)
    } == {7}


def test_long_operators_are_compute(tmp_path: Path) -> None:
    """Of an operator and the one inside it the inner one counts."""
    events = [{"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": 1}
              for name, ts, dur in (("aten::linear", 0, 100), ("aten::mm", 2, 90), ("aten::add", 110, 5))]  # fmt: skip
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    found = read_launches(tmp_path / "t.json")
    assert found.between == pytest.approx(10 / 115) and found.small == pytest.approx(
        5 / 95
    )
    assert found.verdict.startswith("compute-bound: 14%")


@pytest.mark.parametrize(("words", "said"), [
    ([], "give traces to read, or --checkpoint"), (["none.json"], "cannot read the trace none.json: No such file"),
    (["empty.json"], "has no operator and no kernel"), (["list.json"], "is no trace"),
    (["--checkpoint", "x", "--batches", "1,a"], "--batches 1,a"),
])  # fmt: skip
def test_mistakes(
    command: Command, words: list[str], said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.json").write_text('{"traceEvents": []}')
    Path("list.json").write_text("[]")
    code, _, error = command("profile", *words)
    assert code == 2 and said in error
