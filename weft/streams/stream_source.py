"""Where the samples of a training come from: the store of what simulators send, and the simulators of this host."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft.errors import UsageError, WeftError
from weft.net.endpoint import Endpoint
from weft.registry import find
from weft.streams.array_columns import ArrayColumns
from weft.streams.reception import Reception
from weft.streams.sample_store import LOOK_S, DrawnRows, SampleName, SampleStore
from weft.streams.simulator_processes import SimulatorProcesses

if TYPE_CHECKING:
    from weft.data.sample_buffer import SampleBuffer
    from weft.net.wire import Encryption
    from weft.recipe.stream_section import SampleStream

#: Room for the samples of simulators that are collected to their end.
ALL = 1 << 40
#: Hosts that stand for all addresses of a machine, and that its own processes do not connect to.
ANYWHERE = ("0.0.0.0", "::")


class StreamSource:
    """Receives the samples of a stream on the first rank, and runs the simulators of its host. ``stream``: section
    ``[stream]`` of the recipe. ``columns``: arrays of a sample. ``seed``: seed of the draws. ``folder``: gets the
    output of the simulators. ``encrypt``: which connections are encrypted. ``state``: state of the stream in a
    checkpoint, as :meth:`SampleStore.state` returns it; None: a new stream. ``kind``: first part of the names of the
    simulators that are started. Raises :class:`UsageError` if it cannot listen, or a simulator cannot be started.

    Attributes:
        ``lines``: lines to print for the user.
    """

    def __init__(
        self,
        stream: SampleStream,
        columns: ArrayColumns,
        seed: int,
        folder: Path,
        encrypt: Encryption,
        state: Mapping[str, Any] | None,
        kind: str = "simulator",
    ) -> None:
        self.stream, self.lines = stream, deque[str]()
        make = find("buffer", stream.buffer).implementation
        buffer: SampleBuffer = make(stream.capacity, stream.watermark, seed)
        self.store = SampleStore(buffer)
        if state is not None:
            self.store.load_state(state)
        self.names = [f"{kind}-{i}" for i in range(len(stream.producers))]
        self._endpoint, address, secret = stream_endpoint(stream, encrypt)
        try:
            self._reception = Reception(self._endpoint, secret, columns, self.store, self.lines.append)  # fmt: skip
            if stream.listen:
                self.lines.append(f"simulators of other hosts join the stream at {stream.listen}")  # fmt: skip
            self._processes = SimulatorProcesses(
                stream.producers, self.names, address, secret, folder, self.store.producer, stream.restarts,
                self.lines.append,
            )  # fmt: skip
        except BaseException:
            self._endpoint.close()
            raise
        #: Seconds that draws have waited for samples so far.
        self.waited = 0.0
        self._waits_since: float | None = None

    @property
    def pids(self) -> Mapping[str, int]:
        """Operating-system number of the present process of each simulator that was started here, by the simulator's
        name.
        """
        return self._processes.pids

    @property
    def ended(self) -> bool:
        """Whether no further sample comes, because every simulator that was started, has joined or is expected has sent
        all of its samples or is refused.
        """
        states = self.store.producers
        own = [states.get(name) for name in self.names]
        others = [state for name, state in states.items() if name not in self.names]
        if not own and not self.stream.others:
            return False
        enough = sum(state.over for state in others) >= self.stream.others
        joined = [states[name] for name in [*self._reception.connections] if name in states]  # fmt: skip
        return enough and all(state is not None and state.over for state in [*own, *joined])  # fmt: skip

    def draw(self, count: int, wait: float) -> DrawnRows | None:
        """Draw ``count`` samples, or fewer at the stream's end. Return None if none can be drawn within ``wait``
        seconds. Raises :class:`WeftError` if a simulator dies again and again, or if nothing has come for
        ``stream.patience`` seconds.
        """
        begun = time.monotonic()
        while True:
            with self.store.changed:
                ended = self.ended
                drawn = self.store.draw(count, ended)
                if drawn is None and not ended and time.monotonic() < begun + wait:
                    self.store.changed.wait(min(wait, LOOK_S))
            now = time.monotonic()
            if drawn is not None or ended or now >= begun + wait:
                break
            self._processes.tend()
        self.waited += now - begun
        self._processes.tend()
        if drawn is not None or ended:
            self._waits_since = None
            return drawn
        self._waits_since = begun if self._waits_since is None else self._waits_since
        self._check_patience(now)
        return None

    @property
    def is_exhausted(self) -> bool:
        """Whether the stream has ended, and all its samples were drawn."""
        return self.ended and not self.store.size

    def close(self) -> None:
        """Tell simulators that the training is over, and end the simulators that were started here."""
        self._reception.close()
        self._processes.close()
        self._endpoint.close()

    def _check_patience(self, now: float) -> None:
        since = max(self._waits_since or now, self.store.came_at)
        if now - since < self.stream.patience:
            return
        states = {name: self.store.producer(name) for name in self.names} | self.store.producers  # fmt: skip
        said = [f"{name} has sent {s.next}" for name, s in states.items() if not s.over]
        raise WeftError(
            f"no sample has come for {self.stream.patience:g} s (stream.patience), and {self.store.size} in the buffer "
            f"are too few for stream.watermark = {self.stream.watermark}; waited for "
            f"{', '.join(said) or 'simulators, none of which has joined'}"
        )


class StreamAddress(NamedTuple):
    """Address at which simulators reach a training. ``endpoint``: listens there. ``address``: HOST:PORT for simulators
    of this host. ``secret``: secret of the channel; simulators of other hosts know it from ``WEFT_SECRET``.
    """

    endpoint: Endpoint
    address: str
    secret: str


def stream_endpoint(stream: SampleStream, encrypt: Encryption) -> StreamAddress:
    """Listen for simulators as the section ``[stream]`` says. ``encrypt``: which connections are encrypted.

    Raises :class:`UsageError` if that is not possible, or if other hosts may join and there is no ``WEFT_SECRET``.
    """
    if stream.address is None:
        endpoint = Endpoint("127.0.0.1", encrypt=encrypt)
        return StreamAddress(endpoint, f"127.0.0.1:{endpoint.address[1]}", secrets.token_hex(32))  # fmt: skip
    if not os.environ.get("WEFT_SECRET"):
        raise UsageError(
            f"stream.listen = {stream.listen!r} lets simulators of other hosts join that know the run's secret; set "
            "WEFT_SECRET here and there"
        )
    endpoint = Endpoint(*stream.address, encrypt=encrypt)
    host, port = endpoint.address
    return StreamAddress(endpoint, f"{'127.0.0.1' if host in ANYWHERE else host}:{port}", "")  # fmt: skip


def all_samples(
    commands: Sequence[str],
    stream: SampleStream,
    columns: ArrayColumns,
    folder: Path,
    wait: Callable[[], bool],
) -> np.ndarray:
    """Run simulators to their end, and return all their samples, float32 ``[samples, width]``: those of the first
    simulator, then of the second, and so on. ``commands``: commands of the simulators. ``stream``: section
    ``[stream]``, whose limits apply. ``columns``: arrays of a sample. ``folder``: gets the output of the simulators.
    ``wait``: called now and then; if it returns False, the samples so far are returned. Raises :class:`WeftError` if
    there are none.
    """
    alone: dict[str, Any] = {"producers": tuple(commands), "listen": "", "others": 0}
    alone |= {"buffer": "fifo", "capacity": ALL, "watermark": 0}
    apart = stream.model_copy(update=alone)
    source = StreamSource(apart, columns, 0, folder, "auto", None, "held-out")
    rows: dict[SampleName, np.ndarray] = {}
    try:
        while not source.is_exhausted and wait():
            drawn = source.draw(256, LOOK_S)
            if drawn is not None:
                rows |= zip(drawn.names, drawn.rows, strict=True)
    finally:
        source.close()
    whys = [p.refused for p in source.store.producers.values() if p.refused]
    if whys or not rows:
        raise WeftError(
            f"stream.held_out has no samples for validation: {whys[0] if whys else 'its simulators have sent none'}"
        )
    return np.stack([rows[name] for name in sorted(rows)])
