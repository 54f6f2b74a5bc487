"""The charts of a run's page, as plain data for Plotly; colors are names of CSS variables."""

from collections.abc import Sequence
from itertools import cycle
from statistics import mean

from weft.observe import checkpoint_times
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

#: Parts of a step and their colors.
PARTS = {
    "compute": "--c1",
    "communication": "--c2",
    "data": "--c5",
    "optimizer": "--c4",
}
#: Kinds of records that only some runs have, and that charts of one run alone show.
ALONE = {"experts", "activations", "levels", "mix", "repetitions"}
NAMES = {"communication": "exposed communication"}


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
    Chart("Frechet distance of images", "Of the pixels of images that the model makes, from real ones", "", ".3~g",
          (Series("pictures", "frechet", "--c1"), Series("saddle", "frechet", "--c2"))),
    Chart("Saddle point", "Distance, as a part of the first one", "", ".3~g", (Series("saddle", "distance", "--c1"),)),
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
        Series("rollout", "critic_s", "--c4", "of it, a critic with its own trunk"),
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
    early, late = list[Record](), list[Record]()
    if single.keys() & ALONE or len(single.get("view", [])) > 1:
        from weft.observe.mix_charts import mixture_charts
        from weft.observe.single_charts import (
            expert_loads,
            level_rates,
            membership,
            repetitions_of_samples,
            saved_activations,
        )

        early = membership(single)
        late = level_rates(single, runs) + repetitions_of_samples(single)
        late += mixture_charts(single, runs)
        late += expert_loads(single.get("experts", []))
        late += saved_activations(single.get("activations", []))
    drawn[3:3] = step_times(runs) + early
    return drawn + late


def task_chart(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return a chart of the accuracy on each evaluation task. The list is empty if no run was evaluated on tasks.

    ``runs``: the runs to show.
    """
    kinds = dict.fromkeys(
        kind for run in runs for kind in run.records if kind.startswith("task.")
    )
    series = [
        Series(kind, "accuracy", color, kind.removeprefix("task."))
        for kind, color in zip(kinds, cycle(RUNS), strict=False)
    ]
    note = f"Share of the questions that are answered right: {', '.join(s.label for s in series)}"
    return [Chart("Tasks", note, "~%", ".1%", tuple(series))] if series else []


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


def step_times(runs: Sequence[RecordedRun]) -> list[Record]:
    """Return a bar chart of the time of profiled steps, stacked by what the time is spent on, as a list of Plotly
    figures.

    The list has one figure, or none without profiled steps. With one run there is a bar for each of its last sixty
    profiled steps. With several runs there is a bar for the mean step of each run.
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
