"""How a client reaches its server: over TCP, or as a peer through a relay where neither can reach the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from weft.federated.client_link import DIAL_S, STALL_S
from weft.federated.server_invitation import CHANNEL, read_server_invitation

if TYPE_CHECKING:
    from weft.net.wire import Head, SealedConnection


def dialler(where: str, encrypt: Any) -> Callable[[Head], SealedConnection]:
    """Return a function that connects to the federated server of an invitation; its argument is the first message to
    send.

    ``where``: the server's invitation, or a file with it. ``encrypt``: which connections are encrypted, "auto",
    "always" or "never"; an invitation that asks for encryption makes it "always". If the server's address begins with
    ``peer:``, this process first joins the peers, with a separate invitation from ``WEFT_INVITATION``.
    """
    from weft.net.endpoint import Endpoint, process_endpoint
    from weft.net.sockets import own_address

    invitation = read_server_invitation(where)
    encrypt = "always" if invitation.encrypted else encrypt
    if invitation.host.startswith("peer:"):
        from weft.peers.rendezvous import join_peers

        join_peers(encrypt)
        endpoint = process_endpoint()
    else:
        endpoint = Endpoint(own_address(invitation.host), 0, encrypt)
    channel = endpoint.join(CHANNEL, invitation.secret)
    return lambda hello: channel.dial(
        (invitation.host, invitation.port), hello, DIAL_S, STALL_S
    )
