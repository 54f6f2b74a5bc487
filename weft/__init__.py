"""Weft: plan, run, prove and checkpoint the training of large models on whatever devices there are.

``from weft import Recipe, load_recipe, train``; ``train(recipe)`` runs a recipe as ``weft train`` does. ``dir(weft)``
has all names: the sections of a recipe, what plugins need, and errors.
"""

from weft.version import VERSION

# Not typing's, whose import takes longer than all else before the entry point handles Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from weft.api import start as train
    from weft.curation.data_run import run_pipeline
    from weft.curation.read_pipeline import load_pipeline
    from weft.errors import UsageError, WeftError
    from weft.layout.layout import Layout
    from weft.plugins import Callback, register
    from weft.recipe import (
        Adapter,
        Chat,
        Checkpoint,
        Data,
        Generate,
        Level,
        Loss,
        Memory,
        ModelShape,
        Observe,
        Optimizer,
        ParameterGroup,
        Recipe,
        Resilience,
        RopeScaling,
        Source,
        Sync,
        Task,
        Train,
        Use,
        Validation,
        build_recipe,
        load_recipe,
    )
    from weft.train.training import Outcome

__version__ = VERSION
__all__ = [
    "Recipe", "load_recipe", "build_recipe", "train", "Outcome",
    "load_pipeline", "run_pipeline",
    "ModelShape", "RopeScaling", "Adapter", "Data", "Source", "Chat", "Layout", "Train", "Memory", "Loss", "Optimizer",
    "ParameterGroup", "Validation", "Task", "Checkpoint", "Level", "Observe", "Resilience", "Sync", "Generate", "Use",
    "register", "Callback",
    "WeftError", "UsageError",
]  # fmt: skip

#: Where names stand that are not in :mod:`weft.recipe`.
_HOMES = {
    "Layout": "weft.layout.layout",
    "load_pipeline": "weft.curation.read_pipeline",
    "run_pipeline": "weft.curation.data_run",
    "WeftError": "weft.errors",
    "UsageError": "weft.errors",
    "register": "weft.plugins",
    "Callback": "weft.plugins",
    "Outcome": "weft.train.training",
}


def __getattr__(name: str) -> "Any":
    """Import a name of ``__all__`` on first use, so that ``weft --help`` does not wait for PyTorch."""
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    if name == "train":
        return import_module("weft.train")  # a package that can be called
    return getattr(import_module(_HOMES.get(name, "weft.recipe")), name)


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__])
