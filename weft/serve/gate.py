"""Decides before reading a request whether to accept it, by its ``Host`` and ``Origin``.

A page that somebody visits can make the browser ask servers of the same computer. It can give its own name the address
127.0.0.1 (DNS rebinding); the request then has a foreign ``Host``. Or it asks under the server's name; the request then
has a foreign ``Origin``. Programs that are no browsers send no ``Origin``.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from weft.errors import UsageError
from weft.serve.anthropic import error_for
from weft.serve.protocol import Refusal

#: A ``Host``: a name or an address, and perhaps a port.
HOST = re.compile(r"(\[[0-9a-z:.%]+\]|[a-z0-9._-]+)(?::[0-9]{0,5})?")

#: A name that ``--allowed-hosts`` takes, and an origin that ``--cors`` takes.
ALLOWED = re.compile(r"(?:\*\.)?[a-z0-9._-]+|[0-9a-f:.]+")
ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?"
)

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class GateRules:
    """Rules about which requests a server accepts, by the headers ``Host`` and ``Origin``.

    Attributes:
        ``loopback``: whether the server listens on this computer only. It then accepts as ``Host`` only the names of
            this computer, and those in ``hosts``.
        ``hosts``: further accepted host names. ``*`` accepts all names, and ``*.example.com`` all names that end in
            ``.example.com``. If the list is empty and ``loopback`` is not set, every name is accepted.
        ``origins``: other web sites whose pages may send requests; ``*`` stands for all.
    """

    loopback: bool = False
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()

    def takes_host(self, header: str, address: str) -> bool:
        """Return whether a request with the ``Host`` header ``header`` is accepted. ``address``: the server's own
        address at which the request arrived.
        """
        if "*" in self.hosts or not (self.loopback or self.hosts):
            return True
        matched = HOST.fullmatch(header.strip().lower())
        if matched is None:
            return False
        name = matched[1].strip("[]").rstrip(".")
        listed = any(
            name == host or (host.startswith("*.") and name.endswith(host[1:]))
            for host in self.hosts
        )
        return listed or is_loopback(name) or name == address

    def takes_origin(self, origin: str, host: str) -> bool:
        """Return whether a web page from the site ``origin`` may send requests to the server. ``host``: the server's
        name in the page's request; pages of the server itself are accepted.
        """
        return (
            self.shares(origin)
            or origin.lower().partition("://")[2] == host.strip().lower()
        )

    def shares(self, origin: str) -> bool:
        """Return whether web pages of the site ``origin``, another one than the server's, may send requests and read
        the answers.
        """
        return "*" in self.origins or origin.lower() in self.origins


def gate_rules(
    address: str, hosts: Sequence[str] = (), origins: Sequence[str] = ()
) -> GateRules:
    """Return the rules for a server that listens at ``address``.

    ``hosts``: accepted host names, from ``--allowed-hosts``. ``origins``: other web sites whose pages may send
    requests, from ``--cors``. Each value may be several, separated by commas. Raises :class:`UsageError` for a value
    that no request can have.
    """
    names, sites = (
        [value.strip().lower() for word in words for value in word.split(",")]
        for words in (hosts, origins)
    )
    for name in names:
        if name != "*" and not ALLOWED.fullmatch(name):
            raise UsageError(
                f"--allowed-hosts {name!r} is no name; give one without scheme and port, or *.example.com"
            )
    sites = [site.rstrip("/") for site in sites]
    for site in sites:
        if site not in ("*", "null") and not ORIGIN.fullmatch(site):
            raise UsageError(
                f"--cors {site!r} is no origin; give for instance https://chat.example.com, or *"
            )
    return GateRules(is_loopback(address), [name.rstrip(".") for name in names], sites)


def is_loopback(name: str) -> bool:
    """Return whether the host ``name`` stands for this computer on every machine, such as ``localhost`` or
    127.0.0.1.
    """
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class Gate:
    """ASGI application that checks the ``Host`` and ``Origin`` of every request by ``rules``, before the request
    reaches the application ``app``.
    """

    def __init__(self, app: Any, rules: GateRules) -> None:
        self.app, self.rules = app, rules

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        if refusal := self._refusal(scope, headers):
            body = json.dumps(error_for(scope, refusal)).encode()
            about: Headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ]
            await send(
                {
                    "type": "http.response.start",
                    "status": refusal.status,
                    "headers": about,
                }
            )
            await send({"type": "http.response.body", "body": body})
            return
        shared = self._shared(headers.get("origin"))
        if (
            shared
            and scope["method"] == "OPTIONS"
            and "access-control-request-method" in headers
        ):
            await send(
                {
                    "type": "http.response.start",
                    "status": 204,
                    "headers": shared + preflight(headers),
                }
            )
            await send({"type": "http.response.body"})
            return

        async def sharing(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", ()), *shared]}
            await send(message)

        await self.app(scope, receive, sharing if shared else send)

    def _refusal(self, scope: Any, headers: dict[str, str]) -> Refusal | None:
        """Return the refusal of a request, or None if it is accepted."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self.rules.takes_host(
            host, (scope.get("server") or ("",))[0]
        ):
            said = f"this server is not called {host[:80]!r}; start it with --allowed-hosts to let that name in"
            return Refusal(403, said, "host_not_allowed")
        if origin is not None and not self.rules.takes_origin(origin, host or ""):
            said = f"pages of {origin[:80]!r} may not ask here; start the server with --cors to let them"
            return Refusal(403, said, "origin_not_allowed")
        return None

    def _shared(self, origin: str | None) -> Headers:
        """Return the headers that let a page of another site's ``origin`` read the answer."""
        if origin is None or not self.rules.shares(origin):
            return []
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin"),
                (b"access-control-expose-headers", b"retry-after")]  # fmt: skip


def preflight(headers: dict[str, str]) -> Headers:
    """Return the headers of the answer to a browser's preflight request, which asks whether a page of another site may
    send a request. ``headers``: headers of the preflight request.
    """
    answer: Headers = [
        (b"access-control-allow-methods", b"GET, POST"),
        (b"access-control-max-age", b"600"),
    ]
    if wanted := headers.get("access-control-request-headers"):
        answer.append((b"access-control-allow-headers", wanted.encode("latin-1")))
    if "access-control-request-private-network" in headers:
        answer.append((b"access-control-allow-private-network", b"true"))
    return answer


def is_json(content_type: str | None) -> bool:
    """Return whether ``content_type``, the type of a request's body, is JSON. Browsers let pages of other sites send
    other types without asking.
    """
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
