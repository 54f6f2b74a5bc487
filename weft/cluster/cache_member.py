"""A cache engine as a member of a cluster: it joins a router, and keeps cache blocks for the engines that do."""

import threading
from collections.abc import Callable
from functools import partial

from weft.cluster.cluster_messages import BEAT_S, CHANNEL, ROUTER_SILENT_S, EngineAbout
from weft.cluster.joining import ask_to_join, stay_joined
from weft.cluster.outbox import Outbox
from weft.generate.backend import EngineLoad
from weft.generate.block_channel import open_blocks
from weft.generate.cache_role import CacheStock
from weft.net.endpoint import Address, Channel, Endpoint
from weft.net.wire import Head, SealedConnection, WireBroken


class CacheMember:
    """Member of a cluster that computes nothing, and only keeps cache blocks for the engines of a router. Create a
    member, then call :meth:`run` in the thread that is to wait for the router.

    ``stock``: the store of blocks, in memory and files. ``about``: description of this process for the router. ``say``
    prints a line. ``joined``: called with True when a router has been joined, and with False when there is none.
    """

    def __init__(
        self,
        stock: CacheStock,
        about: EngineAbout,
        say: Callable[[str], None],
        joined: Callable[[bool], None] = lambda joined: None,
    ) -> None:
        self.stock, self.about, self.say = stock, about, say
        self._note_joined = joined
        self._draining, self._ended = threading.Event(), threading.Event()
        self._outbox: Outbox | None = None
        self._channel: Channel | None = None

    def run(
        self, endpoint: Endpoint, router: Address, secret: str, redial: float
    ) -> None:
        """Join the router at the address ``router``, and give and take blocks at ``endpoint`` until the router lets
        this process go. ``secret``: known to router and engines. ``redial``: seconds for which a router that is gone is
        tried again, at least once. Blocks are kept meanwhile.

        Raises :class:`WeftError` if the router refuses this process or cannot be reached.
        """
        host, port = endpoint.address
        self.about = self.about._replace(memory=(host, port), host=host, port=port)
        self._channel = open_blocks(endpoint, secret, self.stock, takes=True)
        channel = endpoint.join(CHANNEL, secret)
        stay_joined(
            f"{router[0]}:{router[1]}",
            partial(self._dial, channel, router),
            partial(self._serve, redial=redial),
            self._draining.is_set,
            redial,
            self._ended,
            self.say,
        )

    @property
    def draining(self) -> bool:
        """Whether this process has asked the router to let it go."""
        return self._draining.is_set()

    def drain(self, move: bool = False) -> None:
        """Ask the router to let this process go. ``move`` changes nothing, as there are no answers to move."""
        self._draining.set()
        if (outbox := self._outbox) is None:
            self._ended.set()
        else:
            outbox.put({"kind": "drain", "move": move})

    def load(self) -> EngineLoad:
        """Return the load of the stock: numbers of blocks in memory, of blocks for which memory has room, and of blocks
        that memory and files have given and taken.
        """
        memory = self.stock.memory
        blocks = len(memory)
        room = blocks * memory.most // memory.bytes if memory.bytes else 0
        return EngineLoad(0, 0, 0, blocks, room, sources=self.stock.usages())

    def close(self) -> None:
        """Stop giving and taking blocks, and finish writing the files; :meth:`run` then returns or raises."""
        self._ended.set()
        if self._outbox is not None:
            self._outbox.close()
        if self._channel is not None:
            self._channel.close()
        self.stock.close()

    def _dial(self, channel: Channel, router: Address) -> SealedConnection:
        seat = ask_to_join(channel, router, self.about)
        if seat.again:
            self.say(f"it was given up: {seat.again}; joins anew")
        self.say(f"joined {router[0]}:{router[1]} as {self.about.name}")
        return seat.connection

    def _serve(self, connection: SealedConnection, redial: float) -> bool:
        """Give signs of life over ``connection``; return whether this process may end.

        Raises OSError when the connection ends.
        """
        heard = 0

        def beat() -> Head:
            return {"load": self.load(), "demand": 0, "taken": 0, "heard": heard}

        outbox = self._outbox = Outbox(connection, beat, BEAT_S)
        outbox.start()
        if self._draining.is_set():
            self.drain()
        self._note_joined(True)
        try:
            while True:
                try:
                    head = connection.receive(limit=ROUTER_SILENT_S).head
                except TimeoutError:
                    raise WireBroken(
                        f"no sign of life for {ROUTER_SILENT_S:g} s"
                    ) from None
                if head["kind"] == "beat":
                    heard = head["number"]
                elif head["kind"] == "leave":
                    return True
                elif head["kind"] == "end":
                    if redial <= 0:
                        return True
                    raise WireBroken("the router ends")
        finally:
            self._outbox = None
            self._note_joined(False)
            outbox.close()
