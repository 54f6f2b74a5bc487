"""A relay of this machine, and peers that join by its invitation."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from tests.measured import eventually
from weft.peers.invitation import Invitation, invite
from weft.peers.quic_peer import Peer
from weft.peers.relay import Relay


class RunningRelay:
    """A relay in a thread of this process."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.ticket, self.invitation = invite(f"127.0.0.1:{port}")
        self.said: list[str] = []
        self.start()

    def start(self) -> None:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = Future()

        def say(text: str) -> None:
            self.said.append(text)
            if text.startswith("relay at"):
                started.set_result((asyncio.get_running_loop(), task[0]))

        async def run() -> None:
            task.append(asyncio.create_task(Relay(self.ticket, "127.0.0.1", say).run()))
            await asyncio.gather(*task, return_exceptions=True)

        task: list[asyncio.Task[None]] = []
        self.thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        self.thread.start()
        self.loop, self.task = started.result(30)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.task.cancel)
            self.thread.join(30)
            del self.task
            gc.collect()  # the library's socket goes with the last object that knows it


@pytest.fixture(scope="module")
def relay() -> Iterator[RunningRelay]:
    running = RunningRelay()
    yield running
    running.stop()


@pytest.fixture
def joined(relay: RunningRelay) -> Iterator[Callable[..., Peer]]:
    """Makes peers that leave together at the end; what each one says is in its ``said``. They look about often."""
    made: list[Peer] = []

    def join(
        name: str, *share: Path, invitation: Invitation | None = None, **more: object
    ) -> Peer:
        said: list[str] = []
        made.append(
            Peer(invitation or relay.invitation, name, share, say=said.append, **more)
        )  # type: ignore[arg-type]
        made[-1].said = said  # type: ignore[attr-defined]
        made[-1].__enter__()
        # the relay has answered, or does not: whoever joins after this one is told of it
        eventually(made[-1]._listed.is_set)
        return made[-1]

    with (
        mock.patch("weft.peers.quic_peer.PAUSE", 0.2),
        ThreadPoolExecutor(8) as leaving,
    ):
        yield join
        list(leaving.map(Peer.close, made))
