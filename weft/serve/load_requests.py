"""Requests of a load on a server or an engine, their arrival times, and statistics of their latencies.

The names are those of ``vllm bench serve``, so that the results of both can be compared. TTFT is the time from a
request to its answer's first token, TPOT the mean time of each further token, ITL the time between two events of a
stream, E2EL the time from a request to its answer's end. Goodput counts the requests that meet all limits.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from weft.errors import UsageError, nearest

#: Of prompts and of answers in ShareGPT: mean tokens, and the standard deviation of their logarithm.
SHAREGPT = ((161, 1.1), (338, 0.9))
SHORTEST, LONGEST = 4, 1024

METRICS = ("ttft", "tpot", "itl", "e2el")


class LoadRequest(NamedTuple):
    """A request of a benchmark load. ``prompt``: text or token ids of the prompt; ``tokens``: number of tokens to
    generate.
    """

    prompt: str | list[int]
    tokens: int  # of the answer


@dataclass
class RequestOutcome:
    """Times and numbers of tokens of one request of a load. All times are in seconds of the same clock.

    Attributes:
        ``began``: when the request was sent.
        ``times``: when each token of the answer arrived. For an answer that comes as a stream of events: when each
            event arrived that has text.
        ``end``: when its answer was complete.
        ``prompt``: number of tokens of the prompt.
        ``written``: number of tokens of the answer.
        ``error``: why the request failed; empty if it did not.
    """

    began: float
    times: list[float] = field(default_factory=list)  # when events with text came
    end: float = 0.0
    prompt: int = 0  # tokens
    written: int = 0
    error: str = ""

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Values of each latency metric for this request, in seconds, by its name: ``ttft`` (time to the first token),
        ``tpot`` (mean time per further token), ``itl`` (each gap between two tokens) and ``e2el`` (time to the end).
        """
        ttft, e2el = self.times[0] - self.began, self.end - self.began
        tpot = (
            [(self.times[-1] - self.times[0]) / (self.written - 1)]
            if self.written > 1
            else []
        )
        gaps = [
            later - earlier
            for earlier, later in zip(self.times, self.times[1:], strict=False)
        ]
        return {"ttft": [ttft], "tpot": tpot, "itl": gaps, "e2el": [e2el]}


def random_requests(
    count: int, prompt: int, answer: int, ratio: float, prefix: int, seed: int
) -> list[LoadRequest]:
    """Return a list of ``count`` requests whose prompts are random token ids below 256; every vocabulary has these ids.

    ``prompt``, ``answer``: mean numbers of tokens. Lengths are drawn uniformly from these, plus or minus the share
    ``ratio``. ``prefix``: number of ids at the beginning that all prompts have in common. ``seed``: seed of the random
    numbers.
    """
    random = Random(seed)

    def length(mean: int) -> int:
        return max(
            1,
            random.randint(
                math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
            ),
        )

    shared = [random.randrange(256) for _ in range(prefix)]
    texts = [
        [*shared, *(random.randrange(256) for _ in range(length(prompt)))]
        for _ in range(count)
    ]
    return [LoadRequest(text, length(answer)) for text in texts]


def sharegpt_requests(count: int, seed: int) -> list[LoadRequest]:
    """Return ``count`` requests of random ids. The lengths of prompts and answers are log-normal with the means of
    ShareGPT's conversations. ``seed``: seed of the random numbers.
    """
    random = Random(seed)

    def length(mean: float, spread: float) -> int:
        drawn = random.lognormvariate(math.log(mean) - spread**2 / 2, spread)
        return min(LONGEST, max(SHORTEST, round(drawn)))

    return [
        LoadRequest(
            [random.randrange(256) for _ in range(length(*SHAREGPT[0]))],
            length(*SHAREGPT[1]),
        )
        for _ in range(count)
    ]


def read_requests(path: Path, count: int, answer: int) -> list[LoadRequest]:
    """Read the first ``count`` requests of ``path``, a file of JSON lines. A line is an object with ``prompt`` and
    optionally ``output_tokens``, the number of tokens to generate. Without ``output_tokens`` it is ``answer``.
    """
    try:
        rows = [
            json.loads(line) for line in path.read_text().splitlines() if line.strip()
        ][:count]
        return [
            LoadRequest(row["prompt"], int(row.get("output_tokens", answer)))
            for row in rows
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no file with an object with 'prompt' in each line: {error!r}"
        ) from None


