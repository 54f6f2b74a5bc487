"""``weft top``: the engines of a server, live."""

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from weft.cli.console import grid, print_table

_url = "The address of the server, such as http://127.0.0.1:8000."
_every = "Seconds between two looks."


def top_command(
    url: Annotated[str, typer.Argument(metavar="URL", help=_url)],
    once: Annotated[
        bool, typer.Option("--once", help="Print the table once, and end.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, help=_every)] = 1.0,
) -> int:
    """Show the engines of a server (weft serve): their state, queues, cache blocks and tokens per second, live."""
    from weft.serve.engine_table import COLUMNS, read_engines, table_rows

    before = read_engines(url)
    if once:
        time.sleep(min(every, 1.0))
        print_table(COLUMNS, table_rows(read_engines(url), before))
        return 0

    def table() -> Table:
        nonlocal before
        now = read_engines(url)
        shown = grid(COLUMNS, COLUMNS[:2])
        for row in table_rows(now, before):
            shown.add_row(*row)
        before = now
        return shown

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(table(), refresh=True)
