"""What ``weft data run`` prints: progress, and a table of what each step did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from weft.curation.data_run import DataResult, Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a function that draws the progress of a data run as bars, one for each stage, on the error stream.

    The function takes the arguments of :data:`weft.curation.data_run.Progress`. It draws nothing if the error stream is
    no terminal.
    """
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    console = Console(stderr=True)
    with Bars(console=console, transient=True, disable=not console.is_terminal) as bars:
        shown: dict[str, TaskID] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in shown:
                shown[stage] = bars.add_task(stage, total=total)
            bars.update(shown[stage], completed=done, total=total)

        yield show


class ResultTable(NamedTuple):
    """A table for the user: names of its columns, and its rows. Both are arguments of
    :func:`weft.cli.console.print_table`.
    """

    columns: list[str]
    rows: list[list[str]]


def result_rows(result: DataResult) -> ResultTable:
    """Return a table of what each step of the run ``result`` did: documents before and after it, and the most frequent
    reasons for dropping documents.
    """
    read = sum(source.read for source in result.sources)
    rows = [["read", "", f"{read:,}", ""]]
    for step in result.steps:
        reasons = sorted(step.counts.reasons.items(), key=lambda item: -item[1])
        parts = [f"{why} ({number:,})" for why, number in reasons[:3]]
        parts += ["..."] if len(reasons) > 3 else []
        if step.counts.failed:
            parts.append(f"errors ({step.counts.failed:,})")
        rows.append(
            [step.operator, f"{step.counts.entered:,}", f"{step.counts.left:,}", ", ".join(parts)]
        )  # fmt: skip
    tokens = sum(source.tokens or 0 for source in result.sources)
    about = f"{tokens:,} tokens, " if tokens else ""
    characters = sum(source.characters for source in result.sources)
    rows.append(
        ["written", "", f"{result.documents:,}", f"{about}{characters:,} characters in {result.out}"]
    )  # fmt: skip
    return ResultTable(["step", "documents", "left", "dropped because"], rows)


def result_json(result: DataResult) -> dict[str, Any]:
    """Return the result of a data run as values that JSON can hold."""
    return {
        "out": str(result.out),
        "documents": result.documents,
        "seconds": round(result.seconds, 3),
        "tasks": result.tasks,
        "reused": result.reused,
        "problem": result.problem,
        "notes": list(result.notes),
        "sources": [vars(source) for source in result.sources],
        "steps": [
            {
                "operator": step.operator,
                "computed": step.computed,
                **{
                    key: value
                    for key, value in step.counts.as_json().items()
                    if key not in ("samples", "histograms")
                },
            }
            for step in result.steps
        ],
    }
