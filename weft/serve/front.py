"""The HTTP server: uvicorn with limits on connections, which at shutdown gives unfinished answers time to end."""

import asyncio
import logging
import resource
import socket
from collections.abc import Callable
from typing import Any, cast

import uvicorn

from weft.serve.api_server import ApiServer
from weft.serve.connections import GuardedProtocol, guarded
from weft.serve.gate import GateRules

#: Connections that the system may keep until the server takes them; as many may come in one turn of the event loop.
BACKLOG = 512

#: Files that a server needs beside its connections.
FILES = 256

#: Seconds that requests get to end once their answers have been cut.
LAST_S = 5


class Front(uvicorn.Server):
    """Runs ``server`` in uvicorn with the settings ``config``. At shutdown, unfinished answers continue for ``drain``
    seconds; how many answers are then cut off is reported through ``warn``.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server: ApiServer,
        drain: float,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self.served, self.drain, self.warn = server, drain, warn

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        cutting = asyncio.ensure_future(self._cut_late_answers())
        await super().shutdown(sockets)
        if self.force_exit:
            await cutting
            await self.lifespan.shutdown()
        cutting.cancel()

    async def _cut_late_answers(self) -> None:
        """End all answers that last longer than ``drain`` seconds, or when the server is told to end a second time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.drain
        while loop.time() < until and not self.force_exit:
            await asyncio.sleep(0.1)
        self.served.ending = True
        if cut := self.served.backend.cut_answers():
            when = (
                "when the server was told to end at once"
                if self.force_exit
                else f"after {self.drain:g} s (--drain)"
            )
            self.warn(
                f"{cut} {'answer was' if cut == 1 else 'answers were'} not at the end {when}, and cut"
            )
        for connection in list(self.server_state.connections):
            if isinstance(connection, GuardedProtocol) and connection.waits == "body":
                connection.refuse(503, "the server ends")
        until = loop.time() + 1
        while self.server_state.tasks and loop.time() < until:
            await asyncio.sleep(0.02)


def front_of(
    server: ApiServer,
    rules: GateRules,
    warn: Callable[[str], None],
    drain: float = 30,
    connections: int = 1024,
) -> Front:
    """Return uvicorn's server for the application ``server``. It checks connections and requests by ``rules`` before
    the application sees them.

    ``warn``: called with warnings. ``drain``: seconds that answers may continue at shutdown. ``connections``: largest
    number of connections at a time, which is lowered if the system allows fewer open files.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # which has a line for every fifth write to a client that has gone
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # Connections stay open longer than clients and proxies keep them, so that none closes on a question.
    config = uvicorn.Config(
        server.app(rules), http=cast(Any, guarded(connections)), ws="none", log_config=None, access_log=False,
        backlog=BACKLOG, timeout_graceful_shutdown=round(drain) + LAST_S, timeout_keep_alive=120,
    )  # fmt: skip
    return Front(config, server, drain, warn)


def room_for(connections: int) -> int:
    """Return how many connections the process may have at once: ``connections``, or fewer if the system does not allow
    enough open files. The process's limit of open files is raised as needed.
    """
    wanted = connections + BACKLOG + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(16, min(connections, soft - BACKLOG - FILES))
