"""Tells from traces of PyTorch's profiler whether a program is bound by launching kernels or by running them.

A kernel that is launched while the device is idle starts at once; a kernel that is launched while others run is queued.
The time from launch to start, summed over all kernels, is TKLQT (SKIP, Vellaisamy et al. 2025, 2504.11750). It stays
flat while the host is slower than the device, and rises once kernels queue: with growing batches, the first batch whose
TKLQT per kernel is twice the least is bound by compute. A trace without a device has no launches, so it shows only the
time in and between operators.
"""

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import UsageError

#: First bytes of a compressed file.
GZIP = b"\x1f\x8b"

#: Kernels queue once they wait so many times as long as the quickest.
QUEUED = 2.0
#: A device that is busy for less than this share of the time waits for launches, however long some kernels queue.
BUSY = 0.5

#: Microseconds: of an operator that is shorter, most is what PyTorch does around the computation.
SMALL = 20.0


@dataclass(frozen=True)
class Launches:
    """Kernel launch statistics of one profiler trace, with times in microseconds unless stated otherwise.

    A share is a number from 0 to 1.

    Attributes:
        ``name``: name of the trace.
        ``seconds``: seconds from its first event to its last.
        ``kernels``: number of kernels.
        ``waited``: sum over kernels of the time from the kernel's launch to its start (total kernel launch and
            queuing time, TKLQT).
        ``floor``: mean time from launch to start of the tenth of the kernels that start soonest after their launch.
        ``busy``: share of the trace's duration in which a kernel runs.
        ``mean``: mean time of a kernel, or of an operator if there is no device.
        ``between``: share of the trace's duration in which no operator runs on the host.
        ``small``: share of the operators' time that is spent in short operators.
    """

    name: str
    seconds: float  # from its first event to its last
    kernels: int
    waited: float  # TKLQT
    floor: float  # of the quickest tenth of the kernels, each from launch to start
    busy: float  # share of the time in which a kernel runs
    mean: float  # of a kernel, or of an operator if there is no device
    between: float  # share of the time in no operator of the host
    small: float  # share of the operators' time in short ones

    @property
    def queued(self) -> float:
        """Mean microseconds from a kernel's launch to its start: :attr:`waited` divided by the number of kernels."""
        return self.waited / max(1, self.kernels)

    @property
    def verdict(self) -> str:
        """Sentence that says whether the program is limited by launching kernels or by running them."""
        if not self.kernels:
            overhead = self.between + (1 - self.between) * self.small
            bound = "overhead-bound" if overhead > 0.5 else "compute-bound"
            return f"{bound}: {overhead:.0%} of the time between operators or in short ones (no device in the trace)"
        if self.queued > QUEUED * self.floor and self.busy >= BUSY:
            return f"compute-bound: kernels queue {self.queued / self.floor:.1f} times as long as the quickest"
        return f"launch-bound: the device rests {1 - self.busy:.0%} of the time"


def trace_events(path: Path) -> list[dict[str, Any]]:
    """Return the events with a duration from a trace file that ``torch.profiler`` exported for Chrome.

    ``path``: the file, compressed (.gz) or not. Each event is a dict with the fields of Chrome's trace format; times
    are in microseconds. Raises :class:`UsageError` for other files.
    """
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == GZIP else data
        return [
            e
            for e in json.loads(text)["traceEvents"]
            if e.get("ph") == "X" and "dur" in e
        ]
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        zlib.error,
    ) as error:
        raise UsageError(
            f"{path} is no trace of torch.profiler's (export_chrome_trace): {error!r}"
        ) from None


def launches_of(path: Path, events: Sequence[dict[str, Any]]) -> Launches:
    """Return the launch statistics of the trace ``path``, computed from its ``events``.

    Raises :class:`UsageError` if the trace has neither kernels nor operators.
    """
    kernels = [e for e in events if e.get("cat") == "kernel"]
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    if not operators and not kernels:
        raise UsageError(
            f"{path} has no operator and no kernel; record activities of the host and the device"
        )
    launched = {
        _number(e): e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    waits = sorted(
        max(0.0, e["ts"] - launched[_number(e)])
        for e in kernels
        if _number(e) in launched
    )
    counted = kernels or operators
    first, last = (
        min(e["ts"] for e in counted),
        max(e["ts"] + e["dur"] for e in counted),
    )
    leaves = list(_leaves(operators))
    inside, total = _covered(operators), max(last - first, 1e-9)
    return Launches(
        path.name, total / 1e6, len(waits), sum(waits), sum(waits[: len(waits) // 10 + 1]) / (len(waits) // 10 + 1),
        _covered(kernels) / total, sum(e["dur"] for e in counted) / len(counted), max(0.0, 1 - inside / total),
        sum(x for x in leaves if x < SMALL) / max(sum(leaves), 1e-9),
    )  # fmt: skip


def _number(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def _covered(events: Iterable[dict[str, Any]]) -> float:
    """Return the microseconds in which at least one of ``events`` is in progress."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda e: e["ts"]):
        total += max(0.0, event["ts"] + event["dur"] - max(event["ts"], end))
        end = max(end, event["ts"] + event["dur"])
    return total


def _leaves(events: Sequence[dict[str, Any]]) -> Iterable[float]:
    """Yield the lengths of the operators that call no other operator."""
    order = sorted(events, key=lambda e: (str(e.get("tid")), e["ts"], -e["dur"]))
    for event, following in zip(order, [*order[1:], None], strict=True):
        end = event["ts"] + event["dur"]
        if (
            following is None
            or following.get("tid") != event.get("tid")
            or following["ts"] >= end
        ):
            yield event["dur"]


def knee(traces: Sequence[Launches]) -> Launches | None:
    """Return the first of ``traces`` whose kernels wait clearly longer for their start than in the best trace.

    It marks the batch size from which kernels queue, because the device is the limit. Returns None if there is no such
    trace. ``traces``: traces in the order of growing batch sizes.
    """
    least = min((trace.queued for trace in traces if trace.kernels), default=0.0)
    return next(
        (trace for trace in traces if trace.kernels and trace.queued > QUEUED * least),
        None,
    )
