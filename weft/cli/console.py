"""What commands print: tables, and warnings."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns side by side, folded to the terminal; into a pipe or a file a line per row, its cells parted by tabs."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            print("\t".join(row))
        return
    table = Table(*columns, header_style="bold", box=None, padding=(0, 2, 0, 0), row_styles=("", "dim"))
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def warn(text: str) -> None:
    """A line beside the output proper."""
    print(f"weft: {text}", file=sys.stderr)
