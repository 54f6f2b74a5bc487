"""The page of a federated run: loss over time and bytes, who took part when, staleness, and a table of the clients.

It is made from the records of a run alone (``federated`` and ``run`` in ``metrics.jsonl``), whether clients were
simulated or real.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from weft.observe.display import compact
from weft.observe.run_metrics import Record, Records, read_metrics
from weft.pages import render, write

#: Width and height of a curve, and the height of a client's lane, in units of the drawing.
WIDTH, HEIGHT, LANE = 560.0, 200.0, 16.0
#: Most clients that are drawn one by one.
MOST_LANES = 40


class CurveTick(NamedTuple):
    """A mark at an axis of a drawn curve: its place along the axis in units of the drawing, and its text."""

    place: float
    text: str


class DrawnCurve(NamedTuple):
    """A curve of the page, as it is drawn: its title, its SVG path, and the marks of the horizontal axis (``across``)
    and of the vertical one (``up``).
    """

    title: str
    path: str
    across: list[CurveTick]
    up: list[CurveTick]


class WorkBar(NamedTuple):
    """A bar in a client's lane of the page, for one work order.

    ``x``, ``width``: start and length of the bar, in the drawing's units. ``stale``: class of staleness from 0 to 3, by
    which the bar is coloured. ``about``: text that the page shows when the mouse is over the bar.
    """

    x: float
    width: float
    stale: int
    about: str


class ClientLane(NamedTuple):
    """A client's work orders over time, as bars in one line of the drawing. ``client``: the client's name; ``y``:
    height of the line in the drawing's units.
    """

    client: str
    y: float
    bars: list[WorkBar]


class ClientRow(NamedTuple):
    """A row of the table of clients on the page of a federated run: name and numbers of a client, as texts.

    The numbers are: its samples, updates and local steps; sum of the weights of its updates, and effective weight
    (:func:`client_rows`); mean staleness; and mean seconds of work and of waiting.
    """

    client: str
    samples: str
    updates: str
    steps: str
    weight: str
    effective: str
    staleness: str
    seconds: str
    waited: str


class StalenessBar(NamedTuple):
    """A bar of the histogram of staleness: place and height in the drawing's units, the value of staleness, and the
    number of updates with this value.
    """

    x: float
    height: float
    staleness: str
    updates: int


def write_federation_page(folder: Path) -> Path:
    """Write ``federation.html`` about the federated run in ``folder``, and return its path."""
    return write(folder / "federation.html", federation_page(read_metrics(folder)), "the page to")  # fmt: skip


def federation_page(records: Records) -> str:
    """Return the page about a federated run as HTML. ``records``: the records of the run."""
    changes = records.get("federated", [])
    head: Record = records.get("run", [{}])[-1]
    settings = (head.get("recipe") or {}).get("federated") or {}
    rows = client_rows(changes, head.get("clients") or {})
    # a real server records what each client has sent and received
    known_bytes = all("bytes" in change for change in changes)
    losses = [change["loss"] for change in changes]
    curves = [
        drawn_curve("Loss over time, seconds", [c["time"] for c in changes], losses)
    ]
    if known_bytes:
        sent = [change["bytes"] for change in changes]
        curves.append(drawn_curve("Loss over bytes sent and received", sent, losses))
    last = changes[-1] if changes else {}
    updates = sum(len(change["clients"]) for change in changes)
    tiles = [
        ("Policy", settings.get("policy", "?"), f"{len(rows)} clients"),
        ("Changes", f"{len(changes):,}", f"{updates:,} updates"),
        ("Loss", _shown(last.get("loss"), ".4f"), "of the last change"),
        ("Time", f"{last.get('time', 0.0):,.0f} s", "server's clock" if settings.get("listen") else "virtual clock"),
        ("Traffic", f"{compact(last.get('bytes', 0))}B" if known_bytes else "-", "both directions"),
    ]  # fmt: skip
    return render(
        "federated/federation_page.html",
        title=(head.get("recipe") or {}).get("name", "federated run"),
        subtitle=f"{settings.get('policy', '')} · partition {settings.get('partition', 'of the clients')}",
        tiles=tiles,
        curves=[drawn for drawn in curves if drawn.path],
        lanes=client_lanes(changes, [row.client for row in rows]),
        hidden=max(0, len(rows) - MOST_LANES),
        bars=staleness_bars(changes),
        rows=rows,
        width=WIDTH,
        height=HEIGHT,
        lane=LANE,
        seconds=f"{last.get('time', 0.0):,.0f}",
    )


def drawn_curve(
    title: str, xs: Sequence[float], ys: Sequence[float | None]
) -> DrawnCurve:
    """Return the curve through the points ``xs``, ``ys``; points without a value are left out."""
    points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
    if len(points) < 2:
        return DrawnCurve(title, "", [], [])
    right = max(x for x, _ in points) or 1.0
    low, high = min(y for _, y in points), max(y for _, y in points)
    span = (high - low) or 1.0

    def place(x: float, y: float) -> str:
        return f"{x / right * WIDTH:.1f} {(high - y) / span * HEIGHT:.1f}"

    path = "M" + " L".join(place(x, y) for x, y in points)
    across = [CurveTick(share * WIDTH, compact(right * share)) for share in (0, 0.25, 0.5, 0.75, 1)]  # fmt: skip
    up = [CurveTick(share * HEIGHT, f"{high - share * span:.3g}") for share in (0, 0.5, 1)]  # fmt: skip
    return DrawnCurve(title, path, across, up)


def client_lanes(changes: Sequence[Record], clients: Sequence[str]) -> list[ClientLane]:
    """Return lanes of the first of ``clients``, with a bar from the start of each work order to the arrival of its
    update. ``changes``: the records of the model's changes.
    """
    end = max((change["time"] for change in changes), default=1.0) or 1.0
    bars: dict[str, list[WorkBar]] = {client: [] for client in clients[:MOST_LANES]}
    for change in changes:
        for number, client in enumerate(change["clients"]):
            if client not in bars:
                continue
            seconds = change["seconds"][number]
            arrived = change.get("arrived", [change["time"]] * len(change["clients"]))[number]  # fmt: skip
            stale = change["staleness"][number]
            weight = change["weights"][number]
            about = f"{client}: {seconds:.3g} s until {arrived:.4g} s, staleness {stale}, weight {weight:.3g}"
            begin, width = (
                (arrived - seconds) / end * WIDTH,
                seconds / end * WIDTH - 0.8,
            )
            bars[client].append(WorkBar(begin, max(1.0, width), min(stale, 3), about))
    return [
        ClientLane(client, number * LANE, works)
        for number, (client, works) in enumerate(bars.items())
    ]


def staleness_bars(changes: Sequence[Record]) -> list[StalenessBar]:
    """Return the histogram of the staleness of the updates in ``changes``, the records of the model's changes. Its last
    bar counts all values from 12 on.
    """
    counts = [0] * 13
    for change in changes:
        for stale in change["staleness"]:
            counts[min(int(stale), 12)] += 1
    most = max(counts) or 1
    used = max((number for number, count in enumerate(counts) if count), default=0)
    return [
        StalenessBar(number * WIDTH / 13, count / most * HEIGHT * 0.6, "12+" if number == 12 else str(number), count)
        for number, count in enumerate(counts[: used + 1])
    ]  # fmt: skip


def client_rows(
    changes: Sequence[Record], samples: Mapping[str, int]
) -> list[ClientRow]:
    """Return the table of clients: the updates of each, and its effective weight.

    The effective weight of a client is its share in the sum, over all updates, of weight times number of steps. It is
    the client's share in the movement of the model if all steps are equally long.
    """
    works: dict[str, list[dict[str, Any]]] = {client: [] for client in samples}
    for change in changes:
        steps = change.get("steps", [1] * len(change["clients"]))
        for number, client in enumerate(change["clients"]):
            works.setdefault(client, []).append(
                {
                    "steps": steps[number],
                    "weight": change["weights"][number],
                    "stale": change["staleness"][number],
                    "seconds": change["seconds"][number],
                    "waited": change["time"] - change["arrived"][number] if "arrived" in change else None,
                }
            )  # fmt: skip
    moved = {client: sum(w["weight"] * w["steps"] for w in of) for client, of in works.items()}  # fmt: skip
    total = sum(moved.values()) or 1.0
    return [
        _client_row(client, of, samples.get(client), moved[client] / total)
        for client, of in works.items()
    ]


def _client_row(
    client: str, works: list[dict[str, Any]], samples: int | None, effective: float
) -> ClientRow:
    waits = [w["waited"] for w in works if w["waited"] is not None]
    return ClientRow(
        client,
        _shown(samples, ",d"),
        f"{len(works):,}",
        f"{sum(w['steps'] for w in works):,}",
        _shown(sum(w["weight"] for w in works), ".3g"),
        f"{effective:.1%}",
        _shown(fmean(w["stale"] for w in works) if works else None, ".2f"),
        _shown(fmean(w["seconds"] for w in works) if works else None, ".1f"),
        _shown(fmean(waits) if waits else None, ".1f"),
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
