"""The channel by which a training run sends the policy's weights to engines that write its rollouts.

An engine connects, learns which model to build, and then gets every new version of the weights: one frame for each
parameter that has changed, with a checksum, and a frame that completes the version. It goes on writing meanwhile.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch

from weft.cluster.cluster_messages import BEAT_S, ROUTER_SILENT_S
from weft.errors import WeftError
from weft.layout.parts import NAMES, TORCH_DTYPES
from weft.net.endpoint import Address, Channel, Endpoint
from weft.net.wire import Head, SealedConnection, WireBroken

T = torch.Tensor

#: The name of the channel, and seconds that connecting may take.
WEIGHTS, DIAL_S = "policy-weights", 5.0
#: Seconds between two attempts to connect again.
AGAIN_S = 0.25


class PolicyVersion(NamedTuple):
    """A version of the policy's weights. ``number``: the version. ``tensors``: whole parameters on the host, by name,
    each with the number of the version that has changed it last.
    """

    number: int
    tensors: Mapping[str, tuple[int, T]]


class WeightSender:
    """Sends the policy's weights to all engines that connect to ``endpoint``.

    ``secret``: known to the run and its engines. ``about``: what an engine must know to build the model, as JSON
    values.
    """

    def __init__(self, endpoint: Endpoint, secret: str, about: Head) -> None:
        self.about, self.sent = about, 0  # bytes
        self._newest = PolicyVersion(-1, {})
        self._changed, self._closed = threading.Condition(), False
        self._channel: Channel = endpoint.open(WEIGHTS, secret, self._serve)

    def publish(self, number: int, changed: Mapping[str, T]) -> None:
        """Send version ``number`` of the weights, and return at once.

        ``changed``: parameters that differ from the version before, whole and on the host. Nobody may write into these
        tensors afterwards.
        """
        tensors = {name: (number, tensor) for name, tensor in changed.items()}
        with self._changed:
            self._newest = PolicyVersion(number, {**self._newest.tensors, **tensors})
            self._changed.notify_all()

    def close(self) -> None:
        """End all connections."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._channel.close()

    # A thread for each connection.

    def _serve(self, connection: SealedConnection) -> None:
        with suppress(OSError, KeyError, TypeError):
            connection.send({"kind": "about", **self.about})
            number = connection.receive(limit=ROUTER_SILENT_S).head["version"]
            while not self._closed:
                with self._changed:
                    if self._newest.number == number:
                        self._changed.wait(BEAT_S)
                    newest = self._newest
                if newest.number == number:
                    connection.send({"kind": "beat"})
                    continue
                self._send(connection, newest, number)
                number = newest.number
        connection.close()

    def _send(
        self, connection: SealedConnection, newest: PolicyVersion, known: int
    ) -> None:
        """Send what has changed since the version ``known`` of the engine."""
        changed = {
            name: tensor
            for name, (number, tensor) in newest.tensors.items()
            if number > known
        }
        for name, tensor in changed.items():
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            payload = memoryview(flat.numpy())  # type: ignore[arg-type]
            head = {
                "kind": "parameter",
                "name": name,
                "shape": [*tensor.shape],
                "dtype": NAMES[tensor.dtype],
                "checksum": zlib.crc32(payload),
            }
            self.sent += connection.send(head, [payload])
        version = {"version": newest.number, "parameters": len(changed)}
        connection.send({"kind": "version", **version})


class WeightReceiver:
    """Receives the policy's weights at an engine, in a thread of its own once :meth:`start` was called.

    ``endpoint``: this process's endpoint. ``run``: address of the training run's endpoint. ``secret``: known to the run
    and its engines. The constructor connects; ``about`` is then what the run has said of the model. Raises OSError if
    nobody there sends weights.
    """

    def __init__(self, endpoint: Endpoint, run: Address, secret: str) -> None:
        self._channel, self._run = endpoint.join(WEIGHTS, secret), run
        self.version = -1
        self._closed = threading.Event()
        self._connection, self.about = self._dial()

    def first(self, install: Callable[[Mapping[str, T]], None]) -> None:
        """Wait for the first version and install it. Raises OSError, and :class:`WeftError` for damaged weights."""
        self._connection.send({"kind": "known", "version": self.version})
        self.version, tensors = self._receive()
        install(tensors)

    def start(
        self,
        take: Callable[[int, Mapping[str, T]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Receive all later versions, and call ``take`` with the number and the changed parameters of each.

        When the connection is lost, it is made again until :meth:`close` is called. ``failed``: called with an error
        after which no more versions come.
        """
        run = threading.Thread(target=self._watch, args=(take, failed), daemon=True)
        run.name = "weft-weights"
        run.start()

    def close(self) -> None:
        """Receive no more."""
        self._closed.set()
        self._connection.close()

    def _dial(self) -> tuple[SealedConnection, Head]:
        connection = self._channel.dial(self._run, {}, DIAL_S, ROUTER_SILENT_S)
        try:
            head = connection.receive(limit=DIAL_S).head
        except BaseException:
            connection.close()
            raise
        return connection, head

    def _receive(self) -> tuple[int, dict[str, T]]:
        """Return the next version with the parameters that it changes."""
        tensors: dict[str, T] = {}
        while True:
            try:
                frame = self._connection.receive(limit=ROUTER_SILENT_S)
            except TimeoutError:
                raise WireBroken(f"no sign of life for {ROUTER_SILENT_S:g} s") from None
            head = frame.head
            if head["kind"] == "parameter":
                if zlib.crc32(frame.payload) != head["checksum"]:
                    raise WeftError(f"the weights {head['name']} have come damaged")
                tensors[head["name"]] = _tensor_of(head, frame.payload)
            elif head["kind"] == "version":
                if len(tensors) != head["parameters"]:
                    raise WeftError(
                        f"version {head['version']} of the weights has {head['parameters']} parameters, "
                        f"and {len(tensors)} have come"
                    )
                return head["version"], tensors

    def _watch(
        self,
        take: Callable[[int, Mapping[str, T]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        while not self._closed.is_set():
            try:
                version, tensors = self._receive()
                take(version, tensors)
                self.version = version
            except OSError:
                self._connection.close()
                self._dial_again(failed)
            except Exception as error:
                return failed(error)

    def _dial_again(self, failed: Callable[[Exception], None]) -> None:
        """Connect with the run again, for as long as this engine may wait for it."""
        before = self.about["run"]
        while not self._closed.wait(AGAIN_S):
            with suppress(OSError):
                self._connection, self.about = self._dial()
                if self.about["run"] != before:  # another life, which counts anew
                    self.version = -1
                self._connection.send({"kind": "known", "version": self.version})
                return


def _tensor_of(head: Head, payload: memoryview) -> T:
    dtype = TORCH_DTYPES[head["dtype"]]
    if not payload:
        return torch.empty(head["shape"], dtype=dtype)
    return torch.frombuffer(payload, dtype=torch.uint8).view(dtype).view(head["shape"])
