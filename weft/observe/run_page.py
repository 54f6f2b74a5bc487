"""One self-contained HTML page about a run, or about several side by side, from nothing but their metrics."""

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from weft.errors import UsageError, WeftError
from weft.layout.legend import layout_legend
from weft.observe import checkpoint_times, delays
from weft.observe.chart_lines import RUNS, values_by_step
from weft.observe.charts import PARTS, charts, checkpoint_charts
from weft.observe.display import clock, compact
from weft.observe.run_metrics import (
    Record,
    RecordedRun,
    Records,
    read_metrics,
    resume_hint,
)
from weft.pages import render, write
from weft.paths import real_path

#: The file of Plotly's program beside pages with charts.
PLOTLY = "plotly.min.js"


class ReportRow(NamedTuple):
    """A row of a table that compares runs. ``name``: what is compared; ``values``: the value of each run as text."""

    name: str
    values: list[str]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def write_report(*folders: Path, out: Path | None = None) -> Path:
    """Write the HTML page about the runs in ``folders`` and return the page's path. The runs may still be going on.

    The page is ``report.html`` in the folder of a single run, ``compare.html`` in the first of several, or ``out`` if
    that is given.
    """
    if len(folders) > len(RUNS):
        raise UsageError(
            f"{len(folders)} runs are too many for one page; give at most {len(RUNS)}"
        )
    names = [real_path(folder).name for folder in folders]
    alike = len(set(names)) < len(names)
    runs = [
        RecordedRun(str(f) if alike else n, read_metrics(f))
        for f, n in zip(folders, names, strict=True)
    ]
    page = page_of(runs[0], folders[0]) if len(runs) == 1 else page_beside(runs)
    default = folders[0] / ("report.html" if len(runs) == 1 else "compare.html")
    path = write(out or default, page, "the report to")
    write_plotly(path.parent)
    return path


def write_plotly(folder: Path) -> None:
    """Write Plotly's program beside the pages of ``folder``, where all of them find it without a network.

    Its package is not imported, which would take a tenth of a second at the end of each run.
    """
    package = find_spec("plotly")
    if package is None or package.origin is None:
        raise WeftError("plotly is missing; pip install plotly")
    program = Path(package.origin).with_name("package_data") / PLOTLY
    file = folder / PLOTLY
    if not file.is_file() or file.stat().st_size != program.stat().st_size:
        write(file, program.read_bytes(), "the report to")


def render_runs(runs: Sequence[RecordedRun], **values: Any) -> str:
    """Return the HTML page about ``runs``.

    It is the template, filled with ``values`` by name and with the parts that pages of one and of several runs share.
    """
    drawn = charts(runs) + (
        checkpoint_charts(runs[0].records) if len(runs) == 1 else []
    )
    samples = [
        (r.name, last.get("samples", [last]))
        for r in runs
        for last in r.records.get("sample", [])[-1:]
    ]
    names = [run.name for run in runs]
    return render(
        "observe/run_page.html",
        plotly=PLOTLY,
        axes=layout_legend(run.head.get("layout") for run in runs),
        charts=drawn,
        samples=samples,
        names=names,
        **values,
    )


def page_of(run: RecordedRun, folder: Path) -> str:
    """Return the HTML page about ``run``. ``folder``: the run's folder."""
    facts = run_facts(run)
    events = [
        (f"step {e['step']:,}", e.get("message", ""))
        for e in run.records.get("event", [])
    ]
    return render_runs(
        [run],
        title=run.recipe.get("name", run.name),
        subtitle=" · ".join(
            [facts[k] for k in ("Layout", "Ranks", "Device") if k in facts]
            + [run.name] * (run.name != run.recipe.get("name"))
        ),
        notice=unfinished_in_words(run, folder),
        tiles=headline_numbers(run.records),
        checkpoints=checkpoint_card(run.records),
        delays=delays.card(run.records.get("delays", [])),
        facts=facts.items(),
        reading=reading_rows(run.records.get("read", [])),
        events=events,
        phases=answers_shown(run.records),
        pictures=run.records.get("pictures", []),
        recipe=json.dumps(run.recipe, indent=2),
    )


