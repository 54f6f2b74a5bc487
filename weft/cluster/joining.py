"""How a process joins a router, and joins anew when the connection has ended, until the router lets it go."""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from weft.cluster.cluster_messages import ROUTER_SILENT_S, EngineAbout
from weft.cluster.outbox import ending_of
from weft.errors import WeftError
from weft.net.endpoint import Address, Channel
from weft.net.wire import SealedConnection, WireBroken, WireForged

#: Seconds that a connection attempt may take, and between two attempts; attempts that a listener ends without a word
#: until it counts as a router that does not know the secret.
DIAL_S, AGAIN_S, MUTE = 5.0, 0.25, 3

#: What the router says first, or an engine of a request.
JOINED, REFUSED = "joined", "refused"


class RouterRefusal(WeftError):
    """Raised when the router refuses to let an engine join."""


class RouterSeat(NamedTuple):
    """Result of joining a router. ``connection``: the connection to the router. ``again``: why the router had given
    this process up before; "" if it had not.
    """

    connection: SealedConnection
    again: str


def ask_to_join(channel: Channel, router: Address, about: EngineAbout) -> RouterSeat:
    """Connect over ``channel`` to the router at the address ``router``, introduce this process by ``about``, and wait
    until it is accepted. Return the connection, with the reason for which the router had given this process up before.

    Raises OSError if the router cannot be reached, and :class:`RouterRefusal` if it refuses this process.
    """
    connection = channel.dial(router, {"name": about.name}, DIAL_S, ROUTER_SILENT_S)
    try:
        connection.send({"kind": "about", **about._asdict()})
        answer = connection.receive(limit=DIAL_S).head
    except BaseException:
        connection.close()
        raise
    if answer["kind"] == REFUSED:
        connection.close()
        raise RouterRefusal(
            f"{router[0]}:{router[1]} does not take this engine: {answer['why']}"
        )
    return RouterSeat(connection, answer["again"])


def stay_joined(
    place: str,
    dial: Callable[[], SealedConnection],
    serve: Callable[[SealedConnection], bool],
    ends: Callable[[], bool],
    redial: float,
    ended: threading.Event,
    say: Callable[[str], None],
) -> None:
    """Join the router at ``place``, and join anew whenever the connection ends. Return when the router lets this
    process go or ``ended`` is set.

    ``dial``: returns a new connection to the router, or raises OSError. ``serve``: works for the router over a
    connection until that ends, and returns whether this process may end. ``ends``: called when ``serve`` has raised;
    returns whether this process ends instead of joining anew. ``redial``: seconds for which joining is tried, at least
    once. ``say`` prints a line.

    Raises :class:`WeftError` if the router refuses this process or cannot be reached.
    """
    deadline = time.monotonic() + redial
    mute, joined, waits = 0, False, False
    while not ended.is_set():
        try:
            connection = dial()
        except OSError as error:
            mute = mute + 1 if isinstance(error, WireBroken) else 0
            late = time.monotonic() >= deadline
            # who has taken this engine before is a router: a tunnel or proxy may stand before it while it is gone
            alien = mute >= MUTE and (late or not joined)
            if isinstance(error, WireForged) or alien:
                raise RouterRefusal(
                    f"{place} does not take this engine: it has another secret, or is no router of Weft's; "
                    "give both the same WEFT_SECRET or --secret"
                ) from None
            if late:
                raise unreached(place, error) from None
            if not waits:
                say(f"{place} does not answer: {_cause(error)}; tried for {redial:g} s")
            waits = True
            ended.wait(AGAIN_S)
            continue
        mute, joined, waits = 0, True, False
        try:
            if serve(connection):
                return
        except (OSError, KeyError, ValueError, TypeError) as error:
            if ends():
                return
            why = ending_of(error) if isinstance(error, OSError) else repr(error)
            say(f"{place}: {why}; joining anew")
        deadline = time.monotonic() + redial


def unreached(place: str, error: OSError) -> WeftError:
    """Return the error for the user when an engine cannot reach its router at the address ``place``. ``error``: the
    cause.
    """
    return WeftError(
        f"the router at {place} cannot be reached: {_cause(error)}; start it, or name another with --join"
    )


def _cause(error: OSError) -> str:
    return error.strerror or str(error)
