"""Checkpoints on a run's page: how long saving and loading take, and which rank and stage is slow."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median, quantiles
from typing import Any

Record = dict[str, Any]
#: Rank, stage -> median seconds.
Times = dict[int, dict[str, float]]

#: The stages of a save and of a load in their order; others that metrics may hold come after them.
SAVE = ("stage", "copy", "wait", "cut", "hash", "write", "commit")
LOAD = ("plan", "read", "verify", "unpack")
#: Stages in which a rank waits for others, or for its own writer: slow is then someone or something else.
WAITING = ("stage", "wait", "commit")

#: Up to so many ranks have a row each; of more ranks, only so many slowest ones, and the others as quantiles.
ROWS, SLOWEST = 24, 16
#: From so many times the median on, a stage of a rank is called slow.
SLOW = 1.3
#: Times below this share of a save are noise.
NOISE = 0.03


def numbers(row: Record) -> dict[str, float]:
    """Return the seconds of each stage of a save or load, by name of the stage, from its record ``row``.

    They are the finite numbers in fields whose names end with ``_s``.
    """
    values = {
        k.removesuffix("_s"): v
        for k, v in row.items()
        if k.endswith("_s") and isinstance(v, (int, float))
    }
    return {stage: float(v) for stage, v in values.items() if math.isfinite(v)}


def stage_seconds(rows: Sequence[Record]) -> Times:
    """Return the median seconds over the records ``rows``, by rank and stage. Without a rank a record is rank 0's."""
    samples: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for stage, seconds in numbers(row).items():
            samples[rank_of(row)][stage].append(seconds)
    return {
        rank: {stage: median(v) for stage, v in samples[rank].items()}
        for rank in sorted(samples)
    }


def rank_of(row: Record) -> int:
    rank = row.get("rank")
    return rank if isinstance(rank, int) else 0


def stage_names(of: Times, order: Sequence[str]) -> list[str]:
    """Return the names of the stages in ``of``, the seconds by rank and stage.

    The names in ``order`` come first, in this order, and the others follow by alphabet.
    """
    names = {stage for seconds in of.values() for stage in seconds}
    return [s for s in order if s in names] + sorted(names.difference(order))


def over_ranks(of: Times) -> dict[str, float]:
    """Return for each stage the median over ranks of the seconds in ``of``, which are by rank and stage."""
    names = {stage for seconds in of.values() for stage in seconds}
    return {
        stage: median(seconds[stage] for seconds in of.values() if stage in seconds)
        for stage in names
    }


def work(seconds: Mapping[str, float]) -> float:
    """Return the total of a rank's ``seconds`` by stage, without the stages in which the rank waits for other ranks."""
    return sum(v for stage, v in seconds.items() if stage not in WAITING)


def ratio(seconds: float, middle: float, whole: float) -> float:
    """Return the seconds of a stage relative to the median: about ``seconds`` divided by ``middle``.

    ``seconds``: those of one rank; ``middle``: the median over all ranks; ``whole``: seconds of the complete save or
    load. For a short stage of a long save the result is closer to 1 than the plain ratio. A difference of 1 ms then
    does not look like a slow rank.
    """
    damp = NOISE * whole or 1e-9
    return (seconds + damp) / (middle + damp)


def slowest_in_words(of: Times, what: str) -> str:
    """Return a sentence about the rank and stage whose time exceeds the median by most.

    If no rank stands out, the sentence says so. ``of``: seconds by rank and stage; ``what``: the sentence's first word,
    such as ``Saves``.
    """
    if not of:
        return ""
    middle = over_ranks(of)
    whole = median(work(seconds) for seconds in of.values())
    if len(of) == 1:
        stage = max(middle, key=middle.__getitem__)
        return f"{what}: {duration(sum(middle.values()))}, most of it {stage} ({duration(middle[stage])})."
    slow = [
        (seconds[stage] - middle[stage], rank, stage)
        for rank, seconds in of.items()
        for stage in seconds
        if stage not in WAITING and ratio(seconds[stage], middle[stage], whole) >= SLOW
    ]
    if not slow:
        return f"{what}: no rank stands out."
    _, rank, stage = max(slow)
    slowest, its = of[rank][stage], middle[stage]
    many = f"{slowest / its:.1f}x the median" if its else "time that others do not need"
    also = len({r for _, r, _ in slow}) - 1
    more = (
        f"; {also} other rank{'s are' if also > 1 else ' is'} slow as well"
        if also
        else ""
    )
    return f"{what}: rank {rank} takes {many} in {stage} ({duration(slowest)}, median {duration(its)}){more}."


