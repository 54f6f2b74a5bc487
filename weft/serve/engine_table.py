"""What ``weft top`` shows: the engines of a server, their queues and caches, from the server's metrics."""

import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from weft.errors import UsageError, WeftError

#: Seconds that the server may take to answer.
ANSWER_S = 5.0

#: Columns of the table.
COLUMNS = (
    "engine", "state", "writing", "waiting", "blocks", "tokens/s", "lost blocks", "found outside",
)  # fmt: skip


#: Columns that a narrow terminal does without, those that are missed least first.
SPARED = ("found outside", "lost blocks", "blocks", "tokens/s", "state")

#: Fewest characters of an engine's name, and those between two columns.
NAME, GAP = 12, 2

#: States of engines that take requests, by their roles.
STATES = ("ready", "prompts", "writing", "caching")


class EngineRow(NamedTuple):
    """State of an engine at one moment, as one row of the table that shows all engines.

    Attributes:
        ``name``: the engine's name; "" for the only engine of a server.
        ``state``: "ready"; "prompts" if it only computes prompts; "writing" if it only goes on with answers that others
            have begun; "caching" if it only keeps blocks for the others; or "draining" if it takes no new requests.
        ``running``: number of requests whose answers the engine is writing.
        ``waiting``: number of requests that wait in the engine.
        ``used``: number of cache blocks in use.
        ``blocks``: number of all its cache blocks.
        ``tokens``: number of tokens that the engine has written so far.
        ``preemptions``: how often a request of the engine has lost its cache blocks so far.
        ``looked``: number of blocks for which requests have looked outside the engine's cache.
        ``fetched``: how many blocks each place outside the cache has given, by its name.
    """

    name: str
    state: str
    running: int
    waiting: int
    used: int
    blocks: int
    tokens: int
    preemptions: int
    looked: int = 0
    fetched: Mapping[str, int] = MappingProxyType({})


class Snapshot(NamedTuple):
    """State of all engines of a server at one moment. ``time``: the moment, in seconds of ``time.monotonic``."""

    time: float
    engines: list[EngineRow]


