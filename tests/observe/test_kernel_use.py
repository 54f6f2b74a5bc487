"""Device traces in Kineto's format: operators of kernels, stretches, gaps, as ``weft profile`` says them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from weft.observe.kernel_use import device_use
from weft.observe.launches import trace_events

Event = dict[str, Any]


class Recorded:
    """A trace as Kineto writes it for a CUDA device: one host thread, stream 7."""

    def __init__(self) -> None:
        self.events: list[Event] = [
            {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 41, "tid": 0, "args": {"name": "python"}},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler",
             "ts": 0.0, "dur": 5000.0, "args": {"Op count": 0}},
        ]  # fmt: skip
        self.correlation = 900

    def op(self, number: int, name: str, ts: float, dur: float) -> None:
        args = {"External id": number, "Record function id": 0, "Ev Idx": number - 1}
        self.events.append({"ph": "X", "cat": "cpu_op", "name": name, "pid": 41, "tid": 41, "ts": ts, "dur": dur,
                            "args": args})  # fmt: skip

    def work(
        self, number: int, call: str, ts: float, starts: list[tuple[float, float]], kind: str = "kernel", **more: Any
    ) -> None:  # fmt: skip
        """A call inside of operator ``number``, and what it launches, each from a time on for so long."""
        self.correlation += 1
        ids = {"External id": number, "correlation": self.correlation}
        self.events.append({"ph": "X", "cat": "cuda_runtime", "name": call, "pid": 41, "tid": 41, "ts": ts, "dur": 4.0,
                            "args": {**ids, "cbid": 211}})  # fmt: skip
        for start, dur in starts:
            self.events += [
                {"ph": "s", "id": self.correlation, "pid": 41, "tid": 41, "ts": ts, "cat": "ac2g", "name": "ac2g"},
                {"ph": "X", "cat": kind, "name": "void cutlass::Kernel2<sm90>(Params)", "pid": 0, "tid": 7, "ts": start,
                 "dur": dur, "args": {**ids, "queued": 0, "device": 0, "context": 1, "stream": 7, "grid": [1, 1, 1],
                                      "block": [128, 1, 1], "registers per thread": 90, **more}},
                {"ph": "f", "id": self.correlation, "pid": 0, "tid": 7, "ts": start, "cat": "ac2g", "name": "ac2g",
                 "bp": "e"},
            ]  # fmt: skip

    def write(self, path: Path) -> Path:
        whole = {
            "schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": 1790857026000000000,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "computeMajor": 9, "numSms": 132}],
            "traceEvents": self.events,
        }  # fmt: skip
        text = json.dumps(whole).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path


def recorded(path: Path) -> Path:
    """Five small sums that the host launches every 50 us, a copy that it waits for, then six products that queue."""
    trace = Recorded()
    for i in range(5):
        trace.op(i + 1, "aten::add", 50.0 * i, 40.0)
        trace.work(i + 1, "cudaLaunchKernel", 50.0 * i + 10, [(50.0 * i + 15, 5.0)])
    trace.op(6, "aten::item", 250.0, 400.0)
    trace.op(7, "aten::_local_scalar_dense", 252.0, 390.0)
    copied = {"bytes": 4, "memory bandwidth (GB/s)": 0.002}
    trace.work(7, "cudaMemcpyAsync", 255.0, [(260.0, 2.0)], "gpu_memcpy", **copied)
    waits = {"External id": 7, "cbid": 131, "correlation": 899}
    trace.events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "pid": 41, "tid": 41,
                         "ts": 262.0, "dur": 370.0, "args": waits})  # fmt: skip
    for i in range(6):
        number, ts = 8 + 2 * i, 700.0 + 20 * i
        trace.op(number, "aten::linear", ts, 18.0)
        trace.op(number + 1, "aten::mm", ts + 2, 14.0)
        trace.work(number + 1, "cuLaunchKernelEx", ts + 5, [(710.0 + 300 * i, 300.0)])
    return trace.write(path)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_operators_stretches_and_gaps_by_hand(tmp_path: Path, name: str) -> None:
    use = device_use(trace_events(recorded(tmp_path / name)))
    assert use is not None
    by_name = {operator.name: operator for operator in use.operators}
    assert [o.name for o in use.operators][:2] == ["aten::mm", "aten::add"]
    product = by_name["aten::mm"]
    # of the operator that launches, not of the one around it
    assert (product.calls, product.kernels, product.device) == (6, 6, 1800.0)
    assert product.host == pytest.approx(6 * 14) and product.verdict == "compute-bound"
    assert product.waited == pytest.approx(sum(5 + 280 * i for i in range(6)))
    outer = by_name["aten::linear"]
    assert (outer.kernels, outer.verdict) == (0, "host alone")
    assert outer.host == pytest.approx(6 * 4)
    small = by_name["aten::add"]
    assert (small.host, small.device, small.verdict) == (200.0, 25.0, "launch-bound")
    assert by_name["aten::_local_scalar_dense"].device == 2.0  # the copy

    kinds = [(s.queued, s.kernels) for s in use.stretches]
    assert kinds == [(False, 7), (True, 5)]  # the first product starts at once
    assert use.stretches[1].begin == pytest.approx(1010 - 15)
    assert use.share(True) == pytest.approx(1500 / (2510 - 15))

    longest = use.gaps[0]
    assert (longest.begin, longest.length) == (262.0 - 15, 710.0 - 262)
    assert longest.host == "cudaStreamSynchronize" and len(use.gaps) == 5
    assert use.streams == {"0/7": pytest.approx(5 * 5 + 2 + 1800)}


def test_a_graph_of_kernels_counts_its_launch_once(tmp_path: Path) -> None:
    """Kernels of a CUDA graph have the id of one launch, which is in an annotation and in no operator."""
    trace = Recorded()
    trace.events.append({"ph": "X", "cat": "user_annotation", "name": "decode", "pid": 41, "tid": 41, "ts": 0.0,
                         "dur": 30.0, "args": {"External id": 1}})  # fmt: skip
    starts = [(20.0 + 10 * i, 10.0) for i in range(8)]
    trace.work(0, "cudaGraphLaunch", 10.0, starts)
    trace.work(0, "cudaLaunchKernel", 500.0, [(505.0, 1.0)])
    use = device_use(trace_events(trace.write(tmp_path / "g.json")))
    assert use is not None
    uses = {operator.name: operator for operator in use.operators}
    assert (uses["decode"].kernels, uses["decode"].waited) == (8, 10.0)
    assert uses["(no operator)"].kernels == 1
    assert [gap.length for gap in use.gaps] == [405.0]


def test_profile_prints_them(tmp_path: Path, command: Command) -> None:
    file = recorded(tmp_path / "run.json.gz")
    code, out, error = command("profile", file)
    assert code == 0, error
    assert "60% of the time compute-bound, 40% launch-bound, in 2 stretches" in out
    assert (
        "nothing on the device for 448.0 us at 0.247 ms: the host is in cudaStreamSynchronize"
        in out
    )
    rows = [line.split("\t") for line in out.splitlines() if line.startswith("aten::")]
    assert rows[0] == ["aten::mm", "6", "0.08", "6", "1.80", "compute-bound"]
    code, out, _ = command("profile", file, "--json")
    (said,) = json.loads(out)
    assert code == 0 and said["device"]["operators"][1]["name"] == "aten::add"
    code, out, _ = command("profile", file, "--top", 0)
    assert code == 0 and "aten::mm" not in out
    (tmp_path / "cut.json.gz").write_bytes(file.read_bytes()[:100])
    code, _, error = command("profile", tmp_path / "cut.json.gz")
    assert code == 2 and "is no trace" in error
