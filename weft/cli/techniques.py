"""``weft techniques``: the catalogue, as docs/techniques.md has it."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from weft.errors import WeftError

COLUMNS = ("technique", "paper", "module", "recipe", "proof", "figure")


def rows() -> list[list[str]]:
    """Rows of the catalogue's table. The installed package carries a copy of the page."""
    for folder in (Path(__file__).parents[2] / "docs", Path(__file__).parents[1]):
        if (folder / "techniques.md").is_file():
            lines = (folder / "techniques.md").read_text().splitlines()
            cells = [[c.strip() for c in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
            return [row for row in cells[2:] if len(row) == len(COLUMNS)]
    raise WeftError("docs/techniques.md is not beside this installation; run weft from a checkout")


def run() -> int:
    table = Table(*COLUMNS, header_style="bold", row_styles=("", "dim"))
    for row in rows():
        table.add_row(*(cell.replace("`", "") for cell in row))
    Console(highlight=False).print(table)
    return 0
