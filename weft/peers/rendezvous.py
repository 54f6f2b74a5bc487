"""Ranks that meet over peers: no machine need reach another, and no port is mapped by hand.

``MASTER_ADDR=peer://NAME`` makes every rank a peer of the invitation in ``WEFT_INVITATION``. The first rank is called
NAME and carries the store at which all ranks meet. Endpoints are then addressed by their peer's public key.
"""

import atexit
import os
import platform
from dataclasses import dataclass

from weft.errors import UsageError
from weft.net.endpoint import PEER, Address, process_endpoint
from weft.net.sockets import Socket, connect_socket
from weft.net.wire import Encryption
from weft.peers.invitation import read_invitation
from weft.peers.quic_peer import Peer

#: What stands before the name of the first rank's peer.
SCHEME = "peer://"
#: Seconds that ranks wait for the first one to join.
STORE_S = 300.0
#: The service by which a peer leads to the store, and what stands before the port in that which leads to an endpoint.
STORE, ENDPOINT = "weft-store", "weft-endpoint-"


@dataclass
class PeerDialler:
    """Connects the endpoint of this process with those of other processes over peers.

    It implements :class:`weft.net.endpoint.Dialler`. ``peer``: this process as a peer.
    """

    peer: Peer

    def expose(self, port: int) -> str:
        """Make this process's endpoint, which listens at ``port``, reachable for other peers.

        Returns the host of the address at which they reach it.
        """
        self.peer.expose(f"{ENDPOINT}{port}", port)
        return PEER + self.peer.id

    def connect(self, address: Address) -> Socket:
        """Return a socket to the endpoint at ``address``, without waiting for the connection. If the endpoint cannot be
        reached, the socket is closed.
        """
        host, port = address
        if host == PEER + self.peer.id:
            return connect_socket("127.0.0.1", port)
        return self.peer.lead(host.removeprefix(PEER), f"{ENDPOINT}{port}")


def meet_over_peers(encrypt: Encryption = "auto", port: int = 0) -> None:
    """Make this rank a peer, so that ranks meet and connect over peers.

    Afterwards ``MASTER_ADDR`` and ``MASTER_PORT`` lead to the key-value store of the first rank as usual. ``encrypt``:
    which connections between ranks are encrypted: "auto" (those that leave the private network), "always" or "never".
    ``port``: port of this process's endpoint, 0 for any free port. Raises :class:`PeerError` if the relay cannot be
    reached or the first rank does not come.
    """
    name, rank = os.environ["MASTER_ADDR"].removeprefix(SCHEME), os.environ["RANK"]
    if not name:
        raise UsageError(
            f"MASTER_ADDR={SCHEME} names no peer; give {SCHEME}NAME, with the same name for all ranks"
        )
    first = rank == "0"
    peer = join_peers(encrypt, port, name if first else f"{name}-{rank}")
    if first:
        peer.expose(STORE, int(os.environ["MASTER_PORT"]))
    else:
        peer.find(name, STORE_S)
        os.environ["MASTER_PORT"] = str(peer.reach(name, STORE))
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    # gloo would connect ranks of different islands before they part
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def join_peers(encrypt: Encryption = "auto", port: int = 0, name: str = "") -> Peer:
    """Make this process a peer until it ends, and let its endpoint be reached over peers. Returns the peer.

    ``encrypt``: which connections are encrypted: "auto" (those that leave the private network), "always" or "never".
    ``port``: port of this process's endpoint, 0 for any free port. ``name``: name by which others may address this
    peer, by default the name of the host and the process number.
    """
    peer = Peer(read_invitation(), name or f"{platform.node()}-{os.getpid()}")
    peer.__enter__()
    atexit.register(peer.close)
    process_endpoint("127.0.0.1", port, encrypt, PeerDialler(peer))
    return peer
