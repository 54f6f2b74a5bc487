"""``weft recipes``: the recipes that come with Weft."""

from weft.cli.console import print_table
from weft.recipe.shipped import headline, shipped_recipes


def recipes() -> int:
    """List the recipes that come with Weft: name, layout and what each shows. Commands take them by name."""
    from weft.recipe import load_recipe

    rows = []
    for name, path in shipped_recipes().items():
        layout = load_recipe(path).layout
        rows.append((name, str(layout.world), str(layout), headline(path)))
    print_table(("recipe", "ranks", "layout", "what it shows"), rows)
    return 0
