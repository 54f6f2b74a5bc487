"""Where the time of one step goes: compute, exposed communication, data, optimizer."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

T = TypeVar("T")

#: Operators of the main thread in which it issues a collective or waits for one.
COLLECTIVES = ("c10d::", "_c10d_functional::", "gloo:", "weft:wait")


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of one step, split by what they are spent on.

    ``total``: the whole step. ``communication`` and ``data`` (loading of batches): the parts that no computation hides.
    ``optimizer``: the update of the parameters. ``compute``: the rest. ``hidden``: seconds of collectives while
    something else ran; they are not counted in the other fields.
    """

    compute: float  # what remains of the total, the profiler's own overhead included
    communication: float  # only what is exposed, not hidden behind compute
    data: float
    optimizer: float
    total: float
    hidden: float = 0.0


@dataclass(frozen=True)
class TraceEvent:
    """A profiled event. Its ``start`` and ``end`` are in seconds.

    ``thread``: number of the thread. ``kind``: the profiler's name of the event's type.
    """

    name: str
    start: float
    end: float
    thread: int = 0
    kind: str = "cpu_op"


def profile_step(fn: Callable[[], T]) -> tuple[T, TimeSplit]:
    """Run ``fn``, which takes one training step, under :mod:`torch.profiler`.

    Returns the result of ``fn`` and the split of the step's time. All ranks must call this function at the same time,
    and not inside another profiler. ``fn`` marks its phases with ``record_function("weft:data")`` and
    ``record_function("weft:optimizer")``.
    """
    with quiet_profile() as profiler, _marked_waits(), record_function("weft:step"):
        result = fn()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    assert (
        profiler.profiler is not None and profiler.profiler.kineto_results is not None
    )
    # The raw events: profiler.events() builds a tree that nobody reads, at twenty times the cost.
    raw = profiler.profiler.kineto_results.events()
    events = [
        (e.name(), e.start_ns() / 1e9, e.end_ns() / 1e9, e.start_thread_id(), _kind(e))
        for e in raw
    ]
    # The profiler's table of actions refers to itself, so that the raw events would stay until a full collection.
    profiler.profiler, profiler.action_map = None, {}
    return result, split_events([TraceEvent(*event) for event in events])


def _kind(event: Any) -> str:
    """Return the profiler's name of the type of a raw event, which PyTorch says since 2.13."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    if event.device_type() == torch.autograd.DeviceType.CPU:
        return "user_annotation" if event.is_user_annotation() else "cpu_op"
    if event.is_user_annotation():
        return "gpu_user_annotation"
    moves = event.name().startswith(("Memcpy", "Memset"))
    return "gpu_memcpy" if moves else "kernel"


def split_events(events: Sequence[TraceEvent]) -> TimeSplit:
    """Split the time of a step by purpose, from the begin to the end of the event ``weft:step`` among ``events``.

    On a CPU, communication counts as exposed while the main thread issues a collective or waits for it. On a GPU it
    counts as exposed while a NCCL kernel runs and no other kernel does. The loading of data counts as exposed while the
    event ``weft:data`` lasts and no kernel runs.
    """
    host = [e for e in events if e.kind != "kernel" and not e.kind.startswith("gpu_")]
    step = next(e for e in host if e.name == "weft:step")
    main = [e for e in host if e.thread == step.thread]
    kernels = [e for e in events if e.kind == "kernel"]
    nccl = [e for e in kernels if "nccl" in e.name.lower()]
    work = [e for e in kernels if "nccl" not in e.name.lower()]
    # Of a GPU the profiler also gives the phases as its stream sees them.
    seen = [e for e in events if e.kind == "gpu_user_annotation"] if kernels else main
    phases = [e for e in seen if e.name == "weft:optimizer"]
    update = [e for e in work if any(p.start <= e.start < p.end for p in phases)]
    waiting = nccl if kernels else [e for e in main if e.name.startswith(COLLECTIVES)]
    loading = [e for e in main if e.name == "weft:data"]
    busy = claim(step, update, work, waiting, loading, phases)
    total = step.end - step.start
    communication, data, optimizer = busy[2], busy[3], busy[0] + busy[4]
    # threads of gloo mark what they have begun
    gloo = [e for e in host if e.name.startswith("gloo:") and e.thread != step.thread]
    if kernels:
        hidden = claim(step, nccl)[0] - claim(step, work, nccl)[1]
    else:
        hidden = claim(step, waiting, gloo)[1]
    return TimeSplit(
        max(0.0, total - communication - data - optimizer),
        communication,
        data,
        optimizer,
        total,
        hidden,
    )


def claim(step: TraceEvent, *layers: Sequence[TraceEvent]) -> list[float]:
    """Divide the time of ``step`` among ``layers`` of events, and return the seconds of each layer.

    A layer is a list of events. It gets the time that its events cover, except time that events of an earlier layer
    cover.
    """
    edges = [
        (min(max(t, step.start), step.end), change, layer)
        for layer, events in enumerate(layers)
        for e in events
        for t, change in ((e.start, 1), (e.end, -1))
    ]
    open_events, claimed, last = [0] * len(layers), [0.0] * len(layers), step.start
    for t, change, layer in sorted(edges):
        if owner := next((i for i, n in enumerate(open_events, 1) if n), 0):
            claimed[owner - 1] += t - last
        open_events[layer] += change
        last = t
    return claimed


@contextmanager
def trace(path: Path, steps: int) -> Iterator[Callable[[], bool]]:
    """Record a Chrome/Perfetto trace of ``steps`` steps, and write it to ``path``.

    The body of the context calls the yielded function after every step. It returns True as long as the trace is being
    recorded, and False from then on; :func:`profile_step` must not run before. The first step is a warm-up and is not
    recorded. If the run ends early, the steps recorded so far are written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    actions = [
        ProfilerAction.NONE,
        *[ProfilerAction.RECORD] * (steps - 1),
        ProfilerAction.RECORD_AND_SAVE,
    ]

    def schedule(number: int) -> ProfilerAction:
        return actions[number] if number <= steps else ProfilerAction.NONE

    with quiet_profile(
        schedule=schedule,
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:

        def step() -> bool:
            profiler.step()
            return profiler.step_num <= steps

        yield step


def quiet_profile(**options: Any) -> profile:
    """Return a ``torch.profiler`` profile that hides the two lines that its library writes to stderr.

    ``options``: keyword arguments of :class:`torch.profiler.profile`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    devices = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
    # one cycle alone is recorded
    warnings.filterwarnings("ignore", ".*Profiler clears events", UserWarning)
    return profile(activities=[ProfilerActivity.CPU, *devices], **options)


@contextmanager
def _marked_waits() -> Iterator[None]:
    """Make ``Work.wait`` visible: gloo's work runs in its own threads and leaves no mark on the one that waits."""
    wait = dist.Work.wait

    def marked(self: dist.Work, *args: object, **kwargs: object) -> object:
        with record_function("weft:wait"):
            return wait(self, *args, **kwargs)  # type: ignore[arg-type]

    with mock.patch.object(dist.Work, "wait", marked):
        yield
