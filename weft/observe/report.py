"""One self-contained HTML page about a run, from nothing but its metrics."""

import html
import json
import re
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from weft.errors import WeftError
from weft.observe import checkpoints
from weft.observe.display import clock, compact
from weft.observe.metrics import read_metrics

Record = dict[str, Any]
#: Parts of a step and their colors.
PARTS = {"compute": "--c1", "communication": "--c2", "data": "--c5", "optimizer": "--c4"}
#: Series longer than this are drawn faint, with a smoothed line on top.
SMOOTH_FROM = 60
#: Points a line is thinned to; every bucket keeps its smallest and largest value, so that spikes survive.
POINTS = 2000


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page (default ``run/report.html``) and return its path; a run that is still going is fine."""
    from plotly.offline import get_plotlyjs

    records = read_metrics(run)
    head: Record = records.get("run", [{}])[-1]
    recipe = head.get("recipe") or {}
    facts = run_facts(records, head)
    subtitle = [facts[k] for k in ("Layout", "Ranks", "Device") if k in facts] + [run.name]
    card = '<div class="card"><span>{}</span><b>{}</b><span>{}</span></div>'
    page = {
        "title": html.escape(str(recipe.get("name", run.name))),
        "subtitle": html.escape(" · ".join(subtitle)),
        "tiles": "".join(card.format(*tile) for tile in tiles(records)),
        "facts": rows(facts.items()),
        "events": rows((f"step {e['step']:,}", e.get("message", "")) for e in records.get("event", [])),
        "recipe": html.escape(json.dumps(recipe, indent=2)),
        "plotly": get_plotlyjs(),
        "checkpoints": checkpoint_card(records),
        "charts": json.dumps(charts(records)).replace("<", "\\u003c"),
    }
    template = resources.files("weft.observe").joinpath("report.html").read_text(encoding="utf-8")
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: page[match[1]], template)
    out = out or run / "report.html"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WeftError(f"cannot write the report to {out}: {error.strerror}; name another file") from None
    return out


def column(records: list[Record], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have a (finite) value."""
    found = [(r["step"], r[name]) for r in records if isinstance(r.get(name), (int, float))]
    return [s for s, _ in found], [v for _, v in found]


def tiles(records: dict[str, list[Record]]) -> list[tuple[str, str, str]]:
    """The headline numbers: name, value, explanation."""
    found = []
    for kind, title in (("train", "Loss"), ("validation", "Validation loss")):
        steps, values = column(records.get(kind, []), "loss")
        if values:
            ratio = f"ratio {values[-1] / values[0]:.3f} · " if values[0] else ""
            found.append((title, f"{values[0]:.3f} → {values[-1]:.3f}", f"{ratio}steps {steps[0]:,} to {steps[-1]:,}"))
    for name, title, show in (("tokens_per_s", "Tokens per second", compact), ("mfu", "MFU", "{:.1%}".format)):
        if values := column(records.get("train", []), name)[1]:
            found.append((title, show(median(values)), f"median · last {show(values[-1])}"))
    if values := column(records.get("train", []), "memory_gib")[1]:
        found.append(("Memory", f"{max(values):.2f} GiB", "peak, main rank"))
    if split := records.get("split"):
        share = sum(r["communication"] for r in split) / (sum(r[part] for r in split for part in PARTS) or 1)
        found.append(("Exposed communication", f"{share:.1%}", f"of the step · {len(split)} profiled"))
    return found


def run_facts(records: dict[str, list[Record]], head: Record) -> dict[str, str]:
    """What is fixed about a run, and how far it came."""
    runs, train = records.get("run", []), records.get("train", [])
    every = [r["time"] for kind in records.values() for r in kind if "time" in r]
    # A pause between two attempts is no time of the run: each attempt lasts until its last record that counts.
    starts = [r["time"] for r in runs if "time" in r] + [float("inf")]
    spent = sum(max((t for t in every if a <= t < b), default=a) - a for a, b in pairwise(starts))
    planned = (head.get("recipe") or {}).get("train", {}).get("steps")
    skipped = sum(bool(r.get("skipped")) for r in train)
    facts = {
        "Layout": head.get("layout"),
        "Ranks": (n := head.get("world")) and f"{n} rank{'s' * (n != 1)}",
        "Device": head.get("device"),
        "Parameters": (n := head.get("parameters")) and f"{compact(n)} ({n:,})",
        "Model flops per token": (n := head.get("flops_per_token")) and compact(n),
        "Peak of all devices": (n := head.get("peak_flops")) and f"{compact(n)}FLOP/s",
        "Steps": train and f"{train[-1]['step']:,}" + (f" of {planned:,}" if planned else ""),
        "Tokens seen": train and (n := train[-1].get("tokens")) and f"{compact(n)} ({n:,})",
        "Skipped steps": skipped and f"{skipped} (loss or gradient not finite)",
        "Started": runs and runs[0].get("started"),
        "Wall time": spent and clock(spent) + (f" in {len(runs)} attempts" if len(runs) > 1 else ""),
    }
    return {name: str(value) for name, value in facts.items() if value}


def checkpoint_card(records: dict[str, list[Record]]) -> str:
    """The card about checkpoints, with places for its charts; nothing if the run has none."""
    saved, loaded, made = (records.get(kind, []) for kind in ("saved", "loaded", "checkpoint"))
    found = checkpoints.facts(saved, loaded, made)
    if not found:
        return ""
    said = [checkpoints.verdict(checkpoints.times(r), what) for r, what in ((saved, "Saves"), (loaded, "Loads"))]
    head = f"<h2>Checkpoints</h2><p>{html.escape(' '.join(filter(None, said)))}</p>"
    places = f'<div id="heat"></div><div class="pair"><div id="stall"></div><table>{rows(found)}</table></div>'
    return f'<section class="card" id="checkpoints">{head}{places}</section>'


