"""Counters and histograms of a server, in Prometheus' format."""

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weft.generate.backend import COUNTS, AnswerState, Backend, TokenEvent

#: Seconds to a first token, and between two tokens.
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
NEXT = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.3, 2.6)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


#: What is said of every field of :class:`EngineLoad`, with the name of its metric.
LOAD = (
    ("requests_running", "Answers that are being written."),
    ("requests_waiting", "Answers that wait for their turn."),
    ("preemptions", "Answers that had to be computed again for want of blocks."),
    ("cache_blocks_used", "Blocks of the cache that requests own."),
    ("cache_blocks", "Blocks of the cache."),
    ("engine_tokens", "Tokens that the engine has written."),
    ("engine_draining", "1 if the engine takes no new requests."),
    ("cache_blocks_borrowed", "Blocks of answers that lie in caches of other engines."),
    ("cache_blocks_lent", "Blocks of the cache with answers of other engines."),
    (
        "engine_role",
        "1 if the engine only computes prompts, 2 if it only writes, 3 if it keeps blocks.",
    ),
    ("kept_blocks_looked", "Blocks looked for outside the cache, as requests began."),
)

#: What is said of every field of :class:`SourceUsage` but its name, with the name of its metric.
SOURCES = (
    ("kept_blocks_fetched", "Blocks read from host memory, files or other engines."),
    ("kept_bytes_fetched", "Bytes of the blocks that were read."),
    ("kept_blocks_stored", "Blocks that host memory or files have taken."),
    ("kept_bytes_stored", "Bytes of the blocks that were taken."),
    ("kept_blocks_refused", "Blocks that were not taken, or not given after all."),
)


class LoadCollector:
    """Collects Prometheus metrics of ``backend``: its counters, and the load of each of its engines.

    Loads have the label ``engine``, unless the only engine is in this process and has no name.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def collect(self) -> Iterator[Metric]:
        loads = self.backend.loads()
        for index, (name, said) in enumerate(LOAD):
            labels = [] if "" in loads else ["engine"]
            gauge = GaugeMetricFamily(f"weft_{name}", said, labels=labels)
            for engine, load in loads.items():
                gauge.add_metric([engine] if engine else [], float(load[index]))  # type: ignore[arg-type]
            yield gauge
        for index, (name, said) in enumerate(SOURCES):
            named = ["source"] if "" in loads else ["engine", "source"]
            counter = CounterMetricFamily(f"weft_{name}", said, labels=named)
            for engine, load in loads.items():
                for source, *values in load.sources:
                    labels = [engine, source] if engine else [source]
                    counter.add_metric(labels, values[index])
            yield counter
        for name, value in self.backend.counts().items():
            yield CounterMetricFamily(f"weft_{name}", COUNTS[name], value)


class RequestMetrics:
    """Prometheus metrics of requests of any kind.

    Attributes:
        ``registry``: all metrics.
        ``requests``: number of answered requests, by path and status.
        ``whole``: seconds from a request's arrival to the end of its answer.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self.counter(
            "requests", "Requests that were answered.", ("path", "status")
        )
        self.whole = self.timed(
            "e2e_request_latency", "From a question to an answer's end.", WHOLE
        )

    def counter(self, name: str, said: str, labels: tuple[str, ...] = ()) -> Counter:
        """Return a new counter in the registry. Its name is ``weft_`` followed by ``name``. ``said``: its description;
        ``labels``: names of its labels.
        """
        return Counter(f"weft_{name}", said, labels, registry=self.registry)

    def timed(self, name: str, said: str, buckets: tuple[float, ...]) -> Histogram:
        """Return a new histogram in the registry. Its name is ``name`` between ``weft_`` and ``_seconds``. ``said``:
        its description; ``buckets``: upper bounds of its buckets in seconds.
        """
        return Histogram(
            f"weft_{name}_seconds", said, buckets=buckets, registry=self.registry
        )

    def text(self) -> bytes:
        """Return all metrics of the registry in Prometheus' text format."""
        return generate_latest(self.registry)

    def counting(self, app: Any) -> Any:
        """Wrap the ASGI application ``app`` to count answers by path and status. The wrapper sets ``scope["began"]`` to
        the time of arrival.
        """

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            async def watched(message: Any) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"] if "endpoint" in scope else "other"
                    self.requests.labels(path, message["status"]).inc()
                await send(message)

            scope["began"] = time.perf_counter()
            await app(scope, receive, watched if scope["type"] == "http" else send)

        return counted


class ServerMetrics(RequestMetrics):
    """Prometheus metrics of the requests for texts that ``backend`` answers, and of its engines."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.prompt = self.counter("prompt_tokens", "Tokens of prompts.")
        self.hits = self.counter(
            "prefix_hit_tokens", "Tokens of prompts that were found computed."
        )
        self.written = self.counter("generation_tokens", "Tokens that were written.")
        self.first = self.timed(
            "time_to_first_token", "From a question to its answer's first token.", FIRST
        )
        self.next = self.timed(
            "inter_token_latency", "From one token of an answer to the next.", NEXT
        )
        self.registry.register(LoadCollector(backend))


class AnswerTimer:
    """Records the times of the answers to one request in ``metrics``. ``prompt``: number of the request's prompt
    tokens; ``began``: when the request arrived, in seconds of ``time.perf_counter``.
    """

    def __init__(self, metrics: ServerMetrics, prompt: int, began: float) -> None:
        self.metrics, self.began = metrics, began
        self._last: dict[int, float] = {}
        metrics.prompt.inc(prompt)

    def record(self, event: TokenEvent, generation: AnswerState) -> None:
        """Record that ``event`` has come now: a token of an answer, the answer's end, or both. ``generation``: the
        state of this answer.
        """
        metrics, now = self.metrics, time.perf_counter()
        if event.token is not None:
            metrics.written.inc()
            if event.number in self._last:
                metrics.next.observe(now - self._last[event.number])
            else:
                metrics.first.observe(now - self.began)
                metrics.hits.inc(generation.hits)
            self._last[event.number] = now
        if event.finished:
            metrics.whole.observe(now - self.began)
