"""The recipes and the catalogue that come with Weft: beside the package in a checkout, inside it when installed."""

import os
from pathlib import Path

from weft.errors import WeftError


def shipped(folder: str) -> Path:
    """Return the path of the folder ``recipes`` or ``docs`` as installed with Weft. ``folder``: one of these names."""
    package = Path(__file__).parents[1]
    installed = package / "shipped_files" / folder
    return installed if installed.is_dir() else package.parent / folder


def shipped_recipes() -> dict[str, Path]:
    """Return the file of every recipe that comes with Weft, by name."""
    return {path.stem: path for path in sorted(shipped("recipes").glob("*.toml"))}


def find_recipe(name: str | Path) -> Path | None:
    """Return the path of the recipe ``name``: a path, ``name.toml`` in the working folder, or a recipe of Weft's.

    Returns None if none of these exists as a file that ends in ``.toml``.
    """
    here = (
        path
        for path in (Path(name), Path(f"{name}.toml"))
        if path.suffix == ".toml" and os.path.isfile(path)
    )
    return next(here, None) or shipped_recipes().get(str(name).removesuffix(".toml"))


def recipe_headline(path: Path) -> str:
    """Return the first line of the recipe at ``path``, a comment that says what the recipe shows."""
    return path.read_text().partition("\n")[0].lstrip("# ")


def catalogue_rows() -> list[list[str]]:
    """Return the rows of the catalogue's table (``docs/reference/techniques.md``), without its header."""
    page = shipped("docs") / "reference/techniques.md"
    if not page.is_file():
        raise WeftError(f"{page} is missing; install Weft again")
    table = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table]
    return [row for row in cells[2:] if len(row) == len(cells[0])]
