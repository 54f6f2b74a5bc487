"""The page of a data run: a funnel, what each step dropped and why, histograms of statistics with their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weft.curation.data_pipeline import DataPipeline, DataStep
from weft.curation.run_output import RunParts, SourceCounts, StepOutcome, run_notes
from weft.curation.statistic_plot import (
    HEIGHT,
    WIDTH,
    StatisticPlot,
    plot_statistic,
    rounded_number,
)
from weft.curation.step_counts import DroppedSample
from weft.pages import render
from weft.recipe.masked import masked_values
from weft.registry import find

#: Reasons that show samples, and histograms that a step shows at first.
SHOWN_REASONS, SHOWN_PLOTS = 8, 6


class FunnelRow(NamedTuple):
    """A row of the page's funnel, which shows how many documents each step leaves.

    ``name``: name of the step. ``left``: number of documents after the step, as text. ``dropped``: change of this
    number by the step, as text. ``share``, ``lost``: documents that are left and dropped, in percent of the largest
    number at any step.
    """

    name: str
    left: str
    share: float
    lost: float
    dropped: str


class ReasonRow(NamedTuple):
    """A reason for which a step dropped documents, with the number of these documents as text, and some of them as
    samples.

    ``share``: percent of all documents that the step dropped.
    """

    reason: str
    documents: str
    share: float
    samples: Sequence[DroppedSample]


class StepSection(NamedTuple):
    """Section of the page about one step: reasons for dropping documents, histograms of its statistics, and failures.

    ``name``: number and operator of the step; ``facts``: its settings as a line. ``plots``: the most important
    histograms; ``more``: the others. ``failures``: pairs of a document's id and error, for some of the ``failed``
    documents.
    """

    name: str
    facts: str
    reasons: list[ReasonRow]
    plots: list[StatisticPlot]
    more: list[StatisticPlot]
    failures: Sequence[tuple[str, str]]
    failed: int


def curation_page(pipeline: DataPipeline, parts: RunParts, problem: str) -> str:
    """Return the HTML page of a data run. ``problem``: why the output cannot be used, or ""."""
    read = sum(source.read for source in parts.sources)
    kept = sum(source.documents for source in parts.sources)
    return render(
        "curation/curation_page.html",
        title=pipeline.name or "data run",
        subtitle=f"{kept:,} of {read:,} documents are kept, from "
        f"{_counted(len(parts.sources), 'source')} in {_counted(len(parts.shards), 'shard')}",
        tiles=_tiles(parts, read, kept),
        problem=problem,
        notes=run_notes(parts),
        funnel=_funnel(parts, read, kept),
        sources=[_source_row(source, parts.steps) for source in parts.sources],
        steps=[
            _section(outcome, step)
            for outcome, step in zip(parts.steps, pipeline.steps, strict=True)
        ],
        width=WIDTH,
        height=HEIGHT,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _tiles(parts: RunParts, read: int, kept: int) -> list[tuple[str, str, str]]:
    characters = sum(source.characters for source in parts.sources)
    tokens = sum(source.tokens or 0 for source in parts.sources)
    tiles = [
        ("Read", f"{read:,}", "documents"),
        ("Kept", f"{kept:,}", f"{100 * kept / read:.1f} % of them"),
        ("Text", f"{rounded_number(characters)}", "characters"),
    ]
    if tokens:
        ratio = f"{characters / tokens:.2f} characters each"
        tiles.append(("Tokens", rounded_number(tokens), ratio))
    failed = sum(outcome.counts.failed for outcome in parts.steps)
    if failed:
        tiles.append(("Errors", f"{failed:,}", "documents left out"))
    return tiles


def _funnel(parts: RunParts, read: int, kept: int) -> list[FunnelRow]:
    most = max([read, *(o.counts.left for o in parts.steps)])
    rows = [FunnelRow("read", f"{read:,}", 100 * read / most, 0, "")]
    for outcome in parts.steps:
        counts = outcome.counts
        lost = counts.entered - counts.left
        text = f"-{lost:,}" if lost > 0 else f"+{-lost:,}" if lost < 0 else "0"
        rows.append(
            FunnelRow(
                outcome.operator,
                f"{counts.left:,}",
                100 * counts.left / most,
                100 * max(0, lost) / most,
                text,
            )
        )
    return rows


def _source_row(source: SourceCounts, steps: Sequence[StepOutcome]) -> list[str]:
    names = {str(step.number): step.operator for step in steps}
    dropped = [f"{names[n]} {count:,}" for n, count in source.dropped.items()]
    tokens = "" if source.tokens is None else f"{source.tokens:,}"
    return [
        source.label,
        f"{source.read:,}",
        f"{source.documents:,}",
        f"{100 * source.documents / source.read:.1f} %",
        f"{source.characters:,}",
        tokens,
        ", ".join(dropped) or "none",
    ]


def _section(outcome: StepOutcome, step: DataStep) -> StepSection:
    counts = outcome.counts
    dropped = sum(counts.reasons.values())
    order = sorted(counts.reasons, key=lambda r: (-counts.reasons[r], r))
    reasons = [
        ReasonRow(
            reason,
            f"{counts.reasons[reason]:,}",
            100 * counts.reasons[reason] / dropped,
            counts.samples.get(reason, ()) if place < SHOWN_REASONS else (),
        )
        for place, reason in enumerate(order)
    ]
    limits = _limits(step, list(counts.histograms))
    plots = [
        plot
        for name, bins in counts.histograms.items()
        if (plot := plot_statistic(name, bins, limits.get(name, {})))
    ]
    # those first whose limits matter here
    shown = sorted(plots, key=lambda plot: not plot.thresholds)
    return StepSection(
        f"{outcome.number + 1}. {outcome.operator}",
        _settings_line(step),
        reasons,
        shown[:SHOWN_PLOTS],
        shown[SHOWN_PLOTS:],
        counts.failures,
        counts.failed,
    )


def _settings_line(step: DataStep) -> str:
    """Return the settings that are not the default, as text."""
    given = step.model_dump(exclude_defaults=True, exclude={"operator"})
    title = find("operator", step.operator).title
    words = [f"{key} = {_shown(masked_values(value))}" for key, value in given.items()]
    return "; ".join(filter(None, [title, ", ".join(words)]))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _limits(
    step: DataStep, statistics: Sequence[str]
) -> Mapping[str, dict[str, float]]:
    """Return the settings that limit each statistic, by their names: ``least_words`` limits a statistic of words."""
    late = getattr(find("operator", step.operator).implementation, "late", ())
    numbers = {
        name: float(value)
        for name in late
        if isinstance(value := getattr(step, name, None), int | float)
        and not isinstance(value, bool)
    }
    limits: dict[str, dict[str, float]] = {}
    for name, value in numbers.items():
        what = name.removeprefix("least").removeprefix("most").strip("_")
        fitting = [
            s for s in statistics if what and (s.endswith(what) or what.endswith(s))
        ]
        exact = [s for s in fitting if s == what or s.endswith(f"_{what}")]
        chosen = exact or fitting or (statistics if len(statistics) == 1 else [])
        if chosen:
            limits.setdefault(min(chosen, key=len), {})[name] = value
    return limits