def unfinished_in_words(run: RecordedRun, folder: Path | None = None) -> str:
    """Return a sentence about how far ``run`` came if it is unfinished; an empty text for a finished run.

    ``folder``: the run's folder, for a hint how to continue it; None: without the hint.
    """
    planned = planned_steps(run)
    done = max((row["step"] for row in run.records.get("train", [])), default=0)
    if not planned or done >= planned:
        return ""
    return (
        f"Step {done:,} of {planned:,}: this run was interrupted, ended early, or is still going"
        + (f"; {resume_hint(folder, run)}" if folder else "")
    )


def planned_steps(run: RecordedRun) -> int:
    """Return the number of steps that a run was planned for; 0 if unknown."""
    planned = run.head.get("steps") or run.recipe.get("train", {}).get("steps")
    return int(planned or 0)


def page_beside(runs: Sequence[RecordedRun]) -> str:
    """Return the HTML page that compares several runs.

    It has charts with a colour per run, and tables of the numbers and settings in which the runs differ.
    """
    headline = rows_side_by_side(
        [
            {
                name: f"{value} ({about})"
                for name, value, about in headline_numbers(run.records)
            }
            for run in runs
        ]
    )
    recipes = [
        row
        for row in rows_side_by_side([dict(flat(run.recipe)) for run in runs])
        if row.differs
    ]
    facts = [
        run_facts(run) | dict(checkpoint_card(run.records).get("facts", ()))
        for run in runs
    ]
    title, subtitle = (
        " · ".join(run.name for run in runs),
        f"{len(runs)} runs side by side",
    )
    return render_runs(
        runs,
        title=title,
        subtitle=subtitle,
        notice=" ".join(
            f"{run.name}: {words.partition(':')[0]}."
            for run in runs
            if (words := unfinished_in_words(run))
        ),
        headline=headline,
        facts=rows_side_by_side(facts),
        recipes=recipes,
        pictures=[],
    )


