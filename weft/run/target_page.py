"""The page of a comparison by time to a target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.observe.run_page import PLOTLY, write_plotly
from weft.pages import render, write
from weft.run.time_to_target import PROFILE, Standing, performance_profile


def write_target_page(
    table: Sequence[Standing], targets: Mapping[str, float], out: Path
) -> Path:
    """Write a page with the plots of a comparison to the file ``out``, and return the path.

    ``table``: results of all entrants; ``targets``: target loss of each workload.
    """
    charts: list[dict[str, Any]] = []
    for workload, target in targets.items():
        rows = [row for row in table if row.workload == workload]
        for what, unit in (("steps", ""), ("seconds", " of training")):
            charts.append(_points(rows, what, f"{workload}: {what}{unit} to a loss of {target:g}"))  # fmt: skip
    lines = [
        {"x": PROFILE, "y": shares, "name": name, "mode": "lines", "line": {"shape": "hv"}}
        for name, shares in performance_profile(table).items()
    ]  # fmt: skip
    charts.append({"title": "Share of workloads within a multiple of the best time", "data": lines, "layout": {
        "xaxis": {"title": {"text": "multiple of the best time"}}, "yaxis": {"range": [0, 1.05]},
    }})  # fmt: skip
    studies = len(table[0].studies) if table else 0
    page = render(
        "charts_page.html", title="Time to target", kind="target", plotly=PLOTLY, charts=charts,
        subtitle=f"{len({row.entrant for row in table})} entrants, {studies} studies each; the median counts",
    )  # fmt: skip
    path = write(out, page, "--out")
    write_plotly(path.parent)
    return path


def _points(rows: Sequence[Standing], what: str, title: str) -> dict[str, Any]:
    """Return a chart of one workload: the median of each entrant as a bar, and its studies as points."""
    names = [row.entrant for row in rows]
    medians = [getattr(row, what) for row in rows]
    bars = [value if math.isfinite(value) else None for value in medians]
    points = [
        (row.entrant, value)
        for row in rows
        for study in row.studies
        if math.isfinite(value := getattr(study.reached, what))
    ]
    texts = ["" if value is not None else "not reached" for value in bars]
    data = [
        {"type": "bar", "x": names, "y": bars, "text": texts, "name": "median"},
        {"x": [name for name, _ in points], "y": [value for _, value in points], "mode": "markers", "name": "studies"},
    ]  # fmt: skip
    return {"title": title, "data": data, "layout": {"yaxis": {"rangemode": "tozero"}}}
