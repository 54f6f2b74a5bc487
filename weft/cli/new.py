"""``weft new``: a recipe as a file to edit."""

from pathlib import Path
from typing import Annotated

import typer

from weft.errors import UsageError, WeftError


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="NAME.toml is written.")],
    source: Annotated[
        str, typer.Option("--from", metavar="RECIPE", help="What to start from.")
    ] = "quickstart",
) -> int:
    """Write a recipe to edit: one that runs, with every other setting and its meaning as comments."""
    from weft.recipe import load_recipe
    from weft.recipe.shipped import find_recipe
    from weft.recipe.template import template

    out = Path(name if name.endswith(".toml") else f"{name}.toml")
    path = find_recipe(source)
    if not out.name.removesuffix(".toml"):
        raise UsageError("the new recipe has no name; say: weft new NAME")
    if out.exists():
        raise UsageError(f"{out} exists already; choose another name")
    if path is None:
        load_recipe(source)  # says which one may have been meant
        raise UsageError(f"--from {source} is not a .toml file")
    try:
        out.write_text(template(path.read_text(), str(out)))
    except OSError as error:
        raise WeftError(
            f"cannot write {out}: {error.strerror}; choose another folder"
        ) from None
    typer.echo(f"{out}: edit it, then: weft train {out}")
    return 0
