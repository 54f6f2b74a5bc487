"""``weft new``: a recipe as a file to edit."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from weft.errors import UsageError, WeftError, why_unwritten

_from = "Start from this recipe: a name from weft recipes, or a file. If not set: ten settings of a small model."
_all = "Add every other setting too, as a comment at its default."


def new_command(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Write the recipe to NAME.toml.")
    ],
    source: Annotated[
        str | None, typer.Option("--from", metavar="RECIPE", help=_from)
    ] = None,
    with_all: Annotated[bool, typer.Option("--all", help=_all)] = False,
) -> int:
    """Write a recipe to edit: one that runs, with the meaning of each setting as a comment."""
    from weft.recipe import load_recipe
    from weft.recipe.shipped import find_recipe
    from weft.recipe.template import starter, template

    out = Path(name if name.endswith(".toml") else f"{name}.toml")
    path = find_recipe(source) if source else None
    if not out.name.removesuffix(".toml"):
        raise UsageError("the new recipe has no name; say: weft new NAME")
    try:
        exists = out.exists()
    except OSError as error:
        raise WeftError(
            f"cannot write {out}: {why_unwritten(error, 'choose another name')}"
        ) from None
    if exists:
        raise UsageError(f"{out} exists already; choose another name")
    if source and path is None:
        load_recipe(source)  # says which one may have been meant
        raise UsageError(f"--from {source} is not a .toml file")
    text = path.read_text() if path else starter()
    try:
        out.write_text(template(text, str(out), with_all))
    except OSError as error:
        with suppress(OSError):
            out.unlink()  # a part of it, which would be in the way of the next attempt
        raise WeftError(
            f"cannot write {out}: {why_unwritten(error, 'choose another folder')}"
        ) from None
    typer.echo(f"{out}: edit it, then: weft train {out}")
    return 0
