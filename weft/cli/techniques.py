"""``weft techniques``: the catalogue, as docs/reference/techniques.md has it."""

from weft.cli.console import print_table
from weft.recipe.shipped import catalogue_rows


def techniques_command() -> int:
    """List the published techniques in Weft, with recipe, proof and measured figure."""
    columns = ("technique", "paper", "module", "recipe", "proof", "figure")
    print_table(
        columns, ([cell.replace("`", "") for cell in row] for row in catalogue_rows())
    )
    return 0