def make_requests(
    dataset: str,
    count: int,
    path: Path | None,
    prompt: int,
    answer: int,
    ratio: float,
    prefix: int,
    seed: int,
) -> list[LoadRequest]:
    """Return a list of ``count`` requests of the data set named ``dataset``.

    Raises :class:`UsageError` for unknown names and missing files.

    Args:
        ``path``: the file, for a data set that is read from a file; else None.
        ``prompt``: mean number of tokens of a random prompt.
        ``answer``: mean number of tokens to generate.
        ``ratio``: share of the mean by which a random number of tokens may be above or below it.
        ``prefix``: number of token ids at the beginning that all random prompts have in common.
        ``seed``: seed of the random numbers.
    """
    if dataset == "random":
        return random_requests(count, prompt, answer, ratio, prefix, seed)
    if dataset == "sharegpt":
        return sharegpt_requests(count, seed)
    if dataset == "custom" and path:
        return read_requests(path, count, answer)
    raise UsageError(
        f"--dataset-name {dataset}: choose random, sharegpt, or custom with --dataset-path FILE"
    )


def read_limits(words: Sequence[str]) -> dict[str, float]:
    """Read latency limits from ``words`` of the form ``METRIC:MS``, such as ``ttft:200``. Return the limits in
    milliseconds by metric.
    """
    try:
        limits = {
            name: float(limit) for name, limit in (word.split(":") for word in words)
        }
    except ValueError:
        raise UsageError(
            f"--goodput {' '.join(words)}: give METRIC:MS, for instance ttft:500"
        ) from None
    if unknown := limits.keys() - set(METRICS):
        raise UsageError(
            f"--goodput knows no {min(unknown)}; {nearest(min(unknown), METRICS, True)}"
        )
    return limits


def read_percentiles(words: str) -> list[float]:
    """Return a list of the percentiles in ``words``, numbers from 0 to 100 with commas between them, such as
    ``50,99``.
    """
    try:
        percentiles = [float(word) for word in words.split(",")]
    except ValueError:
        percentiles = []
    if not percentiles or not all(0 <= p <= 100 for p in percentiles):
        raise UsageError(
            f"--metric-percentiles {words}: give numbers from 0 to 100, for instance 50,99"
        )
    return percentiles


def arrival_pauses(
    count: int, rate: float, burstiness: float, seed: int
) -> list[float]:
    """Return a list of ``count`` random pauses between arrivals, in seconds, for a mean of ``rate`` requests per
    second.

    Pauses are gamma distributed. ``burstiness``: shape of the distribution; with 1 the arrivals are a Poisson process,
    below 1 they come in bursts. ``seed``: seed of the random numbers.
    """
    random = Random(seed)
    return [
        0.0
        if math.isinf(rate)
        else random.gammavariate(burstiness, 1 / (rate * burstiness))
        for _ in range(count)
    ]


def latency_statistics(
    outcomes: Sequence[RequestOutcome],
    seconds: float,
    percentiles: Sequence[float],
    limits: Mapping[str, float],
) -> dict[str, Any]:
    """Return statistics of the requests' ``outcomes``, by the names that ``vllm bench serve`` uses. Times are in
    milliseconds. ``seconds``: duration of the load. ``percentiles``: percentiles of each metric to compute, from 0 to
    100. ``limits``: largest milliseconds by metric; requests within all of them count in the goodput.
    """
    good = [outcome for outcome in outcomes if not outcome.error]
    prompt, written = (
        sum(outcome.prompt for outcome in good),
        sum(outcome.written for outcome in good),
    )
    statistics: dict[str, Any] = {
        "completed": len(good), "failed": len(outcomes) - len(good), "duration": seconds,
        "total_input_tokens": prompt, "total_output_tokens": written, "request_throughput": len(good) / seconds,
        "output_throughput": written / seconds, "total_token_throughput": (prompt + written) / seconds,
        "errors": sorted({outcome.error for outcome in outcomes if outcome.error}),
    }  # fmt: skip
    if limits:
        within = [
            all(
                1000 * x <= limits.get(m, math.inf)
                for m in METRICS
                for x in outcome.seconds[m]
            )
            for outcome in good
        ]
        statistics["request_goodput"] = sum(within) / seconds
    for metric in METRICS if good else ():
        times = 1000 * np.array(
            [x for outcome in good for x in outcome.seconds[metric]]
        )
        if len(times):
            statistics |= {
                f"mean_{metric}_ms": times.mean(),
                f"median_{metric}_ms": np.median(times),
            }
            statistics |= {f"std_{metric}_ms": times.std()}
            statistics |= {
                f"p{p:g}_{metric}_ms": np.percentile(times, p) for p in percentiles
            }
    return {
        name: float(value) if isinstance(value, np.floating) else value
        for name, value in statistics.items()
    }
