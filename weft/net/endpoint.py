"""The endpoint of a process: one listener, shared by named channels to other processes.

A thread of the endpoint takes the handshakes of all who connect, without ever waiting for one of them. A connection
that has proved that it knows the secret of its channel is handed to that channel, in a thread of its own. Others are
closed without a word. Connections to other endpoints are dialled through the channel that they are to belong to.
"""

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from weft.errors import UsageError
from weft.net.hangup import spare
from weft.net.poller import PolledConnection, Poller
from weft.net.sockets import (
    end_connection,
    family_of,
    listen,
    own_address,
    send_at_once,
)
from weft.net.wire import (
    PEER,
    STALL_S,
    Encryption,
    Head,
    Incoming,
    SealedConnection,
    Session,
    WireBroken,
    WireForged,
    encrypts,
    greet,
    introduce,
    key_of,
    read_steps,
    require_cipher,
    send_all,
)

Address = tuple[str, int]
#: Serves a connection that another process has dialled, in a thread of its own.
Serve = Callable[[SealedConnection], None]

#: Seconds within which whoever connects must have proved that it belongs to a channel, and how many may try at a time.
HELLO_S, STRANGERS = 10.0, 256
#: The longest wait that the system can be asked for.
LONGEST_WAIT_S = 1e6
#: Connections that the system keeps until they are taken.
BACKLOG = 256


class Dialler(Protocol):
    """Interface for connecting endpoints by another way than TCP. It is used for addresses that begin with
    :data:`PEER`.
    """

    def expose(self, port: int) -> str:
        """Make the endpoint that listens at ``port`` of this machine reachable for other endpoints.

        Returns the host of the address at which others reach it.
        """

    def connect(self, address: Address) -> socket.socket:
        """Return a socket to the endpoint at ``address``, without waiting for the connection.

        The socket ends if the endpoint cannot be reached.
        """


@dataclass(eq=False)
class _Stranger:
    """A process that has connected, and whose handshake is not over."""

    socket: socket.socket
    incoming: Incoming[tuple[str, Session]]
    since: float


