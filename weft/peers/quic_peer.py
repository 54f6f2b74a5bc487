"""A peer: joins by an invitation, stays connected with all others, serves blocks and carries byte streams.

Connections begin over the relay and at known addresses at once. As soon as a direct path works, it carries everything
(the QUIC connection stays the same); the relay takes over again when the path breaks. Both ends know each other's
public key from the handshake, and prove to each other that they know the invitation's secret before they say anything
else.
"""

import asyncio
import hmac
import platform
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import TimeoutError as Late
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from weft.net.sockets import DATAGRAM, Socket, socket_pair
from weft.paths import real_path
from weft.peers.blocks import (
    BLOCK,
    LONGEST,
    NAME,
    BlockShelf,
    Shared,
    is_inside,
    name_of,
    shared_from,
)
from weft.peers.invitation import Invitation
from weft.peers.relay import PROTOCOL as MIRROR
from weft.peers.table import Entry, SharedTable, entries_from_json, entries_to_json
from weft.peers.transport import (
    LIMIT,
    MEMBERS_HEAD,
    PIECE,
    PeerError,
    bind,
    cause,
    iroh,
    receive,
    send,
    within,
)

T = TypeVar("T")

PROTOCOL = b"weft-peer/1"
#: Seconds for a new connection; between two looks at what is new; for eight blocks over the slowest of links.
DIAL, PAUSE, SLOWEST = 20.0, 1.0, 300.0
#: Looks at what is new until a peer that the relay has told of nobody counts as alone.
ALONE = 3
#: Blocks that are asked for at a time.
IN_FLIGHT = 8
#: The code of a connection that ends because the other has not proved that it is invited, and of one that just ends.
REFUSED, BYE = 1, 0


class ConnectedPeer(NamedTuple):
    """Another peer, and how this peer is connected with it.

    Attributes:
        ``id``: public key of the peer.
        ``name``: name that the peer has given itself.
        ``direct``: address to which packets go; None if they go over the relay.
        ``milliseconds``: duration of a round trip to the peer.
    """

    id: str
    name: str
    direct: str | None
    milliseconds: int


@dataclass
class _PeerLink:
    """A connection with another peer. ``sent``: how many changes of this peer's table the other has received;
    ``heard``: whether the other has sent its table.
    """

    id: str
    connection: Any
    sent: int = 0
    heard: bool = False


