"""The charts of a run's page, as plain data for Plotly; colors are names of CSS variables."""

from collections.abc import Sequence
from itertools import accumulate, cycle
from statistics import mean
from typing import NamedTuple

from weft.observe import checkpoint_times
from weft.observe.run_metrics import Record, RecordedRun, Records

#: Parts of a step and their colors.
PARTS = {
    "compute": "--c1",
    "communication": "--c2",
    "data": "--c5",
    "optimizer": "--c4",
}
NAMES = {"communication": "exposed communication"}
#: Colors of runs side by side, and so their number.
RUNS = ("--c1", "--c2", "--c3", "--c4", "--c5")
#: Series longer than this are drawn faint, with a smoothed line on top.
SMOOTH_FROM = 60
#: Points a line is thinned to; every bucket keeps its smallest and largest value, so that spikes survive.
POINTS = 2000
#: Steps that a heat map is thinned to.
COLUMNS = 200


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

    ``title`` and ``note``: headline, and a remark below it. ``ticks`` and ``form``: d3 formats of the axis and of
    single values. ``series``: the lines.
    """

    title: str
    note: str
    ticks: str  # formats of the axis and of single values, in the language of d3
    form: str
    series: tuple[Series, ...]
    by_time: bool = False


CHARTS = (
    Chart("Loss", "Per real token, or pair of answers", "", ".4f", (
        Series("train", "loss", "--c1", "training", smooth=True), Series("validation", "loss", "--c2", "validation"),
    )),
    Chart("Return", "Mean of the episodes that ended in the step, and of evaluations", "", ".4~g", (
        Series("train", "return", "--c1", "training", smooth=True),
        Series("evaluation", "return", "--c2", "evaluation"),
    )),
    Chart("Transitions", "Steps of environments per second, all ranks", "", ".4s",
          (Series("train", "transitions_per_s", "--c1", smooth=True),)),
    Chart("Updates for each transition", "Of the whole run so far", "", ".4~g",
          (Series("train", "ratio", "--c3"),)),
    Chart("Reward", "Mean of the answers that the policy has written", "", ".3f",
          (Series("rollout", "reward", "--c1", smooth=True),)),
    Chart("Right answers", "Share of questions that one, or one of all answers, gets right", "~%", ".1~%", (
        Series("rollout", "pass@1", "--c1", "one", smooth=True), Series("rollout", "pass@all", "--c3", "one of all"),
        Series("rollout", "teaching", "--c5", "questions with different rewards"),
    )),
    Chart("Length of answers", "Tokens", "", ".1f", (
        Series("rollout", "length", "--c1", "mean"), Series("rollout", "length_most", "--c5", "longest"),
    )),
    Chart("Policy", "Divergence from the sampler and entropy, nats per token", "", ".3~g", (
        Series("policy", "entropy", "--c1", "entropy"), Series("policy", "kl", "--c2", "divergence from the reference"),
        Series("policy", "mismatch", "--c4", "difference of sampler and trainer"),
    )),
    Chart("Limited", "Share of tokens whose ratio was clipped, or whose sampler was corrected for", "~%", ".2~%", (
        Series("policy", "clipped_low", "--c1", "too unlikely now"),
        Series("policy", "clipped_high", "--c2", "too likely now"), Series("policy", "corrected", "--c4", "corrected"),
    )),
    Chart("Time of roles", "Seconds per rollout phase", "", ".3~g", (
        Series("rollout", "rollout_s", "--c1", "writing and scoring"),
        Series("rollout", "prepare_s", "--c5", "log-probabilities"),
        Series("rollout", "weights_s", "--c2", "weights"), Series("rollout", "train_s", "--c3", "training"),
    )),
    Chart("Stream", "Samples of simulations so far, and those in the buffer", "", ".4s", (
        Series("stream", "received", "--c1", "have come"), Series("stream", "drawn", "--c3", "draws"),
        Series("stream", "buffer", "--c5", "in the buffer"), Series("stream", "undrawn", "--c2", "not drawn yet"),
    )),
    Chart("Waiting for simulations", "Seconds so far", "", ".3~g", (Series("stream", "waited_s", "--c4"),)),
    Chart("Throughput", "Real tokens per second, all ranks", "", ".4s",
          (Series("train", "tokens_per_s", "--c1", smooth=True),)),
    Chart("Model flops utilisation", "Of the peak of the devices", "~%", ".2~%",
          (Series("train", "mfu", "--c3", smooth=True),)),
    Chart("Gradient norm", "Before clipping, over all parameters", "", ".4g",
          (Series("train", "grad_norm", "--c4", smooth=True),)),
    Chart("Memory", "Of the main rank, GiB", "", ".3f", (
        Series("train", "memory_gib", "--c3", "peak"), Series("train", "memory_now_gib", "--c5", "now"),
    )),
    Chart("Load of experts", "Of the most loaded over the mean, in the worst layer", "", ".3~g",
          (Series("experts", "most", "--c3", smooth=True),)),
    Chart("Dropped", "Choices of experts that were full, of all", "~%", ".2~%",
          (Series("experts", "dropped_share", "--c4", smooth=True),)),
    Chart("Sent for experts", "By all ranks in a step, MiB; moves since the point before", "", ".4~g", (
        Series("experts", "tokens_mib", "--c1", "tokens"), Series("experts", "copies_mib", "--c3", "copies of experts"),
        Series("experts", "moves_mib", "--c2", "moves of experts"),
    )),
    Chart("Learning rate", "As scheduled", ".1e", ".2e", (Series("train", "lr", "--c5"),)),
    Chart("Machine", "Busy share of the main rank's machine, over minutes", "~%", ".0%", (
        Series("hardware", "cpu", "--c1", "processor"), Series("hardware", "gpu", "--c2", "its GPU"),
    ), by_time=True),
    Chart("Memory of the machine", "In use by everything, GiB, over minutes", "", ".2f", (
        Series("hardware", "host_gib", "--c1", "host"), Series("hardware", "gpu_gib", "--c2", "its GPU"),
    ), by_time=True),
    Chart("Power", "Of the main rank's GPU, watts, over minutes", "", ".0f",
          (Series("hardware", "gpu_watts", "--c4"),), by_time=True),
)  # fmt: skip


def values_by_step(records: list[Record], name: str) -> tuple[list[int], list[float]]:
    """Return the steps of all records that have a number in the field ``name``, and the values of this field."""
    points = [
        (r["step"], r[name]) for r in records if isinstance(r.get(name), (int, float))
    ]
    return [s for s, _ in points], [v for _, v in points]


def charts(runs: Sequence[RecordedRun]) -> list[Record]:
    """Return the charts of ``runs`` as Plotly figures in plain JSON, without those that have no data.

    Colours are names of CSS variables.
    """
    several = len(runs) > 1
    drawn = []
    for chart in (CHARTS[0], *task_chart(runs), *CHARTS[1:]):
        traces = []
        for run, color in zip(runs, RUNS, strict=False):
            shown = [
                s
                for s in chart.series
                if values_by_step(run.records.get(s.kind, []), s.value)[1]
            ]
            for number, series in enumerate(shown):
                label = series.label if len(shown) > 1 else ""
                if several:
                    label, series = (
                        " ".join(filter(None, [run.name, label])),
                        series._replace(color=color),
                    )
                traces += line(
                    run.records,
                    chart,
                    series,
                    label,
                    "dot" if several and number else "solid",
                )
        if traces:
            layout = frame(chart, traces, runs)
            drawn.append(
                {
                    "title": chart.title,
                    "note": chart.note,
                    "traces": traces,
                    "layout": layout,
                }
            )
    # for charts that show one run only
    single: Records = {} if several else runs[0].records
    loads, saved = (
        expert_loads(single.get("experts", [])),
        saved_activations(single.get("activations", [])),
    )
    drawn[3:3] = step_times(runs) + membership(single)
    return drawn + level_rates(single, runs) + repetitions_of_samples(single) + loads + saved  # fmt: skip


def repetitions_of_samples(records: Records) -> list[Record]:
    """Draw how many samples of a stream were drawn how often.

    Returns a list with the chart; it is empty without records of the kind ``repetitions``. ``records``: the records of
    a run, by kind.
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
    """Draw the pass rate of each level of difficulty of each task that has a curriculum.

    Returns a list of the charts; it is empty without records of the kind ``levels``. ``records``: the records of a run,
    by kind. ``runs``: the run alone.
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
    """Draw a heat map of how often tokens were routed to each expert, relative to the mean over its layer.

    Returns a list with the chart, which is empty without records. ``records``: the records of kind ``experts``.
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
    """Draw the predicted seconds of a pass (y) against the bytes of activations that blocks save for backward (x).

    There is a line for offloading and one for recomputation. A point of a line is for a number of blocks whose
    activations are offloaded, or recomputed. ``records``: the records of kind ``activations``; the last one is drawn.
    Returns a list with the chart; it is empty if there are no records.
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
    """Draw the loss and the number of ranks over time.

    Returns a list with the chart. The list is empty unless ranks have left or joined the run. ``records``: the records
    of a run, by kind.
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


