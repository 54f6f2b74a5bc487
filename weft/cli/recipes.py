"""``weft recipes``: the recipes that come with Weft, and the JSON schema of all recipes."""

import json
from typing import Annotated

import typer

from weft.cli.arguments import PluginModules, import_plugins
from weft.cli.console import print_table
from weft.recipe.shipped import recipe_headline, shipped_recipes

_schema = (
    "Print the JSON schema of recipes instead, with which editors complete "
    "and check recipes. Name it in a recipe's first line: #:schema FILE"
)


def recipes_command(
    schema: Annotated[bool, typer.Option("--schema", help=_schema)] = False,
    plugin: PluginModules = None,
) -> int:
    """List the recipes that come with Weft: name, layout and purpose. Commands take them by name."""
    from weft.recipe import load_recipe

    import_plugins(plugin)
    if schema:
        from weft.recipe.schema import recipe_schema

        typer.echo(json.dumps(recipe_schema(), indent=1))
        return 0
    rows = []
    for name, path in shipped_recipes().items():
        layout = load_recipe(path).layout
        rows.append((name, str(layout.world), str(layout), recipe_headline(path)))
    print_table(("recipe", "ranks", "layout", "what it shows"), rows)
    return 0
