"""What all TCP connections between ranks have in common."""

import os
import socket
import time
from contextlib import suppress

#: Seconds between two attempts to look up the name of a host.
NAME_S = 0.5
#: What others name in annotations, and the kind of an address for datagrams.
Socket = socket.socket
DATAGRAM = socket.SOCK_DGRAM


def socket_pair() -> tuple[Socket, Socket]:
    """Return two sockets of this process that are connected with each other."""
    return socket.socketpair()


def listen(host: str, port: int = 0, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at the IPv4 or IPv6 address ``host``.

    ``port``: the port, or 0 for any free port; ``backlog``: number of connections that the system keeps until they are
    taken. Raises OSError, whose text is the system's own.
    """
    try:
        return socket.create_server(
            (host, port), family=family_of(host), backlog=backlog
        )
    except OSError as error:  # Python adds the address, which callers name themselves
        cause = (error.strerror or str(error)).partition(" (while ")[0]
        raise OSError(error.errno, cause) from None


def connect_socket(host: str, port: int) -> Socket:
    """Return a socket that is connected to ``port`` of the IPv4 or IPv6 address ``host``.

    Raises OSError if the connection cannot be made.
    """
    sock = socket.socket(family_of(host))
    try:
        sock.connect((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of ``host``: IPv6 for a numeric IPv6 address, else IPv4.

    The name of a host is looked up as IPv4.
    """
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def send_at_once(connection: socket.socket) -> None:
    """Disable Nagle's algorithm for ``connection``, so that short messages are sent at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def end_connection(connection: socket.socket) -> None:
    """Close the socket ``connection``, and wake the threads that wait in a call on it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def await_host(host: str, seconds: float) -> None:
    """Wait until the host name ``host`` can be resolved, for at most ``seconds``.

    Names of a cluster's services may appear only after the processes that look them up have started. Raises OSError
    if the name cannot be resolved in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(NAME_S)


def own_address(peer: str = "") -> str:
    """Return the address of this machine in the network over which it reaches the host ``peer``.

    ``peer``: by default the host where the ranks of this run meet (``MASTER_ADDR``).
    """
    with suppress(OSError):  # an unknown host
        known = socket.getaddrinfo(
            peer or os.environ.get("MASTER_ADDR", "127.0.0.1"),
            9,
            type=socket.SOCK_DGRAM,
        )
        for family, _, _, _, address in sorted(
            known, key=lambda info: info[0] != socket.AF_INET
        ):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing: it only chooses the network
                return str(probe.getsockname()[0])
    return "127.0.0.1"
