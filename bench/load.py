"""Put load on a server, Weft's or any other with OpenAI's interface, and measure its latencies.

    python bench/load.py --base-url http://127.0.0.1:8000 --num-prompts 100 --request-rate 4

docs/how-to/generate.md says what is measured.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.table import Table

from weft.cli import run_command_line
from weft.cli.app import app
from weft.cli.arguments import AsJson, read_keys
from weft.cli.bench import (
    Burstiness,
    DatasetName,
    DatasetPath,
    Goodput,
    InputLength,
    OutputLength,
    Percentiles,
    PrefixLength,
    RangeRatio,
    Rate,
    Requests,
    Seed,
)
from weft.errors import WeftError
from weft.serve import load_requests
from weft.serve.load_requests import LoadRequest, RequestOutcome


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


def load(
    base_url: Annotated[
        str, typer.Option(help="The server, also one that is not Weft's.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option(help="A name that the server knows; without it its first one."),
    ] = None,
    api_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file whose first line is a key."),
    ] = None,
    dataset_name: DatasetName = "random",
    dataset_path: DatasetPath = None,
    num_prompts: Requests = 100,
    request_rate: Rate = float("inf"),
    burstiness: Burstiness = 1.0,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time at most.")
    ] = None,
    random_input_len: InputLength = 256,
    random_output_len: OutputLength = 64,
    random_range_ratio: RangeRatio = 0.0,
    random_prefix_len: PrefixLength = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of the whole length.")
    ] = False,
    goodput: Goodput = None,
    metric_percentiles: Percentiles = "50,90,99",
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests before, which do not count.")
    ] = 1,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> int:
    """Ask a server many times and say how long it takes, in the words of vllm bench serve."""
    limits = load_requests.read_limits(goodput or [])
    percentiles = load_requests.read_percentiles(metric_percentiles)
    asked = load_requests.make_requests(
        dataset_name, num_prompts + num_warmups, dataset_path, random_input_len, random_output_len, random_range_ratio,
        random_prefix_len, seed,
    )  # fmt: skip
    key = read_keys(api_key)[0] if api_key else None
    target = Target(base_url.rstrip("/").removesuffix("/v1"), model, key, ignore_eos)
    waits = load_requests.arrival_pauses(
        len(asked[:num_prompts]), request_rate, burstiness, seed
    )

    async def measure() -> tuple[list[RequestOutcome], float]:
        # other ones, so that no prefix of those that count is known
        early = asked[num_prompts:]
        await run(target, early, [0.0] * len(early), 1)
        return await run(target, asked[:num_prompts], waits, max_concurrency)

    found = load_requests.latency_statistics(
        *asyncio.run(measure()), percentiles, limits
    )
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)
    if not found["completed"]:
        raise WeftError(f"no request was answered: {'; '.join(found['errors'][:3])}")
    return 0


def _show(found: dict[str, object]) -> None:
    table = Table(show_header=False)
    for name, value in found.items():
        if name != "errors":
            table.add_row(
                name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
            )
    Console().print(table)
    for error in found["errors"][:3]:  # type: ignore[index]
        print(f"an error: {error}")


def register() -> None:
    """Add the command to those of ``weft``, whose errors are one line as well."""
    app.command()(load)


if __name__ == "__main__":
    register()
    sys.argv.insert(1, "load")
    run_command_line()
