"""What commands print: tables, and warnings."""

import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print ``rows`` under the names ``columns``, folded to the terminal's width.

    If the output is a pipe or a file, each row is a line with tabs between its values.
    """
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            print("\t".join(row))
        return
    table = Table(
        *columns,
        header_style="bold",
        box=None,
        padding=(0, 2, 0, 0),
        row_styles=("", "dim"),
    )
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def grid(columns: Iterable[str], left: Collection[str], wrap: bool = False) -> Table:
    """Return an empty table with the columns named ``columns`` and without lines between cells, to which the caller
    adds rows.

    Columns named in ``left`` are left-aligned; all others are for numbers and right-aligned. ``wrap``: whether long
    cells are wrapped.
    """
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(
            name, justify="left" if name in left else "right", no_wrap=not wrap
        )
    return table


def plain_console(width: int = 0) -> Console:
    """Return a console that breaks no line of text. For tables it is at least ``width`` characters wide."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, width)
    return console


def warn(text: str) -> None:
    """Print ``text`` as a line on the error stream, so that it does not mix with the command's output."""
    # one write, so that lines of processes that share a terminal do not mix
    sys.stderr.write(f"weft: {text}\n")
