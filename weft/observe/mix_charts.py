"""Charts of a run whose mixture of data sources moves: what was read of each source, and the loss of each."""

from collections.abc import Sequence
from itertools import cycle, pairwise

from weft.observe.chart_lines import RUNS, Chart, Series, frame, line
from weft.observe.run_metrics import Record, RecordedRun, Records


def mixture_charts(records: Records, runs: Sequence[RecordedRun]) -> list[Record]:
    """Draw the share of each data source in the samples that were read, and the held-out loss of each source.

    Returns a list of the charts, without those that have no data; it is empty for a run without records of the kind
    ``mix``. ``records``: the records of a run, by kind. ``runs``: a list with only this run; the charts mark the steps
    at which this run was restarted.
    """
    mixed = records.get("mix", [])
    if not mixed:
        return []
    names = max((list(row.get("losses", ())) for row in mixed), key=len)
    read = shares_read(records.get("read", []), names)
    losses = [{"step": row["step"], **row.get("losses", {})} for row in mixed]
    share = "Share of each source in the samples read since the point before"
    loss = "Of held-out rows of each source, per real token"
    return [
        *_lines("Mixture", share, "~%", ".1~%", read, runs),
        *_lines("Loss of each source", loss, "", ".4f", losses, runs),
    ]


def shares_read(records: Sequence[Record], names: Sequence[str]) -> list[Record]:
    """Return the share of each source in the samples that were read between successive ``records`` of the kind
    ``read``.

    Each row has the step of the later record, and the share of each source by its name. ``names``: names of the
    sources in mixtures; sources of runs without such names are called as the records call them.
    """
    rows = []
    for before, after in pairwise([{"sources": []}, *records]):
        counts = [about["samples"] for about in after["sources"]]
        known = [about["samples"] for about in before["sources"]]
        known += [0] * (len(counts) - len(known))
        new = [max(0, n - old) for n, old in zip(counts, known, strict=False)]
        called = [about["name"] for about in after["sources"]]
        called = [*names] if len(names) == len(called) else called
        if total := sum(new):
            shares = {n: count / total for n, count in zip(called, new, strict=True)}
            rows.append({"step": after["step"], **shares})
    return rows


def _lines(
    title: str,
    note: str,
    ticks: str,
    form: str,
    rows: list[Record],
    runs: Sequence[RecordedRun],
) -> list[Record]:
    """Draw a chart with a line for each field of ``rows`` but their step; none if no row has a number."""
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    series = [
        Series("row", name, color, name)
        for name, color in zip(names, cycle(RUNS), strict=False)
    ]
    chart = Chart(title, note, ticks, form, tuple(series))
    traces = [
        trace
        for each in series
        for trace in line({"row": rows}, chart, each, each.label, "solid")
        if trace["x"]
    ]
    if not traces:
        return []
    layout = frame(chart, traces, runs)
    return [{"title": title, "note": note, "traces": traces, "layout": layout}]
