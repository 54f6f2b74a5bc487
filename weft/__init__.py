"""Weft: plan, run, prove and checkpoint the training of large models on whatever devices there are.

``from weft import Recipe, load_recipe, train``; ``train(recipe)`` runs a recipe as ``weft train`` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.errors import UsageError, WeftError
    from weft.layout.layout import Layout
    from weft.recipe import (
        Checkpoint,
        Data,
        Generate,
        Level,
        ModelShape,
        Observe,
        Optimizer,
        Recipe,
        RopeScaling,
        Source,
        Train,
        Validation,
        load_recipe,
    )  # fmt: skip
    from weft.resilience.start import start as train

__version__ = "0.1.0"
__all__ = [
    "Recipe", "load_recipe", "train",
    "ModelShape", "RopeScaling", "Data", "Source", "Layout", "Train", "Optimizer", "Validation", "Checkpoint", "Level",
    "Observe", "Generate",
    "WeftError", "UsageError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names of ``__all__``, imported when they are asked for: ``weft --help`` does not wait for PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    if name == "train":
        return import_module("weft.train")  # a package that can be called
    home = {"Layout": "weft.layout.layout", "WeftError": "weft.errors", "UsageError": "weft.errors"}
    return getattr(import_module(home.get(name, "weft.recipe")), name)
