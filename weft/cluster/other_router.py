"""Whether another router serves engines at an address already, and which one that is."""

import errno
import os
import platform
from collections.abc import Callable

from weft.cluster.cluster_messages import CHANNEL
from weft.errors import UsageError
from weft.net.endpoint import Address, Endpoint
from weft.net.sockets import own_address
from weft.net.wire import WireBroken

#: Seconds that the other router may take to answer.
ANSWER_S = 2.0

#: What a process asks a router, and what the router answers.
WHO, ROUTER = "who", "router"


def router_name(model: str) -> str:
    """Return the description that this process, as a router, gives of itself: model, process number and host.
    ``model``: name of the model that it serves.
    """
    return f"weft serve of {model}, process {os.getpid()} on {platform.node()}"


def router_endpoint(listen: Callable[[], Endpoint], address: Address, secret: str) -> Endpoint:  # fmt: skip
    """Open the endpoint of a router with ``listen`` and return it. ``address``: the address that ``listen`` uses.
    ``secret``: known to the routers and engines. Raises :class:`UsageError` if the address is taken, with the name of
    the router that has it, or if it is not an address of this host.
    """
    try:
        return listen()
    except UsageError as error:
        cause = error.__context__
        if isinstance(cause, OSError) and cause.errno != errno.EADDRINUSE:
            where = f"an address of this host, or to 0.0.0.0:{address[1]}"
            raise UsageError(f"{error}; set cluster.listen to {where}") from None
        who = _who_serves(address, secret)
        if not who:
            raise
        raise UsageError(f"{error}: {who}") from None


def _who_serves(address: Address, secret: str) -> str:
    """Return in words who serves engines at ``address``, or an empty string if nobody can be reached there."""
    place, remedy = "{}:{}".format(*address), "end it, or give another cluster.listen"
    asking = Endpoint(own_address(address[0]))
    try:
        channel = asking.join(CHANNEL, secret)
        connection = channel.dial(address, {"name": ""}, ANSWER_S)
        try:
            connection.send({"kind": WHO})
            said = connection.receive(limit=ANSWER_S).head["said"]
        finally:
            connection.close()
        return f"another router serves the engines of {place} ({said}); {remedy}"
    except TimeoutError:
        return f"who listens at {place} has not answered for {ANSWER_S:g} s; {remedy}"
    except WireBroken:
        return f"a router with another secret or another program listens at {place}; {remedy}"
    except (OSError, KeyError):
        return ""
    finally:
        asking.close()