def charts(records: dict[str, list[Record]]) -> list[Record]:
    """Plotly figures as plain JSON; a chart without data is left out. Colors are names of CSS variables."""
    train, split = records.get("train", []), records.get("split", [])
    loss = line(train, "loss", "--c1", ".4f", "training")
    loss += line(records.get("validation", []), "loss", "--c2", ".4f", "validation", smooth=False)
    figures: list[tuple[str, str, str, list[Record]]] = [
        ("Loss", "Cross-entropy per real token", "", loss),
        ("Throughput", "Real tokens per second, all ranks", "", line(train, "tokens_per_s", "--c1", ".4s")),
        ("Model flops utilisation", "Of the peak of the devices", ".0%", line(train, "mfu", "--c3", ".1%")),
        ("Step time", "Seconds of profiled steps", "", bars(split)),
        ("Gradient norm", "Before clipping, over all parameters", "", line(train, "grad_norm", "--c4", ".4g")),
        ("Memory", "Peak of the main rank, GiB", "", line(train, "memory_gib", "--c3", ".3f", smooth=False)),
        ("Learning rate", "As scheduled", ".1e", line(train, "lr", "--c5", ".2e", smooth=False)),
    ]
    resumed = [r["step"] for r in records.get("run", []) if r["step"]]
    found = []
    for title, note, ticks, traces in figures:
        if not traces:
            continue
        layout: Record = {"yaxis": {"rangemode": "normal" if title == "Loss" else "tozero", "tickformat": ticks}}
        if title == "Step time":
            layout |= {"barmode": "stack", "bargap": 0.25, "xaxis": {"type": "category", "nticks": 12}}
        else:
            layout["xaxis"] = {"range": [min(t["x"][0] for t in traces), max(t["x"][-1] for t in traces)]}
            layout["shapes"] = [{"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1} for x in resumed]
        found.append({"title": title, "note": note, "traces": traces, "layout": layout})
    return found + checkpoint_charts(records)


def checkpoint_charts(records: dict[str, list[Record]]) -> list[Record]:
    """Those of :func:`checkpoint_card`."""
    saved, made = records.get("saved", []), records.get("checkpoint", [])
    found = [heat] if (heat := checkpoints.heat_map(saved, records.get("loaded", []))) else []
    steps, stall = checkpoints.stalls(saved, made)
    if steps:
        (trace,) = line(
            [{"step": s, "v": v} for s, v in zip(steps, stall, strict=True)], "v", "--c2", ".3~s", smooth=False
        )
        layout: Record = {"yaxis": {"rangemode": "tozero", "ticksuffix": " s"}}
        trace["hovertemplate"] += "s"
        note = "Seconds that training waited for a save, slowest rank"
        found.append(
            {"at": "stall", "title": "Stall", "note": note, "height": 210, "traces": [trace], "layout": layout}
        )
    return found


def line(records: list[Record], name: str, color: str, form: str, label: str = "", smooth: bool = True) -> list[Record]:
    """A line; a long noisy one becomes faint and gets a bold running mean on top."""
    steps, values = column(records, name)
    if not values:
        return []
    trace: Record = {"type": "scatter", "mode": "lines" if len(values) > 30 else "lines+markers", "name": label or name}
    trace |= {"hovertemplate": f"%{{y:{form}}}", "showlegend": bool(label), "line": {"color": color, "width": 2}}
    if not smooth or len(values) < SMOOTH_FROM:
        return [trace | thin(steps, values)]
    faint = {"opacity": 0.35, "showlegend": False, "hoverinfo": "skip", "hovertemplate": None}
    return [trace | thin(steps, values) | faint, trace | thin(steps, running_mean(values))]


def running_mean(values: list[float]) -> list[float]:
    """Centered mean over about a fiftieth of the series; narrower at the start, so that a steep fall is not blurred."""
    sums, last = [0.0, *accumulate(values)], len(values) - 1
    half = [min(len(values) // 100 + 1, i) for i in range(len(values))]
    return [(sums[min(i + h, last) + 1] - sums[i - h]) / (min(i + h, last) + 1 - i + h) for i, h in enumerate(half)]


def thin(steps: list[int], values: list[float]) -> Record:
    """At most :data:`POINTS` points: the smallest and the largest of every bucket, and the last."""
    size = -(-2 * len(values) // POINTS)
    keep = {0, len(values) - 1}
    for start in range(0, len(values), size):
        bucket = range(start, min(start + size, len(values)))
        keep |= {min(bucket, key=values.__getitem__), max(bucket, key=values.__getitem__)}
    return {"x": [steps[i] for i in sorted(keep)], "y": [float(f"{values[i]:.6g}") for i in sorted(keep)]}


def bars(split: list[Record]) -> list[Record]:
    """Stacked bars of the last sixty profiled steps."""
    traces = []
    for part, color in PARTS.items() if split else ():
        label = "exposed communication" if part == "communication" else part
        trace = {"type": "bar", "name": label, "marker": {"color": color}, "hovertemplate": "%{y:.3~s}s"}
        traces.append(trace | {"x": [str(r["step"]) for r in split[-60:]], "y": [r[part] for r in split[-60:]]})
    return traces


def rows(items: Any) -> str:
    """Table rows of pairs, escaped."""
    return "".join(f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(str(v))}</td></tr>" for k, v in items)
