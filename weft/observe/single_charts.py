"""Charts of one run alone, for what only some runs record: experts, memberships, curricula, streams."""

from collections.abc import Sequence
from itertools import cycle

from weft.observe.chart_lines import (
    RUNS,
    Chart,
    Series,
    frame,
    line,
    style,
    thin,
    values_by_step,
)
from weft.observe.run_metrics import Record, RecordedRun, Records

#: Steps that a heat map is thinned to.
COLUMNS = 200


def repetitions_of_samples(records: Records) -> list[Record]:
    """Return a bar chart of a stream's samples as a list of Plotly figures: for each number of repetitions, how many
    samples were repeated that often.

    The list is empty without records of the kind ``repetitions``. ``records``: the records of a run, by kind.
    """
    if not (kept := records.get("repetitions")):
        return []
    counts = kept[-1]["samples"]
    trace: Record = {
        "type": "bar", "x": [*map(int, counts)], "y": [*counts.values()], "marker": {"color": "--c1"},
        "hovertemplate": "%{y} samples drawn %{x} times<extra></extra>",
    }  # fmt: skip
    note = "Number of samples by how often each was drawn"
    layout: Record = {"hovermode": "closest", "xaxis": {"title": {"text": "draws"}}}
    return [{"title": "Repetitions", "note": note, "traces": [trace], "layout": layout}]


def level_rates(records: Records, runs: Sequence[RecordedRun]) -> list[Record]:
    """Return charts, as Plotly figures, of the pass rate of each level of difficulty: one chart for each task with a
    curriculum.

    The list is empty without records of the kind ``levels``. ``records``: the records of a run, by kind. ``runs``: a
    list that contains only this run; the charts mark the steps at which it was resumed.
    """
    shown = list[Record]()
    rows = records.get("levels", [])
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        series = [
            Series("level", f"{level}", color, f"level {level}")
            for level, color in zip(range(len(own[-1]["rates"])), cycle(RUNS), strict=False)
        ]  # fmt: skip
        split = [
            {"step": row["step"], **{f"{n}": rate for n, rate in enumerate(row["rates"])}}
            for row in own
        ]  # fmt: skip
        note = f"Share of right answers so far, by level of difficulty of {task}"
        chart = Chart("Curriculum", note, "~%", ".1~%", tuple(series))
        traces = [
            trace
            for each in series
            for trace in line({"level": split}, chart, each, each.label, "solid")
        ]
        if traces:
            layout = frame(chart, traces, runs)
            shown.append(
                {"title": chart.title, "note": note, "traces": traces, "layout": layout}
            )
    return shown


def expert_loads(records: list[Record]) -> list[Record]:
    """Return a heat map, as a list of Plotly figures, of how often tokens were routed to each expert, relative to the
    mean over its layer.

    The list is empty without records. ``records``: the records of kind ``experts``.
    """
    shown = records[:: max(1, len(records) // COLUMNS)]
    layers = list(shown[0]["loads"]) if shown else []
    rows = [
        f"layer {layer}, expert {e}"
        for layer in layers
        for e in range(len(shown[0]["loads"][layer]))
    ]
    if not rows:
        return []
    columns = [
        [
            count * len(loads) / max(1, sum(loads))
            for loads in record["loads"].values()
            for count in loads
        ]
        for record in shown
    ]
    trace: Record = {
        "type": "heatmap", "x": [r["step"] for r in shown], "y": list(range(len(rows))),
        "z": list(zip(*columns, strict=True)),
        "text": [[row] * len(shown) for row in rows], "zmin": 0, "zmid": 1, "zmax": 2, "showscale": True,
        "colorscale": [[0, "--cold"], [0.5, "--even"], [0.75, "--warm"], [1, "--hot"]],
        "hovertemplate": "%{text}: %{z:.2f} of the mean<extra></extra>",
    }  # fmt: skip
    edges = [
        sum(len(shown[0]["loads"][before]) for before in layers[:i])
        for i in range(len(layers))
    ]
    layout: Record = {
        "hovermode": "closest",
        "yaxis": {"tickvals": edges, "ticktext": [f"layer {i}" for i in layers]},
    }
    note = "How often each was chosen, over the mean of its layer; 1 is balanced"
    return [{"title": "Experts", "note": note, "traces": [trace], "layout": layout}]


def saved_activations(records: list[Record]) -> list[Record]:
    """Return a chart, as a list of Plotly figures, of the predicted seconds of a pass (y) against the bytes of
    activations that blocks save for backward (x).

    There is a line for offloading and one for recomputation. A point of a line is for a number of blocks whose
    activations are offloaded, or recomputed. ``records``: the records of kind ``activations``; the last one is drawn.
    The list is empty if there are no records.
    """
    if not records:
        return []
    last, colors = records[-1], {"offload": "--c1", "recompute": "--c4"}
    traces = []
    for kind, color in colors.items():
        if points := last.get(kind):
            blocks, saved, seconds = zip(*points, strict=True)
            trace = style(points, kind, color, ".3~s", "s") | {"showlegend": True}
            text = [f"{n} of {last['of']} blocks" for n in blocks]
            traces.append(trace | {"x": [b / 2**30 for b in saved], "y": seconds, "text": text,
                                   "hovertemplate": "%{text}: %{y:.3~s}s, %{x:.3~g} GiB<extra></extra>"})  # fmt: skip
    note = f"Predicted seconds of a pass by GiB its blocks save; {last['blocks']} leave for the {last['place']}"
    layout: Record = {
        "hovermode": "closest",
        "yaxis": {"rangemode": "tozero"},
        "xaxis": {"rangemode": "tozero"},
    }
    return [
        {"title": "Saved activations", "note": note, "traces": traces, "layout": layout}
    ]


def membership(records: Records) -> list[Record]:
    """Return a chart of the loss and the number of ranks over time, as a list of Plotly figures.

    The list is empty unless ranks have left or joined the run. ``records``: the records of a run, by kind.
    """
    views, trained = records.get("view", []), records.get("train", [])
    if len(views) < 2 or not trained:
        return []
    begun, end = views[0]["time"], max(views[-1]["time"], trained[-1]["time"])
    x = [
        round((record["time"] - begun) / 60, 3)
        for record in (*views, views[-1] | {"time": end})
    ]
    ranks = style(range(99), "ranks", "--c2", "d") | {
        "x": x,
        "y": [v["ranks"] for v in (*views, views[-1])],
    }
    ranks |= {
        "yaxis": "y2",
        "line": ranks["line"] | {"shape": "hv"},
        "showlegend": True,
    }
    steps, values = values_by_step(trained, "loss")
    times = {
        record["step"]: round((record["time"] - begun) / 60, 3) for record in trained
    }
    loss = (
        style(steps, "loss", "--c1", ".4f")
        | thin([times[step] for step in steps], values)
        | {"showlegend": True}
    )
    second = {
        "overlaying": "y",
        "side": "right",
        "rangemode": "tozero",
        "showgrid": False,
        "dtick": 1,
    }
    layout: Record = {
        "yaxis": {},
        "yaxis2": second,
        "margin": {"l": 48, "r": 36, "t": 8, "b": 26},
    }
    layout["xaxis"] = {"unifiedhovertitle": {"text": "minute %{x:.2f}"}}
    note = f"Loss over minutes, and ranks that took part (right); {len(views) - 1} times these changed"
    return [
        {
            "title": "Who took part",
            "note": note,
            "traces": [loss, ranks],
            "layout": layout,
        }
    ]