def flat(values: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield ``(name, text)`` for each value in the nested dictionaries ``values``.

    The name consists of the keys that lead to the value, joined by dots, such as ``train.batch``. The text is the
    value in JSON. ``name``: prefix of all names, the name of ``values`` itself.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            yield from flat(value, f"{name}.{key}" if name else key)
    else:
        yield name, json.dumps(values)


def rows_side_by_side(runs: Sequence[dict[str, str]]) -> list[ReportRow]:
    """Return a table row for each name that occurs in any run. ``runs``: for each run, its values by name."""
    names = dict.fromkeys(name for run in runs for name in run)
    return [ReportRow(name, [run.get(name, "-") for run in runs]) for name in names]


def headline_numbers(records: Records) -> list[tuple[str, str, str]]:
    """Return the numbers at the top of a run's page, such as its loss, as triples ``(name, value, explanation)``.

    ``records``: the run's records by kind.
    """
    shown = []
    ratios = [
        ("train", "loss", "Loss"),
        ("validation", "loss", "Validation loss"),
        ("rollout", "reward", "Reward"),
        ("rollout", "pass@1", "Right answers"),
    ]
    if records.get("rollout"):
        del ratios[0]  # the loss of a policy is about 0 at all times
    for kind, name, title in ratios:
        steps, values = values_by_step(records.get(kind, []), name)
        if values:
            ratio = f"ratio {values[-1] / values[0]:.3f} · " if values[0] else ""
            shown.append(
                (
                    title,
                    f"{values[0]:.3f} → {values[-1]:.3f}",
                    f"{ratio}steps {steps[0]:,} to {steps[-1]:,}",
                )
            )
    for record in records.get("evaluation", [])[-1:]:
        about = f"mean over {record['episodes']} episodes · step {record['step']:,}"
        shown.append(("Return", f"{record['return']:.1f}", about))
    for name, title, show in (
        ("transitions_per_s", "Transitions per second", compact),
        ("tokens_per_s", "Tokens per second", compact),
        ("mfu", "MFU", "{:.1%}".format),
    ):
        if values := values_by_step(records.get("train", []), name)[1]:
            shown.append(
                (title, show(median(values)), f"median · last {show(values[-1])}")
            )
    if values := values_by_step(records.get("train", []), "memory_gib")[1]:
        now = values_by_step(records["train"], "memory_now_gib")[1]
        more = f" · last {now[-1]:.2f} GiB" if now else ""
        shown.append(
            ("Memory", f"{max(values):.2f} GiB", f"peak of the main rank{more}")
        )
    if split := records.get("split"):
        exposed = sum(r["communication"] for r in split)
        share = exposed / (sum(r[part] for r in split for part in PARTS) or 1)
        hidden = sum(r.get("hidden", 0) for r in split)
        about = f"of the step · {len(split)} profiled"
        if hidden > 0:
            about += f" · {hidden / (exposed + hidden):.0%} of all is hidden"
        shown.append(("Exposed communication", f"{share:.1%}", about))
    return shown


def run_facts(run: RecordedRun) -> dict[str, str]:
    """Return facts about a run by name: layout, device, size, progress and machine."""
    records, head = run.records, run.head
    runs, train = records.get("run", []), records.get("train", [])
    every = [r["time"] for kind in records.values() for r in kind if "time" in r]
    # A pause between two attempts is no time of the run: each attempt lasts until its last record that counts.
    starts = [r["time"] for r in runs if "time" in r] + [float("inf")]
    spent = sum(
        max((t for t in every if a <= t < b), default=a) - a
        for a, b in pairwise(starts)
    )
    planned = planned_steps(run)
    skipped = sum(bool(r.get("skipped")) for r in train)
    facts = {
        "Layout": head.get("layout"),
        "Ranks": (n := head.get("world")) and f"{n} rank{'s' * (n != 1)}",
        "Device": head.get("device"),
        "Parameters": (n := head.get("parameters")) and f"{compact(n)} ({n:,})",
        "Learning": (n := head.get("learning"))
        and n != head.get("parameters")
        and f"{compact(n)} ({n:,})",
        "Model flops per token": (n := head.get("flops_per_token")) and compact(n),
        "Peak of all devices": (n := head.get("peak_flops")) and f"{compact(n)}FLOP/s",
        "Steps": train
        and f"{train[-1]['step']:,}" + (f" of {planned:,}" if planned else ""),
        "Tokens seen": train
        and (n := train[-1].get("tokens"))
        and f"{compact(n)} ({n:,})",
        "Skipped steps": skipped and f"{skipped} (loss or gradient not finite)",
        "Started": runs and runs[0].get("started"),
        "Wall time": spent
        and clock(spent) + (f" in {len(runs)} attempts" if len(runs) > 1 else ""),
        **{
            name.capitalize(): head.get(name)
            for name in ("host", "versions", "git", "command")
        },
        "Working folder": head.get("folder"),
    }
    return {name: str(value) for name, value in facts.items() if value}


#: Rollout phases of which answers are shown.
PHASES = 12


def answers_shown(records: Records) -> list[Record]:
    """Return the records with the model's answers of some rollout phases, among them the first and the last.

    ``records``: the run's records by kind. The list is empty if no answers are recorded.
    """
    kept = records.get("answers", [])
    if len(kept) <= PHASES:
        return kept
    return [kept[i * (len(kept) - 1) // (PHASES - 1)] for i in range(PHASES)]


def reading_rows(records: list[Record]) -> list[tuple[str, str]]:
    """Return pairs ``(name, line)`` that say how much of each data source the run has read; empty without records.

    If a source has several lines, its name is "" in all pairs but the first. ``records``: those of kind ``read``.
    """
    return [
        (about["name"] if number == 0 else "", line)
        for about in (records[-1]["sources"] if records else ())
        for number, line in enumerate(about["lines"])
    ]


def checkpoint_card(records: Records) -> Record:
    """Return the values, by name, that the run's page shows about checkpoints; empty if no checkpoint is recorded.

    ``records``: the run's records by kind.
    """
    saved, loaded, checkpoints = (
        records.get(kind, []) for kind in ("saved", "loaded", "checkpoint")
    )
    rows = checkpoint_times.facts(saved, loaded, checkpoints)
    said = [
        checkpoint_times.slowest_in_words(checkpoint_times.stage_seconds(r), what)
        for r, what in ((saved, "Saves"), (loaded, "Loads"))
    ]
    return {"verdict": " ".join(filter(None, said)), "facts": rows} if rows else {}