def read_engines(url: str) -> Snapshot:
    """Read the state of all engines from the metrics of the server at ``url``. Raises :class:`WeftError` if it does not
    answer, and :class:`UsageError` if it is not a server of ``weft serve``.
    """
    from prometheus_client.parser import text_string_to_metric_families

    try:
        known = urlsplit(url)
        right = known.scheme in ("http", "https") and known.hostname and known.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        right = False
    if not right:
        raise UsageError(f"{url} is no address; give one such as http://127.0.0.1:8000")
    place = url.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{place}/metrics", timeout=ANSWER_S) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise UsageError(
            f"{url} is no server of weft serve (HTTP {error.code}); give its address"
        ) from None
    except HTTPException:
        raise UsageError(f"{url} does not speak HTTP; give the address of weft serve") from None  # fmt: skip
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        raise WeftError(
            f"{url} does not answer: {getattr(cause, 'strerror', None) or cause}; is the server there?"
        ) from None
    values: dict[str, dict[str, float]] = {}
    fetched: dict[str, dict[str, int]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                engine = sample.labels.get("engine", "")
                if sample.name == "weft_kept_blocks_fetched_total":
                    of_engine = fetched.setdefault(engine, {})
                    of_engine[sample.labels["source"]] = int(sample.value)
                values.setdefault(sample.name, {})[engine] = sample.value
    except ValueError:
        values = {}
    if "weft_generation_tokens_total" not in values:
        raise UsageError(f"{url} is no server of weft serve; give its address")

    def of(name: str, engine: str) -> int:
        return int(values.get(f"weft_{name}", {}).get(engine, 0))

    rows = [
        EngineRow(
            engine,
            "draining"
            if of("engine_draining", engine)
            else STATES[of("engine_role", engine)],
            of("requests_running", engine),
            of("requests_waiting", engine),
            of("cache_blocks_used", engine),
            of("cache_blocks", engine),
            of("engine_tokens", engine),
            of("preemptions", engine),
            of("kept_blocks_looked", engine),
            fetched.get(engine, {}),
        )
        for engine in sorted(values.get("weft_cache_blocks", {}))
    ]
    return Snapshot(time.monotonic(), rows)


def table_rows(now: Snapshot, before: Snapshot | None) -> list[Sequence[str]]:
    """Return the rows of the table, each a sequence of cells: one row per engine and one for all together.

    ``now``: the engines now. ``before``: the engines at an earlier moment, since which tokens per second are counted;
    None: no tokens per second are shown.
    """
    earlier = {row.name: row.tokens for row in before.engines} if before else {}
    seconds = max(1e-9, now.time - before.time) if before else 1.0

    def rate(rows: Sequence[EngineRow]) -> str:
        known = [row for row in rows if row.name in earlier]
        # an engine that began anew counts from 0
        written = sum(max(0, row.tokens - earlier[row.name]) for row in known)
        return f"{written / seconds:,.1f}" if known else "-"

    cells: list[Sequence[str]] = [
        (
            row.name or "(this server)",
            row.state,
            f"{row.running:,}",
            f"{row.waiting:,}",
            f"{row.used:,} of {row.blocks:,}",
            rate([row]),
            f"{row.preemptions:,}",
            found_shares([row]),
        )
        for row in now.engines
    ]
    if len(now.engines) != 1:
        rows = now.engines
        # blocks of cache engines are copies of the others'
        own = [row for row in rows if row.state != "caching"]
        cells.append(
            (
                "all",
                "" if rows else "no engine",
                f"{sum(row.running for row in rows):,}",
                f"{sum(row.waiting for row in rows):,}",
                f"{sum(row.used for row in own):,} of {sum(row.blocks for row in own):,}",
                rate(rows),
                f"{sum(row.preemptions for row in rows):,}",
                found_shares(rows),
            )
        )
    return cells


def found_shares(rows: Sequence[EngineRow]) -> str:
    """Return a text for the user with the share of blocks that each place outside the engines' caches has given, such
    as ``host 40 %, files 12 %``; "-" if nothing was looked for. The percentages are of all blocks that the engines in
    ``rows`` have looked for outside their caches.
    """
    looked, given = sum(row.looked for row in rows), Counter[str]()
    for row in rows:
        given.update(row.fetched)
    shares = [f"{name} {min(1, n / looked):.0%}" for name, n in given.items() if looked]
    return ", ".join(shares).replace("%", " %") or "-"


class FittedTable(NamedTuple):
    """A table that fits a terminal. ``columns``: the names of its columns; ``rows``: their cells."""

    columns: list[str]
    rows: list[list[str]]


def fitted_table(
    now: Snapshot, before: Snapshot | None, width: int, height: int
) -> FittedTable:
    """Return the table of :func:`table_rows`, shortened to ``width`` characters and ``height`` lines. If lines are
    lacking, engines with the fewest running and waiting requests are left out, and a last row says how many. If columns
    do not fit, they are left out in the order of :data:`SPARED`, and long names are cut in their middle.
    """
    rows, lines = table_rows(now, before), max(1, height - 2)
    left_out = len(rows) - lines
    if left_out > 0 and len(now.engines) > 1:
        busy = sorted(now.engines, key=lambda row: -(row.running + row.waiting))
        kept = {row.name for row in busy[: max(0, lines - 2)]}
        others = f"... {len(now.engines) - len(kept)} others"
        shown = [row for row in rows[:-1] if row[0] in kept]
        rows = [*shown, (others, *[""] * (len(COLUMNS) - 1)), rows[-1]]
    spared = [*SPARED]
    columns = [*COLUMNS]
    while True:
        places = [COLUMNS.index(name) for name in columns]
        widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in places]
        left = width - sum(widths[1:]) - GAP * len(columns)
        if left >= min(widths[0], NAME) or not spared:
            break
        columns.remove(spared.pop(0))
    cells = [[row[i] for i in places] for row in rows]
    return FittedTable(columns, [[_cut(each[0], left), *each[1:]] for each in cells])


def _cut(name: str, width: int) -> str:
    """Return ``name``, without its middle if it has more than ``width`` characters."""
    if len(name) <= width:
        return name
    half = max(1, width - 1) // 2
    return f"{name[: max(1, width - 1 - half)]}…{name[-half:]}"
