"""Chooses the attention backend of each shape by times measured on this machine (FlashDecoding++, 2311.01282).

Which implementation is fastest depends on how many texts are written at a time, how long they are, and how many heads
share keys. When a shape comes for the first time, every backend that takes it computes the call at hand a few times;
the fastest one computes such calls from then on. Times are kept in the cache folder, in a file for each machine and
version of the software.
"""

import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from weft.cache import cache_root, digest
from weft.models.attention_backend import (
    AttentionBackend,
    BackendPiece,
    DecodeRows,
    MeasuredPiece,
)
from weft.models.spans import SHORT, Span
from weft.version import VERSION

T = torch.Tensor

#: Seconds that each backend needed for a shape, by their names; and these by shape.
ShapeTimes = dict[str, float]

#: Times that a backend computes a call, of which the shortest counts; the first one is not counted. On a GPU each of
#: them is so many calls, as its layers are launched one behind the other.
REPEATS, GPU_CALLS = 3, 20


def machine_digest(device: torch.device) -> str:
    """Return a digest of everything on which measured times depend: processor or GPU, number of threads, and versions
    of PyTorch and Weft.
    """
    name = _processor_model()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return digest(name, torch.get_num_threads(), torch.__version__, VERSION)


def _processor_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor()


@dataclass
class TimeTable:
    """A table of measured times, which is also kept in a file.

    Attributes:
        ``file``: path of the file.
        ``times``: seconds by backend, for each shape of a call.
    """

    file: Path
    times: dict[str, ShapeTimes] = field(default_factory=dict)

    @classmethod
    def at(
        cls,
        folder: Path,
        device: torch.device,
        again: bool = False,
        kind: str = "attention",
    ) -> "TimeTable":
        """Return the table of this machine and ``device``, with the times that an earlier process has kept in
        ``folder``. ``again``: start with an empty table, which replaces the file. ``kind``: what is measured; each kind
        has a folder of its own.
        """
        file = folder / kind / f"{machine_digest(device)}.json"
        return cls(file, {} if again else _read_times(file))

    def keep(self, shape: str, times: ShapeTimes) -> None:
        """Add the ``times`` that were measured for ``shape`` to the table and to its file. If the folder cannot be
        written to, there is no error, and the next process measures again.
        """
        self.times[shape] = times
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # those of other processes stay, the newest of each shape
            every = _read_times(self.file) | self.times
            handle, path = tempfile.mkstemp(dir=self.file.parent)
            with os.fdopen(handle, "w") as file:
                json.dump(every, file, indent=1)
            os.replace(path, self.file)


