"""``weft report``: the page of one run or several."""

from pathlib import Path
from typing import Annotated

import typer


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="A run folder, or several to compare."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page's file; by default report.html or compare.html in RUN."
        ),
    ] = None,
) -> int:
    """Write the report of a run, or of several side by side: one HTML page that works offline."""
    from weft.observe.run_page import write_report

    typer.echo(write_report(*runs, out=out))
    return 0
