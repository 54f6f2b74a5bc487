"""Put load on a server, Weft's or any other with OpenAI's interface, and measure its latencies."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import httpx

from weft.errors import WeftError
from weft.measure.asks import LoadRequest, RequestOutcome


class Target(NamedTuple):
    """A server, and the settings of requests to it."""

    url: str
    model: str | None = None
    key: str | None = None
    ignore_eos: bool = False
    temperature: float = 0.0


async def send(
    client: httpx.AsyncClient, target: Target, ask: LoadRequest
) -> RequestOutcome:
    """Send one request, and note the times of its events."""
    body: dict[str, Any] = {"model": target.model, "prompt": ask.prompt, "max_tokens": ask.tokens, "stream": True,
                            "temperature": target.temperature, "stream_options": {"include_usage": True}}  # fmt: skip
    if target.ignore_eos:
        body["ignore_eos"] = True
    outcome = RequestOutcome(time.perf_counter())
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                outcome.error = f"{answer.status_code} {(await answer.aread()).decode(errors='replace')[:200]}"
                return outcome
            async for event in events(answer):
                _note(outcome, event)
    except httpx.HTTPError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.end = time.perf_counter()
    outcome.error = outcome.error or ("" if outcome.times else "no token came")
    return outcome


def _note(outcome: RequestOutcome, event: dict[str, Any]) -> None:
    if "error" in event:
        outcome.error = str(event["error"])
    if any(
        choice.get("text") or choice.get("finish_reason")
        for choice in event.get("choices", ())
    ):
        outcome.times.append(time.perf_counter())
    if usage := event.get("usage"):
        outcome.prompt, outcome.written = (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def run(
    target: Target,
    asks: Sequence[LoadRequest],
    waits: Sequence[float],
    most: int | None = None,
) -> tuple[list[RequestOutcome], float]:
    """Send all requests, ``waits[i]`` seconds after the one before, at most ``most`` at a time.

    Returns the results, and the seconds that all took. Raises :class:`WeftError` if the server does not answer.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    gate = asyncio.Semaphore(most or len(asks))
    async with httpx.AsyncClient(
        base_url=target.url, timeout=3600, limits=limits, headers=headers
    ) as client:
        try:
            models = (
                (await client.get("/v1/models", timeout=30)).raise_for_status().json()
            )
            target = target._replace(model=target.model or models["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise WeftError(
                f"{target.url} does not answer: {str(error).rstrip('.')}; start weft serve, or give --base-url"
            ) from None

        async def one(ask: LoadRequest) -> RequestOutcome:
            async with gate:
                return await send(client, target, ask)

        began, tasks = time.perf_counter(), []
        for ask, wait in zip(asks, waits, strict=True):
            await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(ask)))
        outcomes = await asyncio.gather(*tasks)
        return outcomes, time.perf_counter() - began