class Endpoint:
    """Listener of this process at one address, shared by all channels (named conversations with other processes).

    ``host`` and ``port``: where the endpoint listens; for port 0 at any free port. ``encrypt``: which connections are
    encrypted: "auto" (only those to hosts outside of the private network), "always" or "never". ``dialler``:
    connects this endpoint with others in another way than over TCP, and provides the address at which they reach it.
    Raises :class:`UsageError` if the endpoint cannot listen there.
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        encrypt: Encryption = "auto",
        dialler: Dialler | None = None,
    ) -> None:
        if encrypt == "always":
            require_cipher()
        try:
            self._listener = listen(host, port, BACKLOG)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {host} port {port}: {error.strerror}"
            ) from None
        self._listener.setblocking(False)
        self.address: Address = self._listener.getsockname()[:2]
        if dialler is not None:
            self.address = (dialler.expose(self.address[1]), self.address[1])
        self.encrypt, self.dialler = encrypt, dialler
        # is called with the host of whoever connects without belonging to a channel, and the cause
        self.refused: Callable[[str, str], None] = lambda host, why: None
        self._channels: dict[str, Channel] = {}
        self._lock, self.closed = threading.Lock(), False
        self._strangers: dict[_Stranger, None] = {}  # the oldest one first
        self._poller = Poller()
        self._poller.watch(self._listener, None)
        _endpoints.add(self)
        self._thread = threading.Thread(
            target=self._accept, name="weft-endpoint", daemon=True
        )
        self._thread.start()

    def check(self, addresses: Iterable[Address]) -> None:
        """Raise :class:`UsageError` if a connection to any of ``addresses`` must be encrypted and cannot be."""
        if any(self.encrypts(address) for address in addresses):
            require_cipher()

    def encrypts(self, address: Address) -> bool:
        """Return whether connections to the endpoint at ``address`` are encrypted."""
        return encrypts(self.encrypt, address[0], self.address[0])

    def open(self, name: str, secret: str, serve: Serve) -> "Channel":
        """Open a channel, so that other processes can connect to it.

        ``name``: name of the channel; ``secret``: the secret that a process must know to connect; ``serve``: called in
        a thread of its own with each connection to the channel.
        """
        with self._lock:
            if name in self._channels:
                raise ValueError(f"the channel {name} is open already")
            channel = self._channels[name] = Channel(self, name, key_of(secret), serve)
        return channel

    def join(self, name: str, secret: str) -> "Channel":
        """Return a channel by which this process connects to other endpoints, but accepts no connections.

        ``name``: name of the channel at the other endpoint; ``secret``: the channel's secret, without which the other
        endpoint refuses the connection.
        """
        return Channel(self, name, key_of(secret), SealedConnection.close)

    def forget(self, channel: "Channel") -> None:
        """Refuse new connections to ``channel`` from now on. Existing connections go on."""
        with self._lock:
            if self._channels.get(channel.name) is channel:
                del self._channels[channel.name]

    def close(self) -> None:
        """Close all channels and stop listening."""
        self.closed = True
        self._poller.wake()
        for channel in list(self._channels.values()):
            channel.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(HELLO_S)
        self.close_sockets()

    def close_sockets(self) -> None:
        """Close all sockets of the endpoint in this process, and send nothing to the other ends.

        A forked child calls this too, so that it keeps no connections of its parent open.
        """
        with suppress(OSError):
            self._listener.close()
        for stranger in list(self._strangers):
            stranger.socket.close()
        self._poller.close()
        for channel in list(self._channels.values()):
            channel.close_sockets()

    # The endpoint's thread.

    def _accept(self) -> None:
        while not self.closed:
            oldest = next(iter(self._strangers), None)
            left = oldest.since + HELLO_S - time.monotonic() if oldest else 0.0
            limit = max(0.0, left) if oldest else None
            for stranger, *_ in self._poller.wait(limit):
                if stranger is None:
                    self._meet()
                elif stranger in self._strangers:
                    self._listen_to(stranger)
            now = time.monotonic()
            for stranger in list(self._strangers):
                if now - stranger.since >= HELLO_S:
                    self._part_with(stranger)

    def _meet(self) -> None:
        with suppress(OSError):
            sock, (host, *_) = self._listener.accept()
            spare(sock)
            sock.setblocking(False)
            own = sock.getsockname()[0]

            def allows(encrypted: bool) -> bool:
                return encrypted or not encrypts(self.encrypt, host, own)

            def key_for(name: str) -> bytes | None:
                channel = self._channels.get(name)
                return channel.key if channel else None

            incoming = Incoming(greet(key_for, allows, sock.send))
            stranger = _Stranger(sock, incoming, time.monotonic())
            self._strangers[stranger] = None
            self._poller.watch(sock, stranger)
            if len(self._strangers) > STRANGERS:
                self._part_with(next(iter(self._strangers)))

    def _listen_to(self, stranger: _Stranger) -> None:
        try:
            if not stranger.incoming.take(stranger.socket):
                return
        # what strangers send may be anything
        except WireForged as error:
            with suppress(OSError):
                self.refused(stranger.socket.getpeername()[0], str(error))
            return self._part_with(stranger)
        except OSError:
            return self._part_with(stranger)
        assert stranger.incoming.result is not None
        name, session = stranger.incoming.result
        del self._strangers[stranger]
        self._poller.forget(stranger.socket)
        channel = self._channels.get(name)
        if channel is None:
            return end_connection(stranger.socket)
        channel.take_in(stranger.socket, session)

    def _part_with(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        self._poller.forget(stranger.socket)
        end_connection(stranger.socket)


class Channel:
    """Named channel of an endpoint: accepts connections of other processes, and connects to their channels.

    ``endpoint``: this process's endpoint; ``name``: name of the channel; ``key``: key from the channel's secret
    (:func:`weft.net.wire.key_of`); ``serve``: called in a thread of its own with each accepted connection.
    """

    def __init__(self, endpoint: Endpoint, name: str, key: bytes, serve: Serve) -> None:
        self.endpoint, self.name, self.key, self._serve = endpoint, name, key, serve
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock, self._closed = threading.Lock(), False

    def dial(
        self,
        address: Address,
        hello: Head,
        limit: float,
        stall: float = STALL_S,
        name: str = "",
    ) -> SealedConnection:
        """Connect to the endpoint at ``address``, and return the connection after its handshake.

        ``hello``: JSON values that tell the other end who connects; ``limit``: seconds that connecting may take;
        ``stall``: seconds that each MiB of a message may take later; ``name``: the channel's name at the other
        endpoint, by default the name of this channel. Raises OSError if nobody listens there, the handshake fails,
        or the time is over.
        """
        sock = self._socket(address)
        deadline = time.monotonic() + limit

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        try:
            if not address[0].startswith(PEER):
                # a limit of 0 would mean none, and one of centuries is refused
                sock.settimeout(min(max(0.001, left()), LONGEST_WAIT_S))
                sock.connect(address)
            sock.setblocking(False)
            steps = introduce(
                name or self.name,
                self.key,
                hello,
                self.endpoint.encrypts(address),
                lambda data: send_all(sock, data, left()),
            )
            return SealedConnection(
                sock, read_steps(sock, steps, left(), left()), stall
            )
        except BaseException:
            end_connection(sock)
            raise

    def dial_polled(
        self, address: Address, hello: Head, poller: Poller
    ) -> PolledConnection:
        """Begin to connect to the endpoint at ``address``, and return the connection, which ``poller`` watches.

        Frames sent before the connection is complete are queued. ``hello``: JSON values that tell the other end who
        connects. Raises OSError if the connection is refused at once, because nobody listens there.
        """
        sock = self._socket(address)
        sock.setblocking(False)
        try:
            if not address[0].startswith(PEER):
                with suppress(BlockingIOError):
                    sock.connect(address)
        except OSError:
            sock.close()
            raise
        connection = PolledConnection(sock, poller, address)
        encrypted = self.endpoint.encrypts(address)
        connection.begin(
            introduce(self.name, self.key, hello, encrypted, connection.put)
        )
        return connection

    def take_in(self, sock: socket.socket, session: Session) -> None:
        """Call this channel's function ``serve``, in a new thread, with a connection that another process has made.

        ``sock``: its socket; ``session``: its keys, from the handshake.
        """
        try:
            self._adopt(sock)
        except OSError:
            return
        threading.Thread(
            target=self._serve,
            args=(SealedConnection(sock, session),),
            name=f"weft-{self.name.partition('/')[0]}",
            daemon=True,
        ).start()

    def shut(self) -> None:
        """Refuse new connections to this channel from now on. Existing connections go on."""
        self.endpoint.forget(self)

    def close(self) -> None:
        """Accept no further connections, and end all existing ones. Calls that wait for them in other threads raise."""
        self.shut()
        with self._lock:
            self._closed = True
            sockets = list(self._sockets)
        for sock in sockets:
            end_connection(sock)

    def close_sockets(self) -> None:
        for sock in list(self._sockets):
            sock.close()

    def _socket(self, address: Address) -> socket.socket:
        """Return a socket for a connection with another endpoint; over peers the socket is already connected."""
        if not address[0].startswith(PEER):
            sock = socket.socket(family_of(address[0]))
        elif self.endpoint.dialler is None:
            raise WireBroken(f"{address[0]} is reached over peers alone")
        else:
            sock = self.endpoint.dialler.connect(address)
        self._adopt(sock)
        return sock

    def _adopt(self, sock: socket.socket) -> None:
        spare(sock)
        with suppress(OSError):
            send_at_once(sock)
        with self._lock:
            if self._closed:
                sock.close()
                raise WireBroken(f"the channel {self.name} is closed")
            self._sockets.add(sock)


_endpoints: weakref.WeakSet[Endpoint] = weakref.WeakSet()
_own: dict[int, Endpoint] = {}


def process_endpoint(
    host: str = "",
    port: int = 0,
    encrypt: Encryption = "auto",
    dialler: Dialler | None = None,
) -> Endpoint:
    """Return the endpoint of this process. The first call creates it; later calls ignore the arguments.

    ``host`` and ``port``: where it listens, by default at :func:`own_address` and any free port; ``encrypt``: which
    connections are encrypted: "auto" (only those to hosts outside of the private network), "always" or "never";
    ``dialler``: connects the endpoint with others in another way than over TCP, and provides its address for them.
    """
    pid = os.getpid()
    if pid not in _own or _own[pid].closed:
        _own.clear()
        _own[pid] = Endpoint(host or own_address(), port, encrypt, dialler)
    return _own[pid]


def _leave_to_parent() -> None:
    for endpoint in list(_endpoints):
        with suppress(Exception):
            endpoint.close_sockets()


os.register_at_fork(after_in_child=_leave_to_parent)
