"""The end of a stream in a simulator: connects to a training, and sends samples while the training learns from them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from weft.errors import UsageError, WeftError
from weft.net.endpoint import Address, Endpoint
from weft.net.sockets import own_address
from weft.net.wire import SealedConnection
from weft.streams.array_columns import ArrayColumns, columns_of_table
from weft.streams.index_ranges import of_ranges
from weft.streams.reception import CHANNEL

#: Variables by which a training tells its simulators where it listens, the secret, and their names.
ADDRESS, SECRET, NAME = "WEFT_STREAM", "WEFT_STREAM_SECRET", "WEFT_PRODUCER"
#: Samples on their way at most; seconds that a training may say nothing, and that connecting may take.
WINDOW, SILENCE_S, CONNECT_S = 32, 120.0, 60.0


class TrainingOver(WeftError):
    """Raised in a simulator when its training accepts no further samples. The context of :func:`producer` ends without
    an error then.
    """


def producer(address: str = "", name: str = "", wait: float = CONNECT_S) -> StreamProducer:  # fmt: skip
    """Connect this simulator to the training that listens at ``address``.

    ``address``: HOST:PORT, the value of ``stream.listen`` in the training's recipe; "" in a process that the training
    has started, which knows it. With an address, the simulator needs the training's secret in ``WEFT_SECRET``.
    ``name``: identifies the simulator, and must be the same when the simulator is started again; "": the name that the
    training has given, or else the host's name. ``wait``: seconds to wait for the training. Raises :class:`UsageError`
    for a wrong address or if the training refuses the simulator, and :class:`WeftError` if nobody listens there.
    """
    where = address or os.environ.get(ADDRESS, "")
    host, _, port = where.rpartition(":")
    if not (host and port.isdigit() and int(port) < 65536):
        raise UsageError(
            f"producer({where!r}): give the training's address as HOST:PORT, or let the training start this process "
            "(stream.producers)"
        )
    given = name or os.environ.get(NAME, "") or platform.node()
    return StreamProducer((host.strip("[]"), int(port)), given, wait)


class StreamProducer:
    """Connection of a simulator with a training, to be used in a ``with`` statement; :func:`producer` makes it. Samples
    are numbered in the order in which :meth:`send` is called, in every run of the simulator from 0. A simulator that is
    started again must make the same samples again; the samples that the training already has are not sent twice.
    ``address``: address of the training. ``name``: name of the simulator. ``wait``: seconds to wait for the training.
    """

    def __init__(self, address: Address, name: str, wait: float) -> None:
        self.name, self.address = name, address
        #: Number of samples so far, of which the training may have had some.
        self.samples = 0
        self._pending = 0
        self._endpoint = Endpoint(own_address(address[0]))
        try:
            self._connection = self._connect(wait)
            head = self._receive()
            self.columns: ArrayColumns = columns_of_table(head.get("columns"))
            self._next = int(head["next"])
            self._again = {*of_ranges(head["again"])}
        except (KeyError, TypeError, ValueError) as error:
            self._endpoint.close()
            raise WeftError(f"{self._where} is no training of this version: {error}") from None  # fmt: skip
        except BaseException:
            self._endpoint.close()
            raise

    @property
    def received(self) -> int:
        """Number of samples that the training has received from earlier runs of this simulator. A simulator that can
        begin anywhere may skip these with :meth:`skip`, unless :meth:`wants` says that one is needed again.
        """
        return self._next

    def wants(self, index: int) -> bool:
        """Return whether the training still needs the sample ``index``."""
        return index >= self._next or index in self._again

    def skip(self) -> None:
        """Count the next sample as made, because the training already has it. Raises :class:`ValueError` if the
        training still needs it.
        """
        if self.wants(self.samples):
            raise ValueError(f"sample {self.samples} is yet to be sent")
        self.samples += 1

    def send(self, arrays: Mapping[str, Any]) -> None:
        """Send the next sample, and wait while the training has no room for it. A sample that the training already has
        is not sent. ``arrays``: numbers or arrays by the names in ``model.inputs`` and ``model.outputs`` of the
        training's recipe; they travel as float32. Raises :class:`UsageError` for other arrays and if the training
        refuses the sample, :class:`TrainingOver` if the training accepts no further samples, and :class:`WeftError` if
        the training is gone.
        """
        row = self.columns.pack(arrays)
        index, self.samples = self.samples, self.samples + 1
        if not self.wants(index):
            return
        try:
            self._connection.send({"sample": index}, [memoryview(row.tobytes())])
        except OSError as error:
            self._explain(error)
        self._pending += 1
        while self._pending >= WINDOW or self._connection.poll():
            self._hear()

    def close(self) -> None:
        """Tell the training that all samples are sent, and wait until it has received them."""
        try:
            while self._pending:
                self._hear()
            self._connection.send({"end": True})
            self._pending = 1
            while self._pending:
                self._hear()
        except OSError as error:
            self._explain(error)
        finally:
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connection without telling the training that all samples are sent. The training then waits for this
        simulator to be started again.
        """
        self._connection.close()
        self._endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None:
            self.hang_up()
            return isinstance(error, TrainingOver)
        with suppress(TrainingOver):
            self.close()
        return False

    @property
    def _where(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def _connect(self, wait: float) -> SealedConnection:
        channel = self._endpoint.join(CHANNEL, os.environ.get(SECRET, ""))
        deadline, hello = time.monotonic() + wait, {"producer": self.name}
        while True:
            try:
                return channel.dial(self.address, hello, max(1.0, deadline - time.monotonic()))  # fmt: skip
            except OSError as error:
                if isinstance(error, UsageError) or time.monotonic() >= deadline:
                    raise WeftError(
                        f"no training at {self._where} lets simulator {self.name} in: {error}; is it running, and is "
                        "WEFT_SECRET the same?"
                    ) from None
            time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))

    def _hear(self) -> None:
        """Wait for what the training says next."""
        if "taken" in self._receive():
            self._pending -= 1

    def _receive(self) -> dict[str, Any]:
        """Return what the training says next. Raises the error that it stands for."""
        try:
            head = self._connection.receive(limit=SILENCE_S).head
        except TimeoutError:
            raise WeftError(
                f"the training at {self._where} has said nothing for {SILENCE_S:g} s, which simulator {self.name} "
                "waits for; start the simulator again when it goes on"
            ) from None
        except OSError as error:
            raise WeftError(
                f"the training at {self._where} is gone ({error}); start simulator {self.name} again when the training "
                "is resumed"
            ) from None
        if "refused" in head:
            raise UsageError(f"the training refuses simulator {self.name}: {head['refused']}")  # fmt: skip
        if "over" in head:
            raise TrainingOver("the training takes no more samples")
        return head

    def _explain(self, error: OSError) -> None:
        """Raise what the training has said before the connection broke, or else that it is gone."""
        while self._connection.poll(0.0):
            self._receive()
        raise WeftError(
            f"the training at {self._where} is gone ({error}); start simulator {self.name} again when it is resumed"
        ) from None
