"""The relay for peers behind address translation, which can reach it but not each other.

It speaks iroh's relay protocol and forwards packets to the receiver that the sender names by public key. The packets
are QUIC packets between two peers, encrypted for each other, so the relay cannot read them. Beside it runs an endpoint
of its own, the *mirror*. It tells a peer from which address its packets come (others send there to reach the peer
directly) and which other peers are present. A client that has not shown the mirror the invitation's token can send to
nobody else.
"""

import asyncio
import hmac
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from weft.errors import UsageError
from weft.peers.invitation import Ticket
from weft.peers.transport import (
    LIMIT,
    PeerError,
    bind,
    cause,
    iroh,
    public_key,
    receive,
    send,
    within,
)

PROTOCOL = b"weft-relay/1"
#: Bytes that wait for a client that is slow; more are dropped, as on any network, and sent again by who has sent them.
WAITING = 2 << 20
#: Bytes of a public key.
KEY = 32
# kinds of frames, and +2 for delivered
CHALLENGE, CONFIRMED, FORWARD, FORWARD_BATCH, PING, PONG = 0, 2, 4, 5, 9, 10
_CONTEXT = "iroh-relay handshake v1 challenge signature"


class Relay:
    """Relay that forwards packets between peers of one invitation if they cannot reach each other directly.

    ``ticket``: keys and address of the relay; ``bind_to``: address at which it listens; ``say``: called with a line of
    text when a peer comes or goes.
    """

    def __init__(
        self,
        ticket: Ticket,
        bind_to: str = "0.0.0.0",
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.ticket, self.bind_to, self.say = ticket, bind_to, say
        self.mirror = bytes.fromhex(public_key(ticket.key))
        self.clients: dict[bytes, Any] = {}
        self.admitted = {self.mirror}
        self.present: dict[str, str | None] = {}
        self.relayed = 0

    async def run(self) -> None:
        """Serve peers until the task is cancelled.

        Raises :class:`PeerError` if the relay cannot listen at its address.
        """
        try:
            from websockets.asyncio.server import serve
        except ImportError:
            raise UsageError(
                "the relay needs the package websockets: pip install 'weft[peers]'"
            ) from None
        protocols: Any = ["iroh-relay-v2", "iroh-relay-v1"]
        limits: Any = {
            "open_timeout": LIMIT,
            "max_size": 1 << 20,
            "write_limit": 2 * WAITING,
            "compression": None,
        }
        try:
            server = await serve(
                self._client,
                self.bind_to,
                self.ticket.port,
                subprotocols=protocols,
                process_request=_probe,
                **limits,
            )
        except OSError as error:
            raise PeerError(
                f"cannot listen on {self.bind_to}:{self.ticket.port}: {error.strerror}"
            ) from None
        async with server:
            own = "127.0.0.1" if self.bind_to == "0.0.0.0" else self.bind_to
            url = f"http://{own}:{self.ticket.port}"
            endpoint = await bind(
                PROTOCOL, url, self.ticket.key, f"{self.bind_to}:{self.ticket.port}"
            )
            self.say(
                f"relay at {self.ticket.host}:{self.ticket.port}, key {self.mirror.hex()[:10]}"
            )
            try:
                # each for itself: what one of them meets does not end the others
                tasks = set()
                while incoming := await endpoint.accept_next():
                    tasks.add(task := asyncio.create_task(self._reflect(incoming)))
                    task.add_done_callback(tasks.discard)
            finally:
                await endpoint.close()

    async def _client(self, client: Any) -> None:
        """Serve one connection that carries packets: identify the client, then forward its packets."""
        key = await _identity(client)
        if key is None:
            return
        if (before := self.clients.get(key)) is not None:
            await before.close()
        self.clients[key] = client
        try:
            async for frame in client:
                if not isinstance(frame, bytes) or not frame:
                    return
                if frame[0] in (FORWARD, FORWARD_BATCH) and len(frame) > KEY:
                    await self._forward(key, frame)
                elif frame[0] == PING:
                    await client.send(bytes([PONG]) + frame[1:])
        except _closed():
            pass
        finally:
            if self.clients.get(key) is client:
                del self.clients[key]

    async def _forward(self, sender: bytes, frame: bytes) -> None:
        to = frame[1 : 1 + KEY]
        if (sender in self.admitted and to in self.admitted) or self.mirror in (
            sender,
            to,
        ):
            client = self.clients.get(to)
            if (
                client is not None
                and client.transport.get_write_buffer_size() < WAITING
            ):
                self.relayed += len(frame)
                with suppress(OSError, EOFError, _closed()):
                    await client.send(bytes([frame[0] + 2]) + sender + frame[1 + KEY :])

    async def _reflect(self, incoming: Any) -> None:
        """Serve one connection to the mirror, for as long as the peer is there."""
        peer = ""
        try:
            accepting = await within(LIMIT, incoming.accept())
            connection = await within(LIMIT, accepting.connect())
            peer = str(connection.remote_id())
            stream = await within(LIMIT, connection.accept_bi())
            while True:
                asked, _ = await receive(stream.recv())
                if not hmac.compare_digest(
                    str(asked.get("token")).encode(), self.ticket.token.encode()
                ):
                    self.say(f"{peer[:10]} has no invitation and is turned away")
                    await send(
                        stream.send(),
                        {"error": "the invitation is not one of this relay"},
                    )
                    await within(LIMIT, connection.closed())
                    return
                seen = next(
                    (
                        p.remote_addr
                        for p in connection.paths()
                        if p.is_ip and p.is_selected
                    ),
                    None,
                )
                if self.present.get(peer, "") != seen:
                    self.say(
                        f"{peer[:10]} is here, seen at {seen or 'this relay alone'}"
                    )
                self.admitted.add(bytes.fromhex(peer))
                self.present[peer] = seen
                await send(stream.send(), {"seen": seen, "peers": self.present})
        except (PeerError, iroh().IrohError) as error:
            if self.present.pop(peer, "") != "":
                self.say(f"{peer[:10]} has left ({cause(error)})")


async def _identity(client: Any) -> bytes | None:
    """Return the public key for which a client has signed a challenge, or None if it has not."""
    from blake3 import blake3

    challenge = os.urandom(16)
    try:
        await client.send(bytes([CHALLENGE]) + challenge)
        answer = await asyncio.wait_for(client.recv(), LIMIT)
        # 1 kind, 1 length of the signature
        key, signature = answer[1:33], iroh().Signature.from_bytes(answer[34:98])
        signed = blake3(challenge, derive_key_context=_CONTEXT).digest()
        iroh().EndpointId.from_bytes(key).verify(signed, signature)
        await client.send(bytes([CONFIRMED]))
    except (TimeoutError, TypeError, iroh().IrohError, _closed()):
        return None
    return bytes(key)


def _probe(connection: Any, request: Any) -> Any:
    """Answer the requests by which iroh measures the distance of a relay."""
    return None if request.path == "/relay" else connection.respond(200, "ok\n")


def _closed() -> type[Exception]:
    from websockets.exceptions import ConnectionClosed

    return ConnectionClosed
