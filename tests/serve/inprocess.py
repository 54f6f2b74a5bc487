"""A server in the test's own process, with no socket, and a tiny model of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.testclient import TestClient

from tests.serve.running import build
from weft.data.tokenizer import load_tokenizer
from weft.generate.engine import Engine
from weft.serve.gate import gate_rules
from weft.serve.server import Server
from weft.serve.service import Service


class InProcess(NamedTuple):
    server: Server
    client: TestClient


@contextmanager
def serving(
    template: str, keys: tuple[str, ...] = (), context: int | None = None, **engine: Any
) -> Iterator[InProcess]:
    """A server of ``tiny`` with this chat template. What fails in it fails in the test, with its traceback."""
    tokenizer = replace(load_tokenizer("bytes"), chat_template=template)
    service = Service(Engine(build(), **{"tokens": 4096, "size": 8} | engine))
    server = Server(service, tokenizer, "tiny", keys, 12, context=context)
    with TestClient(
        server.app(gate_rules("127.0.0.1")), base_url="http://127.0.0.1:8000"
    ) as client:
        yield InProcess(server, client)