class Peer:
    """This process as a peer: a context manager in which it is connected with all other peers of one invitation.

    Methods may be called in any thread and wait for a limited time. An event loop in a thread of its own does the work.

    Args:
        ``invitation``: invitation of the peers.
        ``name``: name by which others may address this peer instead of by its public key; default: the name of the
            host.
        ``share``: folders whose files other peers may fetch.
        ``key``: private key of this peer, 32 bytes; default: a new one.
        ``say``: called with a line of text for each event.
    """

    def __init__(
        self,
        invitation: Invitation,
        name: str = "",
        share: Iterable[Path] = (),
        key: bytes | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.invitation, self.name, self.say = (
            invitation,
            name or platform.node(),
            say,
        )
        self.shelf = BlockShelf(
            {real_path(folder).name: real_path(folder) for folder in share}
        )
        self.problem = ""
        self._key, self._links = key, dict[str, _PeerLink]()
        self._dialing, self._tasks = set[str](), set[asyncio.Task[None]]()
        self._exposed: dict[str, tuple[str, int]] = {}
        self._published: dict[str, str] = {}
        self._listed: asyncio.Event
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="weft-peer", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._open(), DIAL)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        with suppress(PeerError, Late):
            self._run(self._close(), LIMIT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT)

    # What this peer knows of the others.

    def members(self) -> list[ConnectedPeer]:
        return [self._member(link) for link in list(self._links.values())]

    def files(self) -> dict[str, Shared]:
        """Return all files that the peers of this invitation share at present, by path."""
        files = {
            path: shared_from(about)
            for path, about in sorted(self.table.under("file/"))
        }
        return {
            path: shared
            for path, shared in files.items()
            if shared is not None and is_inside(path)
        }

    def holders(self, root: str) -> list[str]:
        """Return the names of the connected peers, this peer included, that have a shared file.

        ``root``: hash of the file's index (:attr:`Shared.root`).
        """
        return [
            self._name(peer)
            for peer, _ in self.table.under(f"has/{root}/")
            if peer in (self.id, *self._links)
        ]

    def settle(self, limit: float = 2 * DIAL) -> None:
        """Wait until all peers that the relay knows are connected, for at most ``limit`` seconds.

        Raises :class:`PeerError` if there are none, or the time is over.
        """
        self._run(self._settle(), limit)

    def find(self, who: str, limit: float = 2 * DIAL) -> str:
        """Return the public key of another peer, and wait at most ``limit`` seconds until that peer is connected.

        ``who``: the peer's name, or the beginning of its public key. Raises :class:`PeerError` if no such peer comes,
        or several peers match.
        """
        until = time.monotonic() + limit
        while True:
            links = {
                link
                for link in list(self._links)
                if self._name(link) == who or (who and link.startswith(who))
            }
            if len(links) == 1:
                return links.pop()
            if len(links) > 1:
                raise PeerError(
                    f"{len(links)} peers are called {who!r}; give the beginning of a key"
                )
            if time.monotonic() > until:
                there = (
                    ", ".join(sorted(map(self._name, list(self._links)))) or "nobody"
                )
                raise PeerError(
                    f"{who} is not there: {there} is"
                    + (f" ({self.problem})" if self.problem else "")
                )
            time.sleep(0.05)

    # Byte streams.

    def expose(self, service: str, port: int, host: str = "127.0.0.1") -> None:
        """Let other peers connect to a TCP port under the name ``service``.

        ``port``: the port; ``host``: where it is, by default on this machine.
        """
        self._exposed[service] = host, port

    def reach(self, who: str, service: str, port: int = 0) -> int:
        """Return a loopback port of this machine whose connections lead to a service that another peer exposes.

        ``who``: the peer's name, or the beginning of its public key; ``service``: name of the service; ``port``: the
        wanted port, 0 for any free one.
        """

        async def listen() -> int:
            server = await asyncio.start_server(
                lambda r, w: self._carry(who, service, r, w), "127.0.0.1", port
            )
            return int(server.sockets[0].getsockname()[1])

        try:
            return self._run(listen(), LIMIT)
        except OSError as error:
            raise PeerError(
                f"cannot listen on 127.0.0.1:{port}: {error.strerror}"
            ) from None

    def connect(self, who: str, service: str, limit: float = 2 * DIAL) -> Socket:
        """Return a socket that is connected, over an encrypted connection, with a service that another peer exposes.

        ``who``: the peer's name, or the beginning of its public key; ``service``: name of the service; ``limit``:
        seconds to wait for the peer. Raises :class:`PeerError` if the service cannot be reached.
        """
        peer = self.find(who, limit)
        ours, theirs = socket_pair()

        async def open_() -> None:
            stream = await self._tunnel(peer, service)
            reader, writer = await asyncio.open_connection(sock=theirs)
            self._task(_pump(stream, reader, writer))

        self._run(open_(), LIMIT)
        return ours

    def lead(self, who: str, service: str) -> Socket:
        """Return a socket that will be connected with a service that another peer exposes, without waiting for the
        connection. ``who``: the peer's name, or the beginning of its public key; ``service``: name of the service. If
        the service cannot be reached, the socket is closed.
        """
        ours, theirs = socket_pair()

        async def open_() -> None:
            reader, writer = await asyncio.open_connection(sock=theirs)
            await self._carry(who, service, reader, writer)

        self._loop.call_soon_threadsafe(lambda: self._task(open_()))
        return ours

    # Blocks.

    def fetch(
        self, names: Iterable[bytes], holders: Iterable[str], longest: int = BLOCK
    ) -> list[bytes]:
        """Fetch blocks of shared files, and check them against their hashes.

        Returns their bytes in the order of ``names``. ``names``: hashes of the blocks; ``holders``: public keys of
        peers that have them; ``longest``: largest number of bytes of a block. Each block comes from any of the holders.
        Raises :class:`PeerError` for a block that cannot be fetched, with the reason for each holder.
        """

        async def all_() -> list[bytes]:
            room, bad = asyncio.Semaphore(IN_FLIGHT), dict[str, str]()

            async def fetch_block(number: int, name: bytes) -> bytes:
                async with room:
                    return await self._fetch(
                        name, number, sorted(holders), longest, bad
                    )

            return list(
                await asyncio.gather(
                    *(fetch_block(i, name) for i, name in enumerate(names))
                )
            )

        names, holders = list(names), list(holders)
        waves = 1 + len(names) // IN_FLIGHT
        return self._run(all_(), SLOWEST * waves * max(1, len(holders)))

    def index(self, path: str, shared: Shared) -> list[bytes]:
        """Fetch the index of a shared file: the hashes of its blocks, in the order of the file.

        ``path``: path of the file, for error messages; ``shared``: its announcement. Raises :class:`PeerError` if it
        cannot be fetched.
        """
        (index,) = self.fetch(
            [bytes.fromhex(shared.root)], self.having(path, shared), LONGEST
        )
        names = [index[at : at + NAME] for at in range(0, len(index), NAME)]
        if len(names) != -(-shared.size // BLOCK):
            raise PeerError(
                f"{path} has {len(names)} blocks, which are not {shared.size} bytes"
            )
        return names

    def having(self, path: str, shared: Shared) -> list[str]:
        """Return the public keys of the connected peers that have a shared file. ``path``: path of the file, for error
        messages; ``shared``: its announcement. Raises :class:`PeerError` if no such peer is connected; the message
        names the peers that have the file but cannot be reached.
        """
        all_ = [peer for peer, _ in self.table.under(f"has/{shared.root}/")]
        there = [peer for peer in all_ if peer in self._links]
        if not there:
            gone = ", ".join(map(self._name, all_))
            raise PeerError(
                f"{path} is with {gone or 'nobody'}, who cannot be reached now"
            )
        return there

    # From here on: in the thread of the loop.

    async def _open(self) -> None:
        where = self.invitation
        self.relay_url = f"http://{where.where}"
        try:
            addresses = await self._loop.getaddrinfo(
                where.host.strip("[]"), where.port, type=DATAGRAM
            )
        except OSError as error:
            raise PeerError(
                f"the relay {where.where} has no address: {error.strerror}"
            ) from None
        hosts = [str(address[0]) for *_, address in addresses]
        self._relay_addresses = [
            f"[{host}]:{where.port}" if ":" in host else f"{host}:{where.port}"
            for host in hosts
        ]
        self.endpoint = await bind(PROTOCOL, self.relay_url, self._key)
        self.id = str(self.endpoint.id())
        self.table, self._listed = SharedTable(self.id), asyncio.Event()
        self.table.write(f"peer/{self.id}", {"name": self.name})
        await asyncio.to_thread(self._publish)
        for task in (self._listen(), self._ask_relay(), self._look()):
            self._task(task)

    async def _close(self) -> None:
        for link in self._links.values():
            link.connection.close(BYE, b"it has left")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if hasattr(self, "endpoint"):
            await self.endpoint.close()

    async def _settle(self) -> None:
        await self._listed.wait()
        alone = time.monotonic() + ALONE * PAUSE
        while (
            self._dialing
            or not all(link.heard for link in self._links.values())
            # who has come at the same moment may not be in the relay's first answer
            or not (self._links or self.problem or time.monotonic() > alone)
        ):
            await asyncio.sleep(0.05)
        if not self._links:
            raise PeerError(
                self.problem or f"nobody else is at the relay {self.invitation.where}"
            )

    async def _ask_relay(self) -> None:
        """Tell the relay again and again that this peer is here, and connect with the peers that it answers with."""
        first = True
        while True:
            try:
                address = self._address(self.invitation.relay, self._relay_addresses)
                connection = await within(DIAL, self.endpoint.connect(address, MIRROR))
                stream = await within(LIMIT, connection.open_bi())
                seen = None
                while True:
                    await send(stream.send(), {"token": self.invitation.token})
                    answer, _ = await receive(stream.recv())
                    if "error" in answer:
                        connection.close(BYE, b"")
                        raise PeerError(str(answer["error"]))
                    if answer["seen"] and answer["seen"] != seen:
                        seen = answer["seen"]
                        await self.endpoint.add_external_addr(seen)
                    for peer, where in answer["peers"].items():
                        if (
                            peer != self.id
                            and peer not in self._links
                            and (first or self.id < peer)
                        ):
                            self._dial(peer, [where] if where else [])
                    first, self.problem = False, ""
                    self._listed.set()
                    await asyncio.sleep(PAUSE)
            except (PeerError, iroh().IrohError, KeyError, AttributeError) as error:
                problem = f"the relay {self.invitation.where}: {cause(error)}"
                problem += (
                    " (does `weft peer relay` run there?)"
                    if problem.endswith("no answer in time")
                    else ""
                )
                if problem != self.problem:
                    self.say(problem)
                self.problem = problem
                self._listed.set()  # waiting on does not help
                await asyncio.sleep(PAUSE)

    def _address(self, peer: str, addresses: list[str]) -> Any:
        return iroh().EndpointAddr(
            iroh().EndpointId.from_string(peer), self.relay_url, addresses
        )

    def _dial(self, peer: str, addresses: list[str]) -> None:
        async def dial() -> None:
            try:
                address = self._address(peer, addresses)
                connection = await within(
                    DIAL, self.endpoint.connect(address, PROTOCOL)
                )
                stream = await within(LIMIT, connection.open_bi())
                await self._prove(peer, stream)
                await self._greet(peer, connection, stream)
            except PeerError as error:
                self.say(f"{self._name(peer)} cannot be reached: {error}")
            finally:
                self._dialing.discard(peer)

        if peer not in self._dialing:
            self._dialing.add(peer)
            self._task(dial())

    async def _listen(self) -> None:
        async def answer(incoming: Any) -> None:
            with suppress(PeerError):  # who has not come so far has nothing to be told
                accepting = await within(LIMIT, incoming.accept())
                connection = await within(LIMIT, accepting.connect())
                peer = str(connection.remote_id())
                stream = await within(LIMIT, connection.accept_bi())
                await self._greet(peer, connection, stream, first=False)

        while incoming := await self.endpoint.accept_next():
            self._task(answer(incoming))

    async def _prove(self, peer: str, stream: Any) -> None:
        await send(stream.send(), {"proof": self.invitation.proof(self.id, peer).hex()})

    async def _greet(
        self, peer: str, connection: Any, stream: Any, first: bool = True
    ) -> None:
        """Check the other's proof, before anything else is said, and keep the connection.

        ``first``: this peer has dialled, and has already sent its own proof; else it does so now.
        """
        try:
            heard, _ = await receive(stream.recv())
            proof = bytes.fromhex(str(heard.get("proof")))
            if not hmac.compare_digest(proof, self.invitation.proof(peer, self.id)):
                raise PeerError("it is not invited")
        except (PeerError, ValueError) as error:
            connection.close(REFUSED, b"you are not invited")
            raise PeerError(f"{error}") from None
        if not first:
            await self._prove(peer, stream)
        # known: both have dialled, and both links work
        known, link = peer in self._links, _PeerLink(peer, connection)
        self._links[peer] = link
        self._task(self._serve(link))
        self._task(self._tend(link, known))

    async def _tend(self, link: _PeerLink, known: bool) -> None:
        """Send a peer the changes of the table until it is gone, and report when its packets take another path."""
        try:
            while not link.heard:  # so its name is known
                await self._tell(link)
            path = self._path(link)
            if not known:
                self.say(f"{self._name(link.id)} is here ({path})")
            while self._links.get(link.id) is link:
                await asyncio.sleep(PAUSE)
                await self._tell(link)
                if path.split()[0] != (path := self._path(link)).split()[0]:
                    self.say(f"{self._name(link.id)} is now {path}")
        except PeerError as error:
            link.connection.close(BYE, b"no answer")
            if self._links.get(link.id) is link:
                del self._links[link.id]
                self.say(f"{self._name(link.id)} is gone: {error}")

    async def _tell(self, link: _PeerLink) -> None:
        """Send the changes of the table, which also shows whether the other peer still answers."""
        changes = self.table.changes
        answer, _ = await self._request(
            link, {"table": entries_to_json(self.table.since(link.sent))}
        )
        if "ok" not in answer:
            raise PeerError("its answer is malformed")
        link.sent = changes
        if not link.heard:
            await asyncio.sleep(0.05)

    async def _serve(self, link: _PeerLink) -> None:
        with suppress(iroh().IrohError):
            while True:
                self._task(self._answer(link, await link.connection.accept_bi()))

    async def _answer(self, link: _PeerLink, stream: Any) -> None:
        """Answer one request of another peer."""
        try:
            asked, _ = await receive(stream.recv(), head=MEMBERS_HEAD)
            if "table" in asked:
                self.table.merge(entries_from_json(asked["table"]))
                link.heard = True
                await send(stream.send(), {"ok": True})
            elif "block" in asked:
                block = await asyncio.to_thread(
                    self.shelf.read, bytes.fromhex(str(asked["block"]))
                )
                await send(stream.send(), {"has": block is not None}, block or b"")
            elif "tunnel" in asked:
                await self._open_tunnel(stream, str(asked["tunnel"]))
                return
            await within(LIMIT, stream.send().finish())
        except (ValueError, TypeError) as error:
            self.say(
                f"{self._name(link.id)} has sent what is malformed, and is cut off: {error}"
            )
            link.connection.close(REFUSED, b"malformed")
        except PeerError:
            pass  # it has gone, or given up

    async def _open_tunnel(self, stream: Any, service: str) -> None:
        try:
            host, port = self._exposed[service]
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host, port), LIMIT
            )
        except (TimeoutError, KeyError, OSError) as error:
            why = (
                f"has no {service!r}"
                if isinstance(error, KeyError)
                else f"nothing answers as its {service!r}"
            )
            await send(stream.send(), {"error": why})
            await within(LIMIT, stream.send().finish())
            return
        await send(stream.send(), {"ok": True})
        await _pump(stream, reader, writer)

    async def _tunnel(self, peer: str, service: str) -> Any:
        """Open a stream to a service of a peer."""
        try:
            if peer not in self._links:
                raise PeerError("it is not there")
            stream = await within(LIMIT, self._links[peer].connection.open_bi())
            await send(stream.send(), {"tunnel": service})
            answer, _ = await receive(stream.recv())
            if "ok" not in answer:
                raise PeerError(str(answer.get("error")))
            return stream
        except PeerError as error:
            raise PeerError(f"{self._name(peer)} {error}") from None

    async def _carry(
        self,
        who: str,
        service: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Carry one connection to a port of :meth:`reach`."""
        try:
            peer = await asyncio.to_thread(self.find, who, DIAL)
            await _pump(await self._tunnel(peer, service), reader, writer)
        except PeerError as error:
            self.say(str(error))
        finally:
            writer.close()

    async def _request(
        self, link: _PeerLink, head: dict[str, Any], longest: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        stream = await within(LIMIT, link.connection.open_bi())
        await send(stream.send(), head)
        await within(LIMIT, stream.send().finish())
        return await receive(stream.recv(), longest)

    async def _fetch(
        self,
        name: bytes,
        turn: int,
        holders: list[str],
        longest: int,
        bad: dict[str, str],
    ) -> bytes:
        """Fetch a block from the ``turn``-th of its holders, or else from the next ones.

        ``bad``: holders that have sent wrong bytes, with the reason. They are not asked, and new ones are added.
        """
        why: dict[str, str] = {}
        for at in range(len(holders)):
            peer = holders[(turn + at) % len(holders)]
            try:
                if peer in bad:
                    raise PeerError(bad[peer])
                if peer not in self._links:
                    raise PeerError("is gone")
                answer, block = await self._request(
                    self._links[peer], {"block": name.hex()}, longest
                )
                if not answer.get("has"):
                    raise PeerError("no longer has it")
                if name_of(block) != name:
                    bad[peer] = "has sent other bytes than its name says"
                    self.say(
                        f"{self._name(peer)} {bad[peer]} (block {name.hex()[:10]}); it is not asked again"
                    )
                    raise PeerError(bad[peer])
                return block
            except PeerError as error:
                why[peer] = str(error)
        said = ", ".join(f"{self._name(peer)}: {text}" for peer, text in why.items())
        raise PeerError(
            f"block {name.hex()[:10]} is not to be had ({said or 'nobody has it'})"
        )

    async def _look(self) -> None:
        """Look for changes in the shared folders every few seconds, and announce them."""
        while True:
            await asyncio.sleep(2 * PAUSE)
            with suppress(OSError):
                await asyncio.to_thread(self.shelf.scan)
            self._publish(scan=False)

    def _publish(self, scan: bool = True) -> None:
        if scan:
            self.shelf.scan()
        now = self.shelf.files
        for path, root in {
            p: r for p, r in self._published.items() if p not in now or now[p].root != r
        }.items():
            del self._published[path]
            if root not in {shared.root for shared in now.values()}:
                self.table.write(f"has/{root}/{self.id}", None)
            if not any(True for _ in self.table.under(f"has/{root}/")):
                self.table.write(f"file/{path}", None)
        for path, shared in now.items():
            self._published[path] = shared.root
            self.table.write(f"file/{path}", list(shared))
            self.table.write(f"has/{shared.root}/{self.id}", True)

    def _name(self, peer: str) -> str:
        match self.table.entries.get(f"peer/{peer}"):
            case Entry(value={"name": name}):
                return str(name)
        return peer[:10]

    def _member(self, link: _PeerLink) -> ConnectedPeer:
        path = next((p for p in link.connection.paths() if p.is_selected), None)
        direct = path.remote_addr if path is not None and path.is_ip else None
        return ConnectedPeer(
            link.id, self._name(link.id), direct, path.rtt_ms if path is not None else 0
        )

    def _path(self, link: _PeerLink) -> str:
        direct = self._member(link).direct
        return f"direct, {direct}" if direct else "over the relay"

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self, work: Coroutine[Any, Any, T], limit: float) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit)
        except Late:
            future.cancel()
            raise PeerError(self.problem or "no answer in time") from None


async def _pump(
    stream: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Carry bytes both ways until both ends have finished, or either is gone."""

    async def out() -> None:
        while data := await reader.read(PIECE):
            await stream.send().write_all(data)
        await stream.send().finish()

    async def in_() -> None:
        while data := await stream.recv().read(PIECE):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    try:
        await asyncio.gather(out(), in_())
    except (OSError, iroh().IrohError):
        pass  # an end of a byte stream is all that the other end can be told
    finally:
        writer.close()
