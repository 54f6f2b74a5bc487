"""Load on a server, this one or any other that speaks as OpenAI's, and what it does to the times of its answers.

The words are those of ``vllm bench serve``, so that figures of both can stand side by side. TTFT is the time from a
question to its answer's first token, TPOT the mean time of each further token, ITL the time between two events of a
stream, E2EL the time from a question to its answer's end. Goodput counts the requests that meet all limits.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import numpy as np

from weft.errors import UsageError, WeftError

#: Mean tokens of prompts and of answers in ShareGPT, and how far their logarithms spread.
SHAREGPT = ((161, 1.1), (338, 0.9))
SHORTEST, LONGEST = 4, 1024

METRICS = ("ttft", "tpot", "itl", "e2el")


class Ask(NamedTuple):
    prompt: str | list[int]
    tokens: int  # of the answer


@dataclass
class Outcome:
    """What came of one question; times in seconds of one clock."""

    began: float
    times: list[float] = field(default_factory=list)  # when events with text came
    end: float = 0.0
    prompt: int = 0  # tokens
    written: int = 0
    error: str = ""

    @property
    def seconds(self) -> dict[str, list[float]]:
        """By metric, what this one has to say about it."""
        ttft, e2el = self.times[0] - self.began, self.end - self.began
        tpot = [(self.times[-1] - self.times[0]) / (self.written - 1)] if self.written > 1 else []
        gaps = [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
        return {"ttft": [ttft], "tpot": tpot, "itl": gaps, "e2el": [e2el]}


def random_asks(count: int, prompt: int, answer: int, ratio: float, prefix: int, seed: int) -> list[Ask]:
    """Prompts of random ids below 256, which every vocabulary has, behind ``prefix`` that all share.

    Lengths are uniform within ``ratio`` of ``prompt`` and ``answer``.
    """
    random = Random(seed)

    def length(mean: int) -> int:
        return max(1, random.randint(math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))))

    shared = [random.randrange(256) for _ in range(prefix)]
    texts = [[*shared, *(random.randrange(256) for _ in range(length(prompt)))] for _ in range(count)]
    return [Ask(text, length(answer)) for text in texts]


def sharegpt_asks(count: int, seed: int) -> list[Ask]:
    """Random ids, of lengths that are drawn as people's talks have them: log-normal with ShareGPT's means."""
    random = Random(seed)

    def length(mean: float, spread: float) -> int:
        drawn = random.lognormvariate(math.log(mean) - spread**2 / 2, spread)
        return min(LONGEST, max(SHORTEST, round(drawn)))

    return [
        Ask([random.randrange(256) for _ in range(length(*SHAREGPT[0]))], length(*SHAREGPT[1])) for _ in range(count)
    ]


def read_asks(path: Path, count: int, answer: int) -> list[Ask]:
    """A JSON object per line: ``prompt``, and perhaps ``output_tokens``."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()][:count]
        return [Ask(row["prompt"], int(row.get("output_tokens", answer))) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no file with an object with 'prompt' in each line: {error!r}") from None


def make_asks(
    dataset: str, count: int, path: Path | None, prompt: int, answer: int, ratio: float, prefix: int, seed: int
) -> list[Ask]:
    """The questions of a data set by its name; errors: unknown names, and a file that is missing."""
    if dataset == "random":
        return random_asks(count, prompt, answer, ratio, prefix, seed)
    if dataset == "sharegpt":
        return sharegpt_asks(count, seed)
    if dataset == "custom" and path:
        return read_asks(path, count, answer)
    raise UsageError(f"--dataset-name {dataset}: choose random, sharegpt, or custom with --dataset-path FILE")


def read_limits(words: Sequence[str]) -> dict[str, float]:
    """``METRIC:MS`` each."""
    try:
        found = {name: float(limit) for name, limit in (word.split(":") for word in words)}
    except ValueError:
        raise UsageError(f"--goodput {' '.join(words)}: give METRIC:MS, for instance ttft:500") from None
    if unknown := found.keys() - set(METRICS):
        raise UsageError(f"--goodput knows no {sorted(unknown)[0]}; choose from: {', '.join(METRICS)}")
    return found


def read_percentiles(words: str) -> list[float]:
    """Numbers of 0 to 100 with commas between them."""
    try:
        found = [float(word) for word in words.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= p <= 100 for p in found):
        raise UsageError(f"--metric-percentiles {words}: give numbers from 0 to 100, for instance 50,99")
    return found


def pauses(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds before each request: a gamma distribution, of Poisson's arrivals with ``burstiness`` 1."""
    random = Random(seed)
    return [0.0 if math.isinf(rate) else random.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)]


class Target(NamedTuple):
    """A server, and how it is asked."""

    url: str
    model: str | None = None
    key: str | None = None
    ignore_eos: bool = False
    temperature: float = 0.0


async def send(client: httpx.AsyncClient, target: Target, ask: Ask) -> Outcome:
    """One question, and the times of its events."""
    body: dict[str, Any] = {"model": target.model, "prompt": ask.prompt, "max_tokens": ask.tokens, "stream": True,
                            "temperature": target.temperature, "stream_options": {"include_usage": True}}  # fmt: skip
    if target.ignore_eos:
        body["ignore_eos"] = True
    outcome = Outcome(time.perf_counter())
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


def _note(outcome: Outcome, event: dict[str, Any]) -> None:
    if "error" in event:
        outcome.error = str(event["error"])
    if any(choice.get("text") or choice.get("finish_reason") for choice in event.get("choices", ())):
        outcome.times.append(time.perf_counter())
    if usage := event.get("usage"):
        outcome.prompt, outcome.written = usage["prompt_tokens"], usage["completion_tokens"]


async def events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def run(
    target: Target, asks: Sequence[Ask], waits: Sequence[float], most: int | None = None
) -> tuple[list[Outcome], float]:
    """Ask everything, ``most`` at a time; returns what came and the seconds that it took. Errors: nobody answers."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    gate = asyncio.Semaphore(most or len(asks))
    async with httpx.AsyncClient(base_url=target.url, timeout=3600, limits=limits, headers=headers) as client:
        try:
            models = (await client.get("/v1/models", timeout=30)).raise_for_status().json()
            target = target._replace(model=target.model or models["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise WeftError(f"{target.url} does not answer: {error}; start weft serve, or give --base-url") from None

        async def one(ask: Ask) -> Outcome:
            async with gate:
                return await send(client, target, ask)

        began, tasks = time.perf_counter(), []
        for ask, wait in zip(asks, waits, strict=True):
            await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(ask)))
        outcomes = await asyncio.gather(*tasks)
        return outcomes, time.perf_counter() - began


def summary(
    outcomes: Sequence[Outcome], seconds: float, percentiles: Sequence[float], limits: Mapping[str, float]
) -> dict[str, Any]:
    """Figures by the names that vLLM gives them; times in milliseconds. ``limits``: of metrics, in milliseconds."""
    good = [one for one in outcomes if not one.error]
    prompt, written = sum(one.prompt for one in good), sum(one.written for one in good)
    found: dict[str, Any] = {
        "completed": len(good), "failed": len(outcomes) - len(good), "duration": seconds,
        "total_input_tokens": prompt, "total_output_tokens": written, "request_throughput": len(good) / seconds,
        "output_throughput": written / seconds, "total_token_throughput": (prompt + written) / seconds,
        "errors": sorted({one.error for one in outcomes if one.error}),
    }  # fmt: skip
    if limits:
        within = [all(1000 * x <= limits.get(m, math.inf) for m in METRICS for x in one.seconds[m]) for one in good]
        found["request_goodput"] = sum(within) / seconds
    for metric in METRICS if good else ():
        times = 1000 * np.array([x for one in good for x in one.seconds[metric]])
        if len(times):
            found |= {f"mean_{metric}_ms": times.mean(), f"median_{metric}_ms": np.median(times)}
            found |= {f"std_{metric}_ms": times.std()}
            found |= {f"p{p:g}_{metric}_ms": np.percentile(times, p) for p in percentiles}
    return {name: float(value) if isinstance(value, np.floating) else value for name, value in found.items()}
