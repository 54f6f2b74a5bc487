"""Training: the step, the loop around it, and what they need. The package can be called: ``train(recipe)``."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.recipe import Recipe
    from weft.train.training import Outcome


class _Train(ModuleType):
    """A module that can be called, so that ``from weft import train`` always gives the function."""

    def __call__(
        self, recipe: Recipe, out: str | Path | None = None, resume: str | None = None
    ) -> Outcome:
        """See :func:`weft.api.start`."""
        from weft.api import start

        return start(recipe, out, resume)


sys.modules[__name__].__class__ = _Train