def task_chart(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return a chart of the accuracy on each evaluation task. The list is empty if no run was evaluated on tasks."""
    kinds = dict.fromkeys(
        kind for run in runs for kind in run.records if kind.startswith("task.")
    )
    series = [
        Series(kind, "accuracy", color, kind.removeprefix("task."))
        for kind, color in zip(kinds, cycle(RUNS), strict=False)
    ]
    note = f"Share of the questions that are answered right: {', '.join(s.label for s in series)}"
    return [Chart("Tasks", note, "~%", ".1%", tuple(series))] if series else []


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


def checkpoint_charts(records: Records) -> list[Record]:
    """Return the charts about checkpoints.

    One chart is a heat map of seconds by rank and stage; the other has the seconds that training waited for each save.
    The list is empty if the run has no such records. ``records``: the records of the run, by kind.
    """
    saved, checkpoints = records.get("saved", []), records.get("checkpoint", [])
    drawn = (
        [heat]
        if (heat := checkpoint_times.heat_map(saved, records.get("loaded", [])))
        else []
    )
    steps, stall = checkpoint_times.stalls(saved, checkpoints)
    if steps:
        layout: Record = {"yaxis": {"rangemode": "tozero", "ticksuffix": " s"}}
        note = "Seconds that training waited for a save, slowest rank"
        trace = style(steps, "Stall", "--c2", ".3~s", "s") | thin(steps, stall)
        drawn.append(
            {
                "at": "stall",
                "title": "Stall",
                "note": note,
                "height": 210,
                "traces": [trace],
                "layout": layout,
            }
        )
    return drawn


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
    """Draw the line ``series`` of a chart, and return its Plotly traces (curves).

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
    """Return the minutes of running time at each record in ``rows``.

    ``attempts``: the records of the run's starts. The pause before a restart, from the last record to the start, does
    not count.
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


def step_times(runs: Sequence[RecordedRun]) -> list[Record]:
    """Draw a bar chart of the time of profiled steps, stacked by what the time is spent on.

    Returns a list with the chart, which is empty without profiled steps. With one run there is a bar for each of its
    last sixty profiled steps. With several runs there is a bar for the mean step of each run.
    """
    split = runs[0].records.get("split", [])[-60:]
    bars = [(str(r["step"]), r) for r in split]
    if len(runs) > 1:
        shares = [
            (run.name, run.records["split"]) for run in runs if "split" in run.records
        ]
        bars = [
            (name, {part: mean(r[part] for r in rows) for part in PARTS})
            for name, rows in shares
        ]
    look = {
        "type": "bar",
        "hovertemplate": "%{y:.3~s}s",
        "x": [name for name, _ in bars],
    }
    traces = [
        look
        | {
            "name": NAMES.get(part, part),
            "marker": {"color": color},
            "y": [bar[part] for _, bar in bars],
        }
        for part, color in PARTS.items()
    ]
    layout: Record = {
        "yaxis": {"rangemode": "tozero"},
        "barmode": "stack",
        "bargap": 0.25,
    }
    layout["xaxis"] = {"type": "category", "nticks": 12}
    note = (
        "Seconds of profiled steps"
        if len(runs) == 1
        else "Seconds of a profiled step, mean"
    )
    return (
        [{"title": "Step time", "note": note, "traces": traces, "layout": layout}]
        if bars
        else []
    )
