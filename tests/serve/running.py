"""A server in a thread of the test's, with a tiny model of random weights."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from weft.data.tokenizer import Tokenizer
from weft.generate.engine import Engine
from weft.generate.open_engine import add_adapters
from weft.layout.mesh import Mesh
from weft.models.transformer import Transformer
from weft.parallel.build import parallelize
from weft.recipe import ModelShape, Train
from weft.serve.front import front_of
from weft.serve.gate import GateRules, gate_rules
from weft.serve.server import Server
from weft.serve.service import Service

JSON = {"content-type": "application/json"}


def build() -> Transformer:
    shape = ModelShape(
        vocab=257, layers=2, embed=32, heads=4, kv_heads=2, ffn=48, init_std=0.5
    )
    return parallelize(shape, Mesh.single(), Train(seed=2, dtype="float64"))[0]


class Running:
    """A server in a thread, and a client of it."""

    def __init__(
        self, tokenizer: Tokenizer, keys: tuple[str, ...] = (), most: int = 1024, adapters: Path | None = None,
        rules: GateRules | None = None, drain: float = 60, connections: int = 2048,
        model: Transformer | None = None, context: int | None = None, **engine: Any,
    ) -> None:  # fmt: skip
        self.engine = Engine(model or build(), **{"tokens": 4096, "size": 8} | engine)
        names = add_adapters(self.engine, adapters, "tiny") if adapters else []
        self.service = Service(self.engine, most)
        self.server = Server(self.service, tokenizer, "tiny", keys, 12, names, context)
        listening = socket.create_server(("127.0.0.1", 0))
        rules = rules or gate_rules(listening.getsockname()[0])
        self.said: list[str] = []  # warnings
        self.uvicorn = front_of(
            self.server, rules, self.said.append, drain, connections
        )
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.uvicorn.serve([listening])), daemon=True
        )
        self.thread.start()
        self.address: tuple[str, int] = listening.getsockname()
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.address[1]}",
            timeout=120,
            headers=JSON,
            verify=False,
        )
        until(lambda: self.uvicorn.started)

    def close(self) -> None:
        self.client.close()
        self.uvicorn.should_exit = True
        self.thread.join(120)
        assert not self.thread.is_alive() and not self.service.thread.thread.is_alive()

    def empty(self) -> bool:
        scheduler = self.engine.scheduler
        return not (
            scheduler.running
            or scheduler.waiting
            or scheduler.pool.owners
            or self.service.thread.tells
        )

    def post(self, what: str, **asked: Any) -> Any:
        return self.client.post(f"/v1/{what}", json=asked)

    def events(self, what: str, **asked: Any) -> list[Any]:
        """The chunks of a stream, which has to end as clients wait for it to."""
        with self.client.stream(
            "POST", f"/v1/{what}", json=asked | {"stream": True}
        ) as answer:
            assert answer.status_code == 200 and answer.headers[
                "content-type"
            ].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and all(
            line.startswith("data: ") for line in lines
        )
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def until(come: Callable[[], bool]) -> None:
    for _ in range(6000):
        if come():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come")
