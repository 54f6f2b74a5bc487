"""``weft top``: the engines of a server, live."""

import sys
import time
from contextlib import suppress
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from weft.cli.console import grid, print_table
from weft.errors import WeftError

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
    from weft.serve.engine_table import COLUMNS, fitted_table, read_engines, table_rows

    before = read_engines(url)
    if once:
        time.sleep(min(every, 1.0))
        print_table(COLUMNS, table_rows(read_engines(url), before))
        return 0
    if not sys.stdout.isatty():  # a pipe or file gets each look
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(every)
                now = read_engines(url)
                print_table(COLUMNS, table_rows(now, before))
                print(flush=True)
                before = now
        return 0
    console = Console(highlight=False)

    def look() -> RenderableType:
        """The table now; while a server that was there is gone, a line that says so."""
        nonlocal before
        try:
            now = read_engines(url)
        except WeftError as error:
            return Text(str(error))
        fitted = fitted_table(now, before, console.width, console.height)
        shown = grid(fitted.columns, COLUMNS[:2])
        for row in fitted.rows:
            shown.add_row(*row)
        before = now
        return shown

    # Ctrl-C is how people end it
    with suppress(KeyboardInterrupt), Live(look(), console=console, auto_refresh=False) as live:  # fmt: skip
        while True:
            time.sleep(every)
            live.update(look(), refresh=True)
    return 0
