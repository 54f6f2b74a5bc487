"""Many clients who ask, err, stop and go away: nothing is left behind, memory stays flat, no traceback is written."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.running import JSON, Running, until
from tests.serve.test_call_finder import ASKED, HERMES, TIME, WEATHER
from weft.data.tokenizer import load_tokenizer
from weft.generate.lookup import Lookup

WRONG: list[tuple[str, bytes]] = [
    ("/v1/completions", b"{"), ("/v1/completions", b""), ("/v1/completions", b'{"prompt": "\\ud800"}'),
    ("/v1/completions", b"\xff\xfe"), ("/v1/completions", b"[" * 100_000), ("/v1/completions", b'{"prompt": 1e999}'),
    ("/v1/completions", b'{"prompt": "x", "logit_bias": {"a": 1}}'), ("/v1/nothing", b"{}"),
    ("/v1/completions", b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "x", '
                        b'"schema": {"enum": []}}}}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": 3}]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 99999999}'),
    ("/v1/embeddings", b'{"input": [-1]}'), ("/detokenize", b'{"tokens": [99999999999999999999999]}'),
]  # fmt: skip


async def one(client: httpx.AsyncClient, random: Random, found: Counter[Any]) -> None:
    """Ask something; perhaps wrongly, perhaps without waiting for the end."""
    kind = random.choice(
        [
            "whole",
            "stream",
            "chat",
            "shape",
            "tool",
            "vector",
            "wrong",
            "wrong",
            "left",
            "left",
        ]
    )
    asked: dict[str, Any] = {
        "max_tokens": random.randint(1, 30),
        "seed": random.randint(0, 99),
        "n": random.randint(1, 2),
    }
    text = "x" * random.randint(1, 60)
    if kind == "wrong":
        path, body = random.choice(WRONG)
        answer = await client.post(path, content=body, headers=JSON)
        assert 400 <= answer.status_code < 500 and "error" in answer.json(), (
            path,
            body[:99],
            answer.text,
        )
        found[kind] += 1
        return
    if kind == "vector":
        answer = await client.post("/v1/embeddings", json={"input": text})
    elif kind in ("stream", "left"):
        asked |= {"max_tokens": 200} if kind == "left" else {}
        async with client.stream(
            "POST", "/v1/completions", json=asked | {"prompt": text, "stream": True}
        ) as answer:
            lines = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if kind == "left" and random.random() < 0.2:
                    found["left"] += 1
                    return
        assert answer.status_code == 429 or "data: [DONE]" in lines
    else:
        asked |= {"whole": {"prompt": text}, "chat": {"messages": ASKED},
                  "shape": {"prompt": text, "response_format": {"type": "json_object"}},
                  "tool": {"messages": ASKED, "tools": [WEATHER, TIME], "tool_choice": "required"}}[kind]  # fmt: skip
        path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        wait = random.choice([120, 120, 0.05])
        try:
            answer = await client.post(path, json=asked, timeout=wait)
        except httpx.TimeoutException:
            found["left"] += 1
            return
    assert answer.status_code in (200, 429), (kind, answer.text)
    found[kind if answer.status_code == 200 else 429] += 1


async def crowd(server: Running, clients: int, each: int, seed: int) -> Counter[Any]:
    found: Counter[Any] = Counter()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(
        base_url=str(server.client.base_url), limits=limits, timeout=300
    ) as client:

        async def go(number: int) -> None:
            random = Random(f"{seed} {number}")
            for _ in range(each):
                await one(client, random, found)

        await asyncio.gather(*map(go, range(clients)))
    return found


def campaign(
    rounds: int, clients: int, each: int, caplog: pytest.LogCaptureFixture
) -> list[int]:
    """Bytes of this process after every round."""
    server = Running(
        replace(load_tokenizer("bytes"), chat_template=HERMES),
        most=clients,
        limit=16,
        tokens=1024,
        budget=96,
        drafter=Lookup(shared=10_000, least=1, width=2),
    )
    held = []
    with caplog.at_level(logging.WARNING):
        for seed in range(rounds):
            found = asyncio.run(crowd(server, clients, each, seed))
            assert {
                "whole",
                "stream",
                "chat",
                "shape",
                "tool",
                "vector",
                "wrong",
                "left",
            } <= found.keys(), found
            until(server.empty)
            pool = server.engine.scheduler.pool
            assert (
                pool.free == pool.blocks == 128
                and not server.engine.scheduler.due
                and server.service.failure is None
            )
            gc.collect()
            held.append(psutil.Process().memory_info().rss)
    assert server.post("completions", prompt="x", max_tokens=2).status_code == 200
    server.close()
    traces = [
        record.getMessage()
        for record in caplog.records
        if record.exc_info or "Traceback" in record.getMessage()
    ]
    assert not traces, traces
    return held


@pytest.mark.soak
@pytest.mark.slow
def test_a_crowd_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    campaign(1, 50, 4, caplog)


@pytest.mark.soak
def test_a_long_crowd_of_200_leaves_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = campaign(8, 200, 6, caplog)
    assert held[-1] - held[3] < 24 * 2**20, [size // 2**20 for size in held]


@pytest.mark.slow
def test_a_thousand_at_once_are_served_or_told_to_come_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Running(
        load_tokenizer("bytes"), most=200, limit=32, tokens=2048, budget=256
    )

    body, where = json.dumps({"prompt": "x", "max_tokens": 4}), server.client.base_url
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.host}\r\nContent-Type: application/json\r\n"
    request = (
        f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
    )

    async def ask() -> int:
        """A client of a few lines: that of httpx takes longer for a thousand than the server."""
        reader, writer = await asyncio.open_connection(where.host, where.port)
        writer.write(request)
        answer = (await reader.read()).decode()
        writer.close()
        lines, content = answer.split("\r\n\r\n", 1)
        status = int(lines.split()[1])
        assert status == 200 or (
            "retry-after" in lines.lower() and json.loads(content)["error"]
        ), answer
        return status

    async def everybody() -> list[int]:
        return await asyncio.wait_for(
            asyncio.gather(*(ask() for _ in range(1000))), 300
        )

    found = Counter(asyncio.run(everybody()))
    assert found[200] >= 200 and found[200] + found[429] == 1000
    until(server.empty)
    server.close()
