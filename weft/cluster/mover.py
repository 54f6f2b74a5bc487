"""Moves of requests between engines of a cluster: the connection over which cache blocks and state travel."""

import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from weft.errors import WeftError
from weft.generate.engine_thread import EngineThread, Tell
from weft.generate.migration import MOVED, Departure, MoveFrame
from weft.generate.request import Generation
from weft.net.endpoint import Address, Channel
from weft.net.wire import Head, SealedConnection

#: The name of the channel on which engines take in requests.
MOVES = "cluster-moves"

#: Seconds that a connection attempt may take, that the other engine may take for the last frame, and between two looks
#: whether the other engine has refused a request of which nothing can be sent yet.
DIAL_S, LAST_S, LOOK_S = 5.0, 10.0, 0.5

#: Seconds in which a frame of a request must come, as its prompt may still be computed.
FRAME_S = 600.0


class MoveReport(NamedTuple):
    """How an attempt to move a request to another engine has ended. ``why``: why the request has stayed; "" if it has
    moved. ``payload``: bytes of cache blocks that were sent. ``stall``: seconds during which neither engine computed
    the request.
    """

    why: str
    payload: int
    stall: float


class AnswerMove:
    """A move of ``generation`` from the engine of ``thread`` to another one. Create it in the engine's thread; then
    call :meth:`send_away` in a thread of its own.

    ``tell``: function that is called with every token that is still written here, or with None if this engine fails.
    ``after_first``: whether the request stays here until its first token is written. Its cache blocks are then sent
    while its prompt is computed, layer by layer where the model permits it. Raises :class:`UsageError` for a request
    that cannot move.
    """

    def __init__(
        self, thread: EngineThread, generation: Generation, tell: Tell, after_first: bool
    ) -> None:  # fmt: skip
        self.thread, self.generation, self.tell = thread, generation, tell
        self.after_first = after_first
        self.departure = Departure(thread.engine, generation)
        # frames of layers; None: there may be something else to do
        self._layers: SimpleQueue[MoveFrame | None] = SimpleQueue()
        self._payload, self._sending = 0, 0.0  # bytes, and the seconds that they took
        self._given = 0  # bytes of layers so far
        self._left = 0.0  # when the request has left, on the monotonic clock
        # what can leave at once does so while the engine computes on
        self._first = None if after_first else self.departure.round()
        if after_first:
            self.departure.stream(self._give)

    def send_away(self, channel: Channel, address: Address, hello: Head) -> MoveReport:
        """Move the request to the engine whose endpoint is at ``address``. Block until the request has moved, or goes
        on here because the move has failed. ``channel``: channel by which the other engine is dialled. ``hello``: the
        first message to the other engine, a description of the request.
        """
        try:
            connection = channel.dial(address, hello, DIAL_S, LAST_S)
        except (OSError, WeftError) as error:
            self._call(self.departure.drop)
            return MoveReport(str(error), 0, 0.0)
        try:
            first, self._first = self._first, None
            if first is not None:
                self._put(connection, first)
            while not self._left:
                self._put(connection, self._wait_for_frame(connection))
            if why := connection.receive(limit=LAST_S).head["why"]:
                raise WeftError(why)
            return MoveReport("", self._payload, time.monotonic() - self._left)
        except (OSError, WeftError, KeyError) as error:
            self._call(self._stay)
            return MoveReport(str(error) or repr(error), self._payload, 0.0)
        finally:
            self._call(self.departure.drop)
            connection.close()

    def _wait_for_frame(self, connection: SealedConnection) -> MoveFrame:
        """Send what layers give until there is a frame of whole blocks or the last one; return it."""
        coming = self.thread.call_until(self._next_frame)
        coming.add_done_callback(lambda _: self._layers.put(None))
        deadline = time.monotonic() + FRAME_S
        try:
            self._check(connection)
            while not self._send_layers(connection):
                self._check(connection)
                if time.monotonic() > deadline:
                    raise WeftError(f"nothing could be sent for {FRAME_S:g} s")
            return coming.result()
        finally:
            coming.cancel()

    @staticmethod
    def _check(connection: SealedConnection) -> None:
        """Raise :class:`WeftError` if the other engine has refused the request."""
        if connection.poll():
            raise WeftError(connection.receive(limit=LAST_S).head["why"])

    def _send_layers(self, connection: SealedConnection) -> bool:
        """Send what layers give, for as long as something comes; return whether there is something else to be sent."""
        with suppress(Empty):
            while (frame := self._layers.get(timeout=LOOK_S)) is not None:
                self._put(connection, frame)
            return True
        return False

    def _put(self, connection: SealedConnection, frame: MoveFrame) -> None:
        begun = time.monotonic()
        connection.send({"frame": frame.head}, [*frame.payload])
        self._sending += time.monotonic() - begun
        self._payload += _bytes_of(frame)

    def _call(self, action: Callable[[], None]) -> None:
        with suppress(WeftError):  # the engine ends
            self.thread.call(action)

    # Called in the engine's thread.

    def _give(self, frame: MoveFrame) -> None:
        self._given += _bytes_of(frame)
        self._layers.put(frame)

    def _lags(self) -> bool:
        """Whether sending what layers have given takes longer than another step, in which the request can go on."""
        left = self._given - self._payload
        if not self._payload:  # how fast it goes is not known yet
            return left > 0
        return left * self._sending > self.thread.seconds * self._payload

    def _next_frame(self) -> MoveFrame | None:
        """Return the next frame, or None if nothing can be sent before a further step."""
        generation, departure = self.generation, self.departure
        early = self.after_first and not generation.written and not generation.finished
        streams = departure.streams and not early  # only the end is left to send
        if not streams and (frame := departure.round()) is not None:
            return frame
        waits = early or (streams and self._lags())
        waits = waits or generation in self.thread.engine.scheduler.due
        # of one that has ended no step may follow, so that `leave` refuses it now
        if waits and not generation.finished:
            return None
        last = departure.leave()
        self._left = time.monotonic()
        self.thread.tells.pop(generation, None)
        return last

    def _stay(self) -> None:
        """Let the request go on here, if it has left and was not cancelled since."""
        if self._left and self.generation.finished == MOVED:
            self.departure.stay()
            self.thread.tells[self.generation] = self.tell


def _bytes_of(frame: MoveFrame) -> int:
    return sum(view.nbytes for view in frame.payload)


def take_in(
    connection: SealedConnection,
    land: Callable[[MoveFrame], bool],
    keep: Callable[[MoveFrame], None],
    limit: float,
) -> str:
    """Receive a request that another engine moves to this one over ``connection``, and tell the sender whether it was
    taken. Return why the request was refused; "" if it was taken. ``land``: called with each frame of whole blocks;
    returns whether it was the last frame. ``keep``: called instead with frames of a single layer. ``limit``: seconds
    within which each frame must come.
    """
    why = ""
    try:
        while True:
            frame = connection.receive(limit=limit)
            part = MoveFrame(frame.head["frame"], [frame.payload])
            if "layer" in part.head:
                keep(part)
            elif land(part):
                break
    except WeftError as error:
        why = str(error) or "it was refused"
    except (OSError, KeyError, TypeError, ValueError) as error:
        return str(error) or repr(error)
    try:
        connection.send({"why": why})
    except OSError as error:
        # the sender keeps the request, or has told the router that it has moved
        return why or str(error)
    return why
