"""The section ``[federated]`` of a recipe that has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.recipe.federated_section import Federated


def federation_of(recipe: Recipe) -> Federated:
    """Return the section ``[federated]`` of ``recipe``. The caller must know that the recipe has one."""
    assert recipe.federated is not None
    return recipe.federated