def _read_times(file: Path) -> dict[str, ShapeTimes]:
    """The times in a file; none if it is missing or damaged."""
    try:
        read = json.loads(file.read_text())
        return {
            str(shape): {str(name): float(seconds) for name, seconds in times.items()}
            for shape, times in read.items()
            if times
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


class CallShape(NamedTuple):
    """Properties on which the time of an attention call depends: numbers of texts and of keys, numbers and sizes of
    heads, tokens of a cache block (``size``), and the type. The numbers of texts and keys are rounded up to powers of
    two, so that calls of similar sizes share a measured time.
    """

    texts: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    size: int
    dtype: str

    @property
    def word(self) -> str:
        """The shape as text, which is its key in the file of times."""
        return " ".join(f"{name}={value}" for name, value in self._asdict().items())


def call_shape(spans: Sequence[Span], store: T, window: int, q: T) -> CallShape:
    """Return the shape of the attention of ``spans``.

    ``store``: the cache of a layer; ``window``: the number of tokens that a token sees, itself included; 0: all.
    ``q``: a tensor of the queries' type, ``[..., heads, width]``.
    """
    _, _, size, kv_heads, width = store.shape
    keys = max(span.past + span.last - span.first for span in spans)
    keys = min(keys, window) if window else keys
    texts, keys = (1 << (number - 1).bit_length() for number in (len(spans), keys))
    return CallShape(texts, keys, q.shape[-2], kv_heads, width, size, str(store.dtype))


def measured_backend(
    candidates: Sequence[AttentionBackend], table: TimeTable, clock: Callable[[], float] = perf_counter
) -> AttentionBackend:  # fmt: skip
    """Return a backend that gives each attention call to the one of ``candidates`` that is fastest for the call's
    shape. Shapes that ``table`` does not have are measured when they first come. For texts with many new tokens, and
    for all texts of recorded passes, nothing is measured; the first candidate that supports the cache serves them.
    ``clock`` returns the time in seconds.
    """
    first = candidates[0]

    def plain(q: T, store: T, width: int) -> AttentionBackend:
        return next(each for each in candidates if each.takes(q, store, width))

    def choose(spans: Sequence[Span], store: T, window: int, q: T) -> AttentionBackend:
        shape = call_shape(spans, store, window, q).word
        able = [each for each in candidates if each.takes(q, store, store.shape[-1])]
        times = table.times.get(shape, {})
        if not all(each.name in times for each in able):
            times = {each.name: _seconds(each, spans, store, window, q, clock) for each in able}  # fmt: skip
            table.keep(shape, times)
        return min(able, key=lambda each: times[each.name])

    def group(spans: Sequence[Span], store: T, window: int, q: T) -> Sequence[BackendPiece]:  # fmt: skip
        pieces: list[BackendPiece] = []
        few = [span for span in spans if span.last - span.first <= SHORT]
        many = [span for span in spans if span.last - span.first > SHORT]
        parts = [(few, choose)] if few else []
        for some, chosen in [*parts, *([(many, None)] if many else [])]:
            backend = chosen(some, store, window, q) if chosen else plain(q, store, store.shape[-1])  # fmt: skip
            pieces += [MeasuredPiece(backend, piece) for piece in backend.group(some, store, window, q)]  # fmt: skip
        return pieces

    def group_rows(rows: DecodeRows, store: T, window: int, q: T) -> BackendPiece:
        backend = plain(q, store, store.shape[-1])
        return MeasuredPiece(backend, backend.group_rows(rows, store, window, q))

    def attend(q: T, store: T, piece: BackendPiece, window: int, out: T) -> None:
        assert isinstance(piece, MeasuredPiece)
        piece.backend.attend(q, store, piece.piece, window, out)

    def takes(q: T, store: T, width: int) -> bool:
        plain_heads = store.shape[0] == 2 and store.shape[-1] == q.shape[-1] == width
        return plain_heads and any(each.takes(q, store, width) for each in candidates)

    return replace(
        first, name="measured", takes=takes, group=group, group_rows=group_rows, attend=attend
    )  # fmt: skip


def _seconds(
    backend: AttentionBackend, spans: Sequence[Span], store: T, window: int, q: T,
    clock: Callable[[], float],
) -> float:  # fmt: skip
    """Return how long ``backend`` takes for the attention of ``spans``: the shortest of some times."""
    rows = q.flatten(0, -3)
    out = torch.empty_like(rows)
    pieces = backend.group(spans, store, window, q)
    best = float("inf")
    for number in range(1 + REPEATS):
        begun = clock()
        calls = GPU_CALLS if q.is_cuda and number else 1
        for _ in range(calls):
            for piece in pieces:
                backend.attend(rows, store, piece, window, out)
        if q.is_cuda:
            torch.cuda.synchronize(q.device)
        if number:
            best = min(best, (clock() - begun) / calls)
    return best


def measured_here(
    candidates: Sequence[AttentionBackend], device: torch.device, again: bool
) -> AttentionBackend:
    """Return the backend of :func:`measured_backend`, with the table of times of this machine. ``device``: where
    attention is computed. ``again``: forget earlier measurements.
    """
    return measured_backend(candidates, TimeTable.at(cache_root(), device, again))
