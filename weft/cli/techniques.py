"""``weft techniques``: the catalogue, as docs/techniques.md has it."""

from weft.cli.table import print_table
from weft.shipped import techniques

COLUMNS = ("technique", "paper", "module", "recipe", "proof", "figure")


def run() -> int:
    print_table(COLUMNS, ([cell.replace("`", "") for cell in row] for row in techniques()))
    return 0
