"""Tells from a trace of PyTorch's profiler which operators kernels belong to, and where a device waits for the host.

A kernel and the call that launched it have one correlation id in Kineto's traces, and the call has the external id of
the operator in which it was made. All that is launched by an operator can so be told from what its host code takes.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from weft.observe.launches import QUEUED

#: Categories of what runs on a device, of calls that launch it, and of what a call can be made in.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
REGIONS = ("cpu_op", "user_annotation")
#: Kernels of a stretch that is told apart from those around it.
LEAST = 4
#: Name of the operator of kernels that were launched in none.
NOWHERE = "(no operator)"

Event = dict[str, Any]


@dataclass(frozen=True)
class OperatorUse:
    """Time that calls of one operator take on the host and on the device, in microseconds.

    Attributes:
        ``name``: name of the operator.
        ``calls``: number of its calls.
        ``host``: host time of the calls, without the operators inside them.
        ``kernels``: number of kernels and copies that it has launched itself.
        ``device``: time of these kernels on the device.
        ``waited``: sum of the times from the launch of a kernel to its start.
    """

    name: str
    calls: int
    host: float
    kernels: int
    device: float
    waited: float

    @property
    def verdict(self) -> str:
        """ "launch-bound" if the operator's host code takes longer than its kernels, "host alone" without kernels, else
        "compute-bound".
        """
        if not self.kernels:
            return "host alone"
        return "launch-bound" if self.host > self.device else "compute-bound"


@dataclass(frozen=True)
class Stretch:
    """Successive kernels that all queued behind others (compute-bound) or all started at once (launch-bound).

    ``begin``: microseconds from the start of the trace's first kernel; ``length``: microseconds until the next
    stretch. ``kernels``: number of kernels. ``queued``: whether they queued.
    """

    begin: float
    length: float
    kernels: int
    queued: bool


@dataclass(frozen=True)
class DeviceGap:
    """A period in which no kernel runs on the device.

    ``begin``: microseconds from the start of the trace's first kernel; ``length``: microseconds until the next
    kernel. ``host``: name of the operator or call in which the host spent most of the period.
    """

    begin: float
    length: float
    host: str


@dataclass(frozen=True)
class DeviceUse:
    """How a profiler trace's devices spent their time.

    Attributes:
        ``operators``: use of each operator, most device time first.
        ``stretches``: stretches of kernels, in order of time.
        ``gaps``: the longest gaps, the longest first.
        ``streams``: for each ``device/stream``, the microseconds in which the stream is busy.
    """

    operators: tuple[OperatorUse, ...]
    stretches: tuple[Stretch, ...]
    gaps: tuple[DeviceGap, ...]
    streams: dict[str, float]

    def share(self, queued: bool) -> float:
        """Return the share of time, from 0 to 1, in which the device was compute-bound, or else launch-bound.

        ``queued``: which of the two: True for compute-bound, where kernels queue; False for launch-bound.
        """
        total = sum(stretch.length for stretch in self.stretches)
        part = sum(s.length for s in self.stretches if s.queued == queued)
        return part / max(total, 1e-9)


def device_use(events: Sequence[Event], most: int = 5) -> DeviceUse | None:
    """Return how the devices spent their time, from the ``events`` of a trace
    (:func:`weft.observe.launches.trace_events`).

    ``most``: number of gaps to list. Returns None if nothing runs on a device.
    """
    work = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=_start)
    if not work:
        return None
    calls = {_id(e, "correlation"): e for e in events if e.get("cat") in CALLS}
    regions = _Regions([e for e in events if e.get("cat") in REGIONS])
    waits = _waits(work, calls)
    streams: dict[str, list[Event]] = defaultdict(list)
    for event in work:
        streams[f"{_id(event, 'device')}/{_id(event, 'stream')}"].append(event)
    return DeviceUse(
        tuple(_operators(work, calls, regions, waits)),
        tuple(_stretches(work, waits)),
        tuple(_gaps(work, events, regions, most)),
        {name: sum(b - a for a, b in _spans(each)) for name, each in streams.items()},
    )


class _Regions:
    """Operators and annotations of the host, to look up by their ids and by thread and time."""

    def __init__(self, regions: Iterable[Event]) -> None:
        # outer ones first
        self.all = sorted(regions, key=lambda e: (e["ts"], -e["dur"]))
        self.by_id = {key: e for e in self.all if (key := _id(e, "External id"))}
        self.threads: dict[Any, list[Event]] = defaultdict(list)
        for event in self.all:
            self.threads[_thread(event)].append(event)
        self.starts = {key: [*map(_start, each)] for key, each in self.threads.items()}

    def around(self, call: Event | None) -> str:
        """Return the name of the innermost operator in which a call was made."""
        if call is None:
            return NOWHERE
        known = self.by_id.get(_id(call, "External id"))
        if known is not None:
            return str(known["name"])
        own = self.threads.get(_thread(call), [])
        for at in range(bisect_right(self.starts.get(_thread(call), []), call["ts"]))[
            ::-1
        ]:
            if own[at]["ts"] + own[at]["dur"] >= call["ts"]:
                return str(own[at]["name"])
        return NOWHERE

    def own_times(self) -> Iterator[tuple[Event, float]]:
        """Yield every region with the time that no region inside it takes."""
        for own in self.threads.values():
            inside = [0.0] * len(own)
            above: list[int] = []
            for at, event in enumerate(own):
                while above and _end(own[above[-1]]) <= event["ts"]:
                    above.pop()
                if above:
                    inside[above[-1]] += event["dur"]
                above.append(at)
            for event, taken in zip(own, inside, strict=True):
                yield event, max(0.0, event["dur"] - taken)


def _waits(work: Sequence[Event], calls: dict[Any, Event]) -> list[float | None]:
    """Time from launch to start of each kernel; None where one call launched several (CUDA graphs), after the first."""
    seen = set[Any]()
    waits: list[float | None] = []
    for event in work:
        key = _id(event, "correlation")
        call = calls.get(key)
        first = call is not None and key not in seen
        waits.append(max(0.0, event["ts"] - call["ts"]) if call and first else None)
        seen.add(key)
    return waits


def _operators(
    work: Sequence[Event],
    calls: dict[Any, Event],
    regions: _Regions,
    waits: Sequence[float | None],
) -> list[OperatorUse]:
    host, count = defaultdict[str, float](float), defaultdict[str, int](int)
    for region, own in regions.own_times():
        if region["cat"] == "cpu_op":
            host[region["name"]] += own
            count[region["name"]] += 1
    device, kernels = defaultdict[str, float](float), defaultdict[str, int](int)
    waited = defaultdict[str, float](float)
    for event, wait in zip(work, waits, strict=True):
        name = regions.around(calls.get(_id(event, "correlation")))
        device[name] += event["dur"]
        kernels[name] += 1
        waited[name] += wait or 0.0
    uses = [
        OperatorUse(
            name, count[name], host[name], kernels[name], device[name], waited[name]
        )
        for name in sorted({*host, *device})
    ]
    return sorted(uses, key=lambda use: (-use.device, -use.host))


def _stretches(
    work: Sequence[Event], waits: Sequence[float | None]
) -> Iterator[Stretch]:
    known = sorted(wait for wait in waits if wait is not None)
    quickest = known[: len(known) // 10 + 1]
    floor = sum(quickest) / max(1, len(quickest))
    # what a graph launches after its first kernel waits for no call
    queued = [wait is None or wait > QUEUED * floor for wait in waits]
    runs = [[kind, len(list(each))] for kind, each in groupby(queued)]
    merged: list[list[Any]] = []
    for kind, length in runs:
        if merged and (kind == merged[-1][0] or length < LEAST):
            merged[-1][1] += length
        else:
            merged.append([kind, length])
    first, at = work[0]["ts"], 0
    end = max(map(_end, work))
    for kind, length in merged:
        begin = work[at]["ts"]
        at += length
        until = work[at]["ts"] if at < len(work) else end
        yield Stretch(begin - first, until - begin, length, kind)


def _gaps(
    work: Sequence[Event], events: Sequence[Event], regions: _Regions, most: int
) -> Iterator[DeviceGap]:
    busy = list(_spans(work))
    idle = [(a[1], b[0]) for a, b in pairwise(busy)]
    first = work[0]["ts"]
    doing = [e for e in events if e.get("cat") in CALLS]
    leaves = [(event, own) for event, own in regions.own_times() if own > 0]
    for begin, end in sorted(idle, key=lambda gap: gap[0] - gap[1])[:most]:
        during = defaultdict[str, float](float)
        for event in doing:
            during[event["name"]] += _overlap(event, begin, end)
        within = sum(during.values())
        for event, own in leaves:
            during[event["name"]] += min(own, _overlap(event, begin, end))
        name = max(during, key=lambda name: during[name], default="")
        # a call lies inside an operator, and counts in its place where it takes most of the time
        if within > (end - begin) / 2:
            calls = {e["name"] for e in doing}
            name = max(calls, key=lambda name: during[name])
        yield DeviceGap(begin - first, end - begin, name if during[name] else NOWHERE)


def _spans(events: Iterable[Event]) -> Iterator[tuple[float, float]]:
    """Yield the times in which at least one of ``events``, sorted by start, is in progress."""
    span: tuple[float, float] | None = None
    for event in events:
        if span is not None and event["ts"] <= span[1]:
            span = span[0], max(span[1], _end(event))
            continue
        if span is not None:
            yield span
        span = event["ts"], _end(event)
    if span is not None:
        yield span


def _overlap(event: Event, begin: float, end: float) -> float:
    return max(0.0, min(_end(event), end) - max(event["ts"], begin))


def _start(event: Event) -> float:
    return float(event["ts"])


def _end(event: Event) -> float:
    return float(event["ts"]) + float(event["dur"])


def _thread(event: Event) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _id(event: Event, name: str) -> Any:
    return event.get("args", {}).get(name)
