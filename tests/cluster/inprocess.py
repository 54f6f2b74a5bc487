"""A router and engines of one tiny random model in threads of one test process, joined over the real endpoint."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from weft.cluster.cache_member import CacheMember
from weft.cluster.cluster_messages import EngineAbout
from weft.cluster.dispatch_policy import DispatchPolicy, freest
from weft.cluster.engine_loans import EngineLoans
from weft.cluster.engine_member import EngineMember
from weft.cluster.engine_router import EngineRouter
from weft.cluster.router_model import RouterModel
from weft.generate.backend import AnswerRequest, TokenEvent
from weft.generate.cache_role import open_stock
from weft.generate.engine import Engine
from weft.generate.outside_cache import join_memories, keep_blocks
from weft.generate.request import Generation
from weft.generate.sampling import GREEDY, Sampling
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.net.endpoint import Endpoint
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.version import VERSION

VOCAB = 97
MODEL = RouterModel("the model", VOCAB, 32, {})
SECRET = "a secret"


def build(vocab: int = VOCAB) -> Transformer:
    shape = ModelShape(
        vocab=vocab, layers=2, embed=32, heads=4, kv_heads=2, ffn=48, init_std=0.5
    )
    return parallelize(shape, Mesh.single(), Train(seed=2))[0]


def until(come: Callable[[], Any], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def asked(
    ids: Sequence[int], most: int = 12, how: Sampling = GREEDY, **more: Any
) -> AnswerRequest:
    values = {"stops": (), "answers": 1, "top": None, "tenant": "", "grammar": None}
    return AnswerRequest(ids=ids, most=most, how=how, **values | more)


def alone(request: AnswerRequest, vocab: int = VOCAB) -> list[Generation]:
    """What one engine generates for the request when it has nothing else to do."""
    engine = Engine(build(vocab), 4096, size=4)
    generations = engine.submit(*request)
    engine.run()
    return generations


class InThread:
    """An engine in threads of the test's, which joins a router. ``slow``: seconds that each step takes longer;
    ``memory``: bytes of host memory for cache blocks, which the other engines read.
    """

    def __init__(
        self,
        router: Endpoint,
        name: str,
        about: dict[str, Any] | None = None,
        secret: str = SECRET,
        redial: float = 60.0,
        grammars: Any = None,
        most: int = 64,
        slow: float = 0.0,
        lend: bool = False,
        memory: int = 0,
        vocab: int = VOCAB,
        joined: Callable[[bool], None] = lambda joined: None,
        model: Transformer | None = None,
        **engine: Any,
    ) -> None:
        model = model or build(vocab)
        self.engine = Engine(model, **{"tokens": 4096, "size": 4} | engine)
        self.endpoint = Endpoint("127.0.0.1")
        self.loans = EngineLoans(self.engine, self.endpoint, SECRET) if lend else None
        self.memories = None
        if memory:
            kept = keep_blocks(self.engine, "m", memory, None, 0, print)
            self.memories = join_memories(kept, self.endpoint, SECRET)
        if slow:
            step = self.engine.step
            self.engine.step = lambda: (time.sleep(slow), step())[1]  # type: ignore[method-assign]
        self.said: list[str] = []
        self.error: Exception | None = None
        values = {
            "name": name,
            "instance": uuid4().hex,
            "version": VERSION,
            "fingerprint": MODEL.fingerprint,
            "vocab": vocab,
            "embed": 32,
            "cache": self.engine.scheduler.pool.blocks * self.engine.reader.size,
            "block": self.engine.reader.size,
            "most": most,
            "searches": True,
            "adapters": {},
            "loans": self.endpoint.address if lend else (),
            "memory": self.endpoint.address if memory else (),
        }
        self.member = EngineMember(
            self.engine,
            EngineAbout(**values | (about or {})),
            self.said.append,
            grammars,
            self.loans,
            self.memories,
            joined,
            "m",
        )
        self._run = (router.address, secret, redial)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.member.run(self.endpoint, *self._run)
        except Exception as error:
            self.error = error

    def kill(self) -> None:
        """End as a killed process does: the connection ends, and nothing more comes."""
        self.member._ended.set()
        current = self.member._current
        if current is not None:
            current.outbox.connection.close()
        self.close()

    def cut(self) -> None:
        """End the connection alone; the engine joins anew."""
        current = self.member._current
        if current is not None:
            current.outbox.connection.close()

    def freeze(self) -> threading.Event:
        """Stop all sending, as a stopped process does, until the event that is returned is set."""
        thaw, current = threading.Event(), self.member._current
        assert current is not None
        connection = current.outbox.connection
        send, receive = connection.send, connection.receive
        connection.send = lambda *frame: (thaw.wait(60), send(*frame))[1]  # type: ignore[method-assign]
        connection.receive = lambda **limit: (thaw.wait(60), receive(**limit))[1]  # type: ignore[method-assign]
        return thaw

    def close(self) -> None:
        self.member.close()
        self.endpoint.close()
        self.thread.join(20)
        assert not self.thread.is_alive()

    def empty(self) -> bool:
        scheduler = self.engine.scheduler
        return not (scheduler.running or scheduler.waiting or scheduler.pool.owners)


class CacheInThread:
    """A cache engine in threads of the test's, which joins a router. ``folder``: of its files; None: it has none."""

    def __init__(
        self, router: Endpoint, name: str, folder: Path | None = None, memory: int = 1 << 24
    ) -> None:  # fmt: skip
        self.endpoint = Endpoint("127.0.0.1")
        self.stock = open_stock(memory, folder, "m", 1 << 24, print)
        about = EngineAbout(
            name, uuid4().hex, VERSION, MODEL.fingerprint, VOCAB, 32, 0, 1, 0, False, {}, role="cache"
        )  # fmt: skip
        self.said: list[str] = []
        self.member = CacheMember(self.stock, about, self.said.append)
        run = partial(self.member.run, self.endpoint, router.address, SECRET, 5.0)
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        """End as a killed process does: all connections end, and nothing more comes."""
        self.member._ended.set()
        self.member.close()
        self.endpoint.close()
        self.thread.join(20)
        assert not self.thread.is_alive()


