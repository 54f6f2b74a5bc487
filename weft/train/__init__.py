"""One training step for every layout, and the loop around it. The package can be called: ``train(recipe)``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.training import Outcome


class _Train(ModuleType):
    """So that ``from weft import train`` is the function, whoever has imported something of this package before."""

    def __call__(
        self, recipe: Recipe, out: str | Path | None = None, resume: str | None = None
    ) -> Outcome:
        """See :func:`weft.api.start`."""
        from weft.api import start

        return start(recipe, out, resume)


sys.modules[__name__].__class__ = _Train
