"""Moves of requests between engines of a cluster: the connection over which cache blocks and state travel."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from weft.errors import WeftError
from weft.generate.engine_thread import EngineThread, Tell
from weft.generate.migration import Departure, MoveFrame
from weft.generate.request import Generation
from weft.net.endpoint import Address, Channel
from weft.net.wire import Head, SealedConnection

R = TypeVar("R")

#: The name of the channel on which engines take in requests.
MOVES = "cluster-moves"

#: Seconds that a connection attempt may take, that the other engine may take for the last frame, and between two looks
#: at a request of which nothing can be sent yet.
DIAL_S, LAST_S, LOOK_S = 5.0, 10.0, 0.005


class MoveReport(NamedTuple):
    """How an attempt to move a request to another engine has ended. ``why``: why the request has stayed; "" if it has
    moved. ``payload``: bytes of cache blocks that were sent. ``stall``: seconds during which neither engine computed
    the request.
    """

    why: str
    payload: int
    stall: float


class _Last(NamedTuple):
    """The last frame of a request that has left."""

    frame: MoveFrame


def send_away(
    thread: EngineThread,
    channel: Channel,
    address: Address,
    hello: Head,
    generation: Generation,
    tell: Tell,
    after_first: bool,
) -> MoveReport:
    """Move ``generation`` from the engine of ``thread`` to the engine whose endpoint is at ``address``. Block until the
    request has moved, or goes on here because the move has failed.

    ``channel``: channel by which the other engine is dialled. ``hello``: the first message to the other engine, a
    description of the request. ``tell``: function that is called with every token that is still written here, or with
    None if this engine fails. ``after_first``: whether the request stays here until its first token is written; its
    blocks are sent while its prompt is computed.
    """
    payload, left = 0, 0.0
    layers: SimpleQueue[MoveFrame] = SimpleQueue()

    def begin() -> Departure:
        """Called in the engine's thread, once, as each call may wait for a step."""
        departure = Departure(thread.engine, generation)
        if after_first:
            departure.stream(layers.put)
        return departure

    try:
        connection = channel.dial(address, hello, DIAL_S, LAST_S)
    except (OSError, WeftError) as error:
        return MoveReport(str(error), 0, 0.0)
    try:
        begun = thread.call(begin)
        departure = _done(begun, 60.0 if after_first else LAST_S)
    except WeftError as error:
        with suppress(WeftError):  # it may still begin
            thread.call(lambda: begun.result(0).drop())
        connection.close()
        return MoveReport(str(error), 0, 0.0)

    def next_frame() -> MoveFrame | _Last | None:
        """The next frame, or None if nothing can be sent yet. Called in the engine's thread."""
        early = after_first and not generation.written and not generation.finished
        streams = departure.streams and not early  # only the end is left to send
        if not streams and (frame := departure.round()) is not None:
            return frame
        waits = early or (streams and not layers.empty())
        if waits or generation in thread.engine.scheduler.due:
            return None
        last = departure.leave()
        thread.tells.pop(generation, None)
        return _Last(last)

    def send_layers(limit: float = 0.0) -> int:
        """Send what layers have given; return its bytes. ``limit``: seconds to wait for it."""
        sent = 0
        with suppress(Empty):
            while True:
                frame = layers.get(timeout=limit) if limit else layers.get_nowait()
                connection.send({"frame": frame.head}, frame.payload)
                sent += sum(view.nbytes for view in frame.payload)
        return sent

    def stay() -> None:
        departure.stay()
        thread.tells[generation] = tell

    try:
        while True:
            if connection.poll():
                raise WeftError(connection.receive(limit=LAST_S).head["why"])
            coming = thread.call(next_frame)
            deadline = time.monotonic() + 60.0
            while after_first and not coming.done() and time.monotonic() < deadline:
                payload += send_layers(LOOK_S)
            ready = _done(coming, max(0.0, deadline - time.monotonic()))
            left = time.monotonic() if isinstance(ready, _Last) else 0.0
            payload += send_layers()
            if ready is None:
                time.sleep(LOOK_S)
                continue
            frame = ready.frame if isinstance(ready, _Last) else ready
            connection.send({"frame": frame.head}, [*frame.payload])
            payload += sum(view.nbytes for view in frame.payload)
            if isinstance(ready, _Last):
                answer = connection.receive(limit=LAST_S).head
                if answer["why"]:
                    raise WeftError(answer["why"])
                return MoveReport("", payload, time.monotonic() - left)
    except (OSError, WeftError, KeyError) as error:
        if left:
            with suppress(WeftError):  # the engine ends
                _done(thread.call(stay), 60.0)
        return MoveReport(str(error) or repr(error), payload, 0.0)
    finally:
        with suppress(WeftError):
            thread.call(departure.drop)
        connection.close()


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
    except (OSError, KeyError) as error:
        return str(error) or repr(error)
    try:
        connection.send({"why": why})
    except OSError as error:
        # the sender keeps the request, or has told the router that it has moved
        return why or str(error)
    return why


def _done(future: "Future[R]", limit: float) -> R:
    """Return a future's result. Raises :class:`WeftError` after ``limit`` seconds."""
    try:
        return future.result(limit)
    except TimeoutError:
        raise WeftError(f"the engine has not answered for {limit:g} s") from None
