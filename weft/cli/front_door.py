"""Where a server listens, who may ask it, and what it says of itself as it begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.cli.console import warn
from weft.errors import UsageError
from weft.net.sockets import Socket, listen

if TYPE_CHECKING:
    from weft.serve.api_server import ApiServer
    from weft.serve.front import Front


@dataclass(frozen=True)
class FrontDoor:
    """The options of ``weft serve`` for its HTTP server: the address, and who may send requests.

    Attributes:
        ``host``, ``port``: address to listen on.
        ``keys``: API keys, one of which a request must have; empty: none is needed.
        ``allowed_hosts``: names of the server that a request may use.
        ``cors``: origins whose web pages may send requests.
        ``drain``: seconds that answers in progress may take when the server ends.
        ``connections``: largest number of connections at a time.
    """

    host: str
    port: int
    keys: Sequence[str]
    allowed_hosts: Sequence[str]
    cors: Sequence[str]
    drain: float
    connections: int

    def check(self) -> None:
        """Raise :class:`UsageError` if a host name or an origin in the options is malformed, so that no request could
        match.
        """
        from weft.serve.gate import gate_rules

        gate_rules(self.host, self.allowed_hosts, self.cors)

    def listening(self) -> Socket:
        """Return a socket that listens at ``host`` and ``port``. Raises :class:`UsageError` if that is not possible."""
        try:
            return listen(self.host, self.port)
        except OSError as error:
            raise UsageError(
                f"cannot listen at {self.host} port {self.port}: {error.strerror}; give another --host or --port"
            ) from None

    def front(self, server: "ApiServer", listening: Socket, about: str) -> "Front":
        """Return the HTTP server for ``server``, and print its address.

        ``listening``: socket of :meth:`listening`. ``about``: description of the engine, for the printed line.
        """
        from weft.serve.front import front_of, room_for
        from weft.serve.gate import gate_rules

        host, keys = self.host, self.keys
        address, port = listening.getsockname()[:2]
        rules = gate_rules(address, self.allowed_hosts, self.cors)
        if (room := room_for(self.connections)) < self.connections:
            warn(
                f"{room} connections at a time, not {self.connections}: the system lets a process open no more files"
            )
        front = front_of(server, rules, warn, self.drain, room)
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if not keys and host not in ("127.0.0.1", "::1", "localhost"):
            warn(
                f"whoever can reach {host} can ask; give --api-key FILE to ask for a key"
            )
        print(f"{server.name} at {where}/v1, with {about}; Ctrl-C ends it", flush=True)
        if not keys and "*" in rules.origins:
            warn(
                "with --cors '*' every page that a browser here visits can ask; give --api-key FILE to ask for a key"
            )
        return front
