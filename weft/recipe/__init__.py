"""The typed recipe: a TOML file plus ``section.key=value`` overrides becomes validated, frozen objects.

The same classes build a recipe in Python::

    Recipe(model=ModelShape(layers=4), layout=Layout(shard=2, tp=2), train=Train(steps=100))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.recipe.names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Public names, whose files are read when the first of them is asked for: small files here need none of them."""
    names = import_module("weft.recipe.names")
    if name not in names.__all__:
        raise AttributeError(f"module 'weft.recipe' has no attribute {name!r}")
    return getattr(names, name)
