"""What all TCP connections between ranks have in common, whatever is said over them."""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Thread

#: What others name in annotations, and the kind of an address for datagrams.
Socket = socket.socket
DATAGRAM = socket.SOCK_DGRAM


def socket_pair() -> tuple[Socket, Socket]:
    """Two sockets of this machine, each of which is the other's end."""
    return socket.socketpair()


def listen(host: str, port: int = 0, backlog: int | None = None) -> socket.socket:
    """A socket that listens on this address, of IPv4 or IPv6; ``port`` 0: any that is free."""
    return socket.create_server((host, port), family=family_of(host), backlog=backlog)


def family_of(host: str) -> socket.AddressFamily:
    """The family of a numeric address, or of a host's name, which is looked up as IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def serve_each(
    listener: socket.socket, serve: Callable[[socket.socket], None], name: str
) -> None:
    """From now on every connection is served in a thread of this name, until the listener is closed."""

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            Thread(target=serve, args=(connection,), name=name, daemon=True).start()

    Thread(target=accept, name=name, daemon=True).start()


def send_at_once(connection: socket.socket) -> None:
    """Have short messages sent without waiting for more bytes to send with them."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def read(connection: socket.socket, size: int, most: int | None = None) -> bytearray:
    """The next ``size`` bytes. Raises EOFError if the other end closes before, ValueError if ``size > most``."""
    if most is not None and size > most:
        raise ValueError(size)
    found = bytearray(size)
    read_into(connection, memoryview(found))
    return found


def read_into(connection: socket.socket, view: memoryview) -> None:
    """Fill ``view`` with the next bytes. Raises EOFError if the other end closes before."""
    while view:
        count = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if not count:
            raise EOFError
        view = view[count:]


def end(connection: socket.socket) -> None:
    """Close a socket, and wake the threads that wait in a call on it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def own_address(peer: str = "") -> str:
    """This machine's address in the network by which it reaches the host ``peer``, so that others there can reach it.

    ``peer``: by default the host where the ranks of this run have met (``MASTER_ADDR``).
    """
    with suppress(OSError):  # an unknown host
        known = socket.getaddrinfo(
            peer or os.environ.get("MASTER_ADDR", "127.0.0.1"),
            9,
            type=socket.SOCK_DGRAM,
        )
        for family, _, _, _, address in sorted(
            known, key=lambda one: one[0] != socket.AF_INET
        ):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing: it only chooses the network
                return str(probe.getsockname()[0])
    return "127.0.0.1"