class Cluster:
    """A router with ``engines`` engines, for a ``with`` statement."""

    def __init__(
        self,
        engines: int = 2,
        policy: DispatchPolicy = freest,
        patience: float = 20,
        router: dict[str, Any] | None = None,
        **engine: Any,
    ) -> None:
        self.said: list[str] = []
        self.endpoint = Endpoint("127.0.0.1")
        self.router = EngineRouter(
            self.endpoint,
            SECRET,
            MODEL,
            self.said.append,
            policy,
            patience,
            **router or {},
        )
        self._engine = engine
        self.engines = [self.add(f"e{i}") for i in range(engines)]
        until(lambda: len(self.router.links) == engines)

    def add(self, name: str, **engine: Any) -> InThread:
        return InThread(self.endpoint, name, **self._engine | engine)

    def restart(self) -> None:
        """Put another router in the place of the router, which ends without a word, as a killed one does."""
        self.router._closed.set()
        self.endpoint.close()
        self.router._channel.close()
        self.endpoint = Endpoint(*self.endpoint.address)
        self.router = EngineRouter(self.endpoint, SECRET, MODEL, self.said.append)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.router.close()
        self.endpoint.close()
        for engine in self.engines:
            engine.member._ended.set()
            engine.close()


async def written_by(
    router: EngineRouter,
    requests: Sequence[AnswerRequest],
    seen: Callable[[TokenEvent], None] = lambda event: None,
    key: str = "",
) -> list[list[int]]:
    """The tokens of each answer. ``seen`` is called with every event."""
    async with router.answers(requests, key=key) as answers:
        tokens: list[list[int]] = [[] for _ in answers.generations]
        left = set(range(len(tokens)))
        while left:
            event = await asyncio.wait_for(answers.next(), 60)
            assert event.number in left
            if event.token is not None:
                tokens[event.number].append(event.token)
            seen(event)
            if event.finished:
                left.discard(event.number)
    return tokens
