"""``weft doctor``: who makes a run wait."""

import json
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import AsJson
from weft.cli.console import print_table


def doctor_command(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a running or finished run."),
    ],
    as_json: AsJson = False,
) -> int:
    """Say who makes a run wait: a slow computer, sender, receiver or link, or a rank that hangs and where."""
    from weft.observe.diagnosis import examine, tables

    examination = examine(run)
    if as_json:
        typer.echo(json.dumps(examination.as_json(), indent=2))
        return 0
    for columns, rows in tables(examination):
        print_table(columns, rows)
        typer.echo()
    for verdict in examination.verdicts:
        typer.echo(verdict.text)
    if not examination.verdicts:
        typer.echo("nobody is slow, and nobody hangs")
    return 0