def duration(seconds: float) -> str:
    """Return seconds as text of three digits, such as 850 us, 12.3 ms, 1.23 s or 123 s, with a no-break space."""
    if seconds <= 0:
        return "0\u00a0s"
    size, unit = next(
        ((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "us")
    )
    digits = max(0, 2 - math.floor(math.log10(seconds / size) + 1e-9))
    return f"{seconds / size:.{min(digits, 2)}f}\u00a0{unit}"


def size(count: float) -> str:
    """Return the number of bytes ``count`` as text in binary units, such as 4.01 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 999.5:  # from there on three digits would be 1e+03
            break
        count, unit = count / 1024, larger
    return f"{count:.3g} {unit}"


def heat_map(saved: Sequence[Record], loaded: Sequence[Record]) -> Record | None:
    """Return a record that describes a heat map of the times of saves and loads of checkpoints, for the run's page: a
    row for each rank, a column for each stage.

    A stage is a part of a save or load. A cell shows a rank's seconds in the stage; its colour shows the ratio to the
    median over ranks. ``saved`` and ``loaded``: records of single ranks' saves and loads. Returns None if both are
    empty.
    """
    groups = [
        (stage_seconds(saved), SAVE, "save"),
        (stage_seconds(loaded), LOAD, "load"),
    ]
    ranks = sorted({rank for of, *_ in groups for rank in of})
    if not ranks:
        return None
    columns = [
        (what, of, stage)
        for of, order, what in groups
        for stage in stage_names(of, order)
    ]
    middles = [over_ranks(of)[stage] for _, of, stage in columns]
    wholes = [median(work(seconds) for seconds in of.values()) for _, of, _ in columns]
    lines: list[tuple[str, list[float | None]]] = [
        (f"rank {rank}", [of.get(rank, {}).get(stage) for _, of, stage in columns])
        for rank in ranks
    ]
    if len(lines) > ROWS:
        spent = [sum(work(of.get(rank, {})) for of, *_ in groups) for rank in ranks]
        lines = _slowest(lines, sorted(range(len(ranks)), key=lambda i: -spent[i]))
    shown = lines[::-1]  # the first row is at the top
    text = [["" if v is None else duration(v) for v in row] for _, row in shown]
    color: list[list[float | None]] = [
        [
            None if v is None else round(math.log2(ratio(v, middle, whole)), 3)
            for v, middle, whole in zip(row, middles, wholes, strict=True)
        ]
        for _, row in shown
    ]
    hover = [
        [
            ""
            if v is None
            else f"{duration(v)}, {v / middle:.2f}x the median"
            if middle
            else duration(v)
            for v, middle in zip(row, middles, strict=True)
        ]
        for _, row in shown
    ]
    names = [f"{what} {stage}" for what, _, stage in columns]
    trace: Record = {
        "type": "heatmap",
        "z": color,
        "text": text,
        "customdata": hover,
        "texttemplate": "%{text}",
    }
    trace |= {
        "x": names,
        "y": [name for name, _ in shown],
        "zmin": -1,
        "zmax": 2,
        "showscale": False,
    }
    trace |= {
        "hovertemplate": "%{y}, %{x}: %{customdata}<extra></extra>",
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
    }
    trace["colorscale"] = [
        [0, "--cold"],
        [1 / 3, "--even"],
        [2 / 3, "--warm"],
        [1, "--hot"],
    ]
    layout = _heat_layout(
        names,
        [stage for *_, stage in columns],
        sum(what == "save" for what, *_ in columns),
    )
    count = len({row["step"] for row in saved})
    note = f"Median over {count:,} save{'s' * (count != 1)}, colored against the median over ranks."
    note += (
        " Stage: the wait for the save before, and for all ranks to agree."
        if "stage" in names[0]
        else ""
    )
    at = {
        "at": "heat",
        "title": "Seconds by rank and stage",
        "note": note,
        "height": 48 + 26 * len(shown),
    }
    return at | {"traces": [trace], "layout": layout}


def _slowest(
    lines: Sequence[tuple[str, list[float | None]]], by_time: Sequence[int]
) -> list[tuple[str, list[float | None]]]:
    """Return the lines of the slowest ranks, and three lines of quantiles of all others.

    ``by_time``: the indices of all lines, the slowest first.
    """
    others = [lines[i][1] for i in by_time[SLOWEST:]]
    tails = [
        _deciles([v for v in column if v is not None])
        for column in zip(*others, strict=True)
    ]
    labels = ("slowest tenth", "median", "fastest tenth")
    rest = [
        (f"other {len(others)}: {label}", [tail[n] for tail in tails])
        for n, label in enumerate(labels)
    ]
    return [lines[i] for i in by_time[:SLOWEST]] + rest


def _heat_layout(names: Sequence[str], stages: Sequence[str], saves: int) -> Record:
    """Return Plotly's layout of the heat map with columns ``names``, labelled ``stages``.

    The first ``saves`` columns are about saving, the rest about loading.
    """
    axis = {"type": "category", "showgrid": False, "ticks": ""}
    layout: Record = {
        "hovermode": "closest",
        "yaxis": axis,
        "margin": {"l": 48, "r": 8, "t": 42, "b": 4},
    }
    layout["xaxis"] = axis | {
        "side": "top",
        "tickangle": 0,
        "tickvals": names,
        "ticktext": stages,
    }
    place = {
        "yref": "paper",
        "y": 1,
        "yshift": 42,
        "yanchor": "top",
        "xanchor": "left",
        "showarrow": False,
    }
    starts = [
        (what, at)
        for what, at, end in (("save", 0, saves), ("load", saves, len(names)))
        if at < end
    ]
    layout["annotations"] = [
        place | {"x": at - 0.5, "text": f"<b>{what}</b>"} for what, at in starts
    ]
    if 0 < saves < len(names):
        edge: Record = {
            "type": "line",
            "x0": saves - 0.5,
            "x1": saves - 0.5,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
        }
        layout["shapes"] = [edge]
    return layout


def _deciles(values: Sequence[float]) -> list[float | None]:
    """Return the ninth decile, the median and the first decile, as far as there are values for them."""
    if len(values) < 2:
        return [None, values[0] if values else None, None]
    cut = quantiles(values, n=10, method="inclusive")
    return [cut[8], median(values), cut[0]]


def stalls(
    saved: Sequence[Record], checkpoints: Sequence[Record]
) -> tuple[list[int], list[float]]:
    """Return the steps with saves, and for each of them the seconds that training waited on the slowest rank.

    ``saved``: records of single ranks' saves. ``checkpoints``: records of whole checkpoints, for steps of which
    ``saved`` has no record.
    """
    seconds_by_step: dict[int, float] = {}
    for row in saved:
        seconds = numbers(row)
        # with ``wait``, the copy goes on beside training until it is waited for
        if "stage" in seconds:
            stall = seconds["stage"] + seconds.get("wait", seconds.get("copy", 0.0))
            seconds_by_step[row["step"]] = max(
                stall, seconds_by_step.get(row["step"], 0.0)
            )
    for row in checkpoints:
        stall_s = row.get("stall_s")
        if row["step"] not in seconds_by_step and isinstance(stall_s, (int, float)):
            seconds_by_step[row["step"]] = float(stall_s)
    return sorted(seconds_by_step), [
        seconds_by_step[step] for step in sorted(seconds_by_step)
    ]


def facts(
    saved: Sequence[Record], loaded: Sequence[Record], checkpoints: Sequence[Record]
) -> list[tuple[str, str]]:
    """Return names and values for the table beside the heat map of checkpoint times, such as the number of saves.

    ``saved`` and ``loaded``: records of single ranks' saves and loads; ``checkpoints``: records of whole checkpoints.
    """
    lines = []
    steps, stall = stalls(saved, checkpoints)
    saves = len({row["step"] for row in saved} | set(steps))
    if saves:
        lines.append(("Saves", f"{saves:,}"))
    if stall:
        lines.append(
            (
                "Stall",
                f"{duration(median(stall))} median · {duration(max(stall))} longest",
            )
        )
    for what, rows, order in (("Save", saved, SAVE), ("Load", loaded, LOAD)):
        of = stage_seconds(rows)
        if total := _bytes(rows):
            each = f" · {size(total / len(of))} a rank" if len(of) > 1 else ""
            lines.append(
                (
                    "Bytes of a save" if what == "Save" else "Bytes read",
                    size(total) + each,
                )
            )
        if of:
            middle = over_ranks(of)
            parts = [
                f"{stage} {duration(middle[stage])}" for stage in stage_names(of, order)
            ]
            lines.append((f"{what}, median rank", " · ".join(parts)))
            if len(of) > 1:
                rank = max(of, key=lambda r: work(of[r]))
                lines.append(
                    (
                        f"{what}, slowest rank",
                        f"rank {rank}, {duration(work(of[rank]))} without waiting",
                    )
                )
    return lines


def _bytes(rows: Sequence[Record]) -> float:
    """Return the bytes of all ranks together, in the last step with any."""
    by_step: dict[int, float] = defaultdict(float)
    for row in rows:
        if isinstance(row.get("bytes"), (int, float)):
            by_step[row["step"]] += row["bytes"]
    return max(
        ((step, count) for step, count in by_step.items() if count), default=(0, 0.0)
    )[1]
