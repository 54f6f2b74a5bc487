"""Lines of charts, as plain data for Plotly; colors are names of CSS variables."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from weft.observe.run_metrics import Record, RecordedRun, Records

#: Colors of runs side by side, and so their number.
RUNS = ("--c1", "--c2", "--c3", "--c4", "--c5")
#: Series longer than this are drawn faint, with a smoothed line on top.
SMOOTH_FROM = 60
#: Points a line is thinned to; every bucket keeps its smallest and largest value, so that spikes survive.
POINTS = 2000


class Series(NamedTuple):
    """One line of a chart: the values of one field over the records of one kind.

    ``kind``: kind of the records. ``value``: name of the field. ``color``: CSS variable of the line's colour.
    ``label``: name in the legend. ``smooth``: whether values are noisy, so that their running mean is drawn over them.
    """

    kind: str
    value: str
    color: str
    label: str = ""
    smooth: bool = False


class Chart(NamedTuple):
    """A line chart over steps, or with ``by_time`` over minutes since the start of the run.

    ``title`` and ``note``: headline, and a remark below the headline. ``ticks`` and ``form``: d3 formats of the axis
    and of single values. ``series``: the lines.
    """

    title: str
    note: str
    ticks: str  # formats of the axis and of single values, in the language of d3
    form: str
    series: tuple[Series, ...]
    by_time: bool = False


def values_by_step(records: list[Record], name: str) -> tuple[list[int], list[float]]:
    """Return the steps of all ``records`` that have a number in the field ``name``, and the values of this field, in
    the order of the records.
    """
    points = [
        (r["step"], r[name]) for r in records if isinstance(r.get(name), (int, float))
    ]
    return [s for s, _ in points], [v for _, v in points]


def frame(chart: Chart, traces: list[Record], runs: Sequence[RecordedRun]) -> Record:
    """Return the Plotly layout of a chart: title, axes and legend.

    ``traces``: the chart's lines. ``runs``: the runs whose values the lines show. If there is one run, each step at
    which it was resumed is marked.
    """
    ends = [min(t["x"][0] for t in traces), max(t["x"][-1] for t in traces)]
    mode = "normal" if chart.title == "Loss" else "tozero"
    layout: Record = {
        "yaxis": {"rangemode": mode, "tickformat": chart.ticks},
        "xaxis": {"range": ends},
    }
    if chart.by_time:
        layout["xaxis"] |= {"unifiedhovertitle": {"text": "minute %{x:.1f}"}}
    elif len(runs) == 1:
        resumed = [r["step"] for r in runs[0].records.get("run", []) if r["step"]]
        layout["shapes"] = [
            {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}
            for x in resumed
        ]
    return layout


def style(
    points: Sequence[float],
    name: str,
    color: str,
    form: str,
    unit: str = "",
    dash: str = "solid",
) -> Record:
    """Return the Plotly style of a line called ``name``, as a dictionary.

    ``points``: the line's values, which are marked one by one if they are at most 30. ``color``: CSS variable of the
    colour. ``form`` and ``unit``: d3 format and unit of the values. ``dash``: Plotly's dash style.
    """
    look = {"color": color, "width": 2, "dash": dash}
    mode = "lines" if len(points) > 30 else "lines+markers"
    return {"type": "scatter", "mode": mode, "name": name, "hovertemplate": f"%{{y:{form}}}{unit}", "line": look,
            "showlegend": False}  # fmt: skip


def line(
    records: Records, chart: Chart, series: Series, label: str, dash: str
) -> list[Record]:
    """Return the Plotly traces (curves) of ``series``, one line of ``chart``.

    A long noisy line has two traces: the values, drawn faintly, and their running mean, drawn boldly. ``records``: the
    records of a run, by kind. ``label``: name of the line in the legend. ``dash``: Plotly's dash style.
    """
    rows = records.get(series.kind, [])
    steps: Sequence[float]
    steps, values = values_by_step(rows, series.value)
    if chart.by_time:
        steps = minutes(
            [r for r in rows if isinstance(r.get(series.value), (int, float))],
            records.get("run", []),
        )
    trace = style(steps, label or chart.title, series.color, chart.form, dash=dash) | {
        "showlegend": bool(label)
    }
    if not series.smooth or len(values) < SMOOTH_FROM:
        return [trace | thin(steps, values)]
    faint = {
        "opacity": 0.35,
        "showlegend": False,
        "hoverinfo": "skip",
        "hovertemplate": None,
    }
    return [
        trace | thin(steps, values) | faint,
        trace | thin(steps, running_mean(values)),
    ]


def minutes(rows: list[Record], attempts: list[Record]) -> list[float]:
    """Return the running time of the run, in minutes, at each record in ``rows``.

    ``attempts``: records of the run's starts, one per start. Pauses between the last record before a restart and the
    restart are left out.
    """
    elapsed, spent, last = [], 0.0, attempts[0]["time"] if attempts else rows[0]["time"]
    for row in rows:
        begun = max(
            (r["time"] for r in attempts if r["time"] <= row["time"]), default=last
        )
        spent, last = spent + row["time"] - max(last, begun), row["time"]
        elapsed.append(round(spent / 60, 3))
    return elapsed


def running_mean(values: list[float]) -> list[float]:
    """Return the centered running mean of ``values``.

    Its window is about a fiftieth of the values, and narrower at the start, so that a steep fall is not blurred there.
    """
    sums, last = [0.0, *accumulate(values)], len(values) - 1
    half = [min(len(values) // 100 + 1, i) for i in range(len(values))]
    return [
        (sums[min(i + h, last) + 1] - sums[i - h]) / (min(i + h, last) + 1 - i + h)
        for i, h in enumerate(half)
    ]


def thin(steps: Sequence[float], values: list[float]) -> Record:
    """Return the line with ``values`` over ``steps``, reduced to about :data:`POINTS` points.

    The result has the lists ``x`` (steps) and ``y`` (values). The smallest and the largest value of every group of
    neighbours are kept, and the first and the last value.
    """
    size = -(-2 * len(values) // POINTS)
    keep = {0, len(values) - 1}
    for start in range(0, len(values), size):
        bucket = range(start, min(start + size, len(values)))
        keep |= {
            min(bucket, key=values.__getitem__),
            max(bucket, key=values.__getitem__),
        }
    return {
        "x": [steps[i] for i in sorted(keep)],
        "y": [float(f"{values[i]:.6g}") for i in sorted(keep)],
    }
