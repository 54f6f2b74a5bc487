"""The part of iroh that Weft uses: endpoints that use no public service, and messages on a stream."""

import asyncio
import ctypes
import json
import re
import struct
from collections.abc import Awaitable
from functools import cache
from typing import Any, TypeVar

from weft.errors import UsageError, WeftError

T = TypeVar("T")

#: Seconds for an answer, and for every further piece of it, after which the peer counts as gone.
LIMIT = 20.0
#: Bytes of the head of a message, which is JSON, at most: from anybody, and from a member.
HEAD, MEMBERS_HEAD = 1 << 20, 64 << 20
#: Bytes that are handed to a stream at a time.
PIECE = 256 << 10


class PeerError(WeftError):
    """Error of a peer or a relay that could not be reached, has refused, or has sent invalid data.

    The message names the peer or relay.
    """


@cache
def iroh() -> Any:
    """Import the package iroh and return it. Raises :class:`UsageError` if the package is not installed.

    The call also replaces a function of the package's Python bindings that copies sent bytes slowly (a second per MiB).
    """
    try:
        import iroh
        from iroh import iroh_ffi
    except ImportError:
        raise UsageError(
            "peers need the package iroh: pip install 'weft[peers]'"
        ) from None

    def write(self: Any, value: bytes) -> None:
        with self._reserve(len(value)):
            ctypes.memmove(
                ctypes.addressof(self.rbuf.data.contents) + self.rbuf.len,
                bytes(value),
                len(value),
            )

    builder: Any = iroh_ffi._UniffiRustBufferBuilder
    builder.write = write
    return iroh


def public_key(private: bytes) -> str:
    return str(iroh().SecretKey.from_bytes(private).public())


async def bind(
    protocol: bytes, relay: str, key: bytes | None = None, address: str | None = None
) -> Any:
    """Return an iroh endpoint (the listener of a peer) that uses the relay at ``relay``, and contacts no other server.

    ``protocol``: name of the protocol that it speaks; ``relay``: URL of the relay; ``key``: private key, 32 bytes, by
    default a new one; ``address``: ``IP:port`` at which it listens; None: all addresses, any free port. Raises
    :class:`PeerError` if it cannot listen there.
    """
    api = iroh()
    mode = api.RelayMode.custom_from_urls([relay])
    options = {"preset": api.preset_minimal(), "relay_mode": mode, "alpns": [protocol]}
    options |= {"secret_key": key} if key else {}
    options |= {"bind_addr": address} if address else {}
    try:
        return await api.Endpoint.bind(api.EndpointOptions(**options))
    except api.IrohError as error:
        raise PeerError(
            f"cannot listen on {address or 'any port'}: {cause(error)}"
        ) from None


def cause(error: BaseException) -> str:
    """Return the cause of a failed connection in one line. ``error``: an error of iroh, or a timeout."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = " ".join(
        (error.message() if isinstance(error, iroh().IrohError) else str(error)).split()
    )
    if closed := re.search(
        r'ApplicationClose \{ error_code: \d+, reason: b"(.*?)" \}', text
    ):
        return closed[1] or "it has left"
    if "TimedOut" in text or "timed out" in text:
        return "no answer in time"
    return text.rpartition("Caused by: ")[2][:200] or type(error).__name__


async def within(limit: float, awaitable: Awaitable[T]) -> T:
    """Await ``awaitable`` and return its result.

    Raises :class:`PeerError` if this takes more than ``limit`` seconds, or if iroh reports an error.
    """
    try:
        return await asyncio.wait_for(awaitable, limit)
    except (TimeoutError, iroh().IrohError) as error:
        raise PeerError(cause(error)) from None


async def send(
    stream: Any, head: dict[str, Any], body: bytes | memoryview = b""
) -> None:
    """Send a message on ``stream``: the length of its head, the head as JSON, and the body.

    ``head``: JSON values by name, to which the size of the body is added; ``body``: raw bytes. Raises
    :class:`PeerError` if sending fails or takes too long.
    """
    text = json.dumps(head | {"size": len(body)}).encode()
    whole = memoryview(struct.pack("!I", len(text)) + text + body)
    for at in range(0, len(whole), PIECE):
        await within(LIMIT, stream.write_all(bytes(whole[at : at + PIECE])))


async def receive(
    stream: Any, body: int = 0, head: int = HEAD
) -> tuple[dict[str, Any], bytes]:
    """Receive the next message from ``stream``. Returns its head (JSON values by name) and its body.

    ``body`` and ``head``: the largest number of bytes that body and head may have. Raises :class:`PeerError` for longer
    or malformed messages.
    """
    (length,) = struct.unpack("!I", await _read(stream, 4))
    if length > head:
        raise PeerError(f"a message of {length} bytes is too long")
    try:
        said = json.loads(await _read(stream, length))
        size = int(said["size"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise PeerError("a message is malformed") from None
    if not 0 <= size <= body:
        raise PeerError(f"a body of {size} bytes is too long")
    return said, await _read(stream, size)


async def _read(stream: Any, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await within(LIMIT, stream.read(min(PIECE, size - len(data))))
        if not piece:
            raise PeerError("it has broken off")
        data += piece
    return bytes(data)
