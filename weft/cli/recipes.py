"""``weft recipes`` and ``weft new``: the recipes that come with Weft, and one of them as a file to edit."""

from pathlib import Path

import typer

from weft.cli.table import print_table
from weft.errors import UsageError, WeftError
from weft.recipe import load_recipe
from weft.shipped import find_recipe, headline, shipped_recipes
from weft.template import template


def ls() -> int:
    """Name, ranks, layout and what it shows."""
    rows = []
    for name, path in shipped_recipes().items():
        layout = load_recipe(path).layout
        rows.append((name, str(layout.world), str(layout), headline(path)))
    print_table(("recipe", "ranks", "layout", "what it shows"), rows)
    return 0


def new(name: str, source: str) -> int:
    """Write ``name.toml`` from the recipe ``source``, with every setting that it leaves out as a comment."""
    out = Path(name if name.endswith(".toml") else f"{name}.toml")
    found = find_recipe(source)
    if out.exists():
        raise UsageError(f"{out} exists already; choose another name")
    if found is None:
        load_recipe(source)  # says which one may have been meant
        raise UsageError(f"--from {source} is not a .toml file")
    try:
        out.write_text(template(found.read_text(), str(out)))
    except OSError as error:
        raise WeftError(f"cannot write {out}: {error.strerror}; choose another folder") from None
    typer.echo(f"{out}: edit it, then: weft train {out}")
    return 0
