"""Rules for what else a recipe with ``[saddle]`` may set."""

from __future__ import annotations

from typing import Any

#: Sections that mean something beside ``[saddle]``, and of ``[train]`` and ``[layout]`` the settings that do.
BESIDE_SADDLE = (
    "name", "plugins", "layout", "train", "checkpoint", "observe", "saddle",
)  # fmt: skip
OF_TRAIN = ("seed", "dtype", "device", "threads", "timeout")
OF_LAYOUT = ("dp",)


def check_beside_saddle(recipe: Any) -> None:
    """Raise :class:`ValueError` for the first setting of ``recipe`` that has no effect in a run with ``[saddle]``."""
    for name in sorted(recipe.model_fields_set - {*BESIDE_SADDLE}):
        if getattr(recipe, name) != type(recipe).model_fields[name].default:
            raise ValueError(
                f"[{name}] does nothing beside [saddle], which has parameters of its own; leave it out"
            )
    for name, kept in (("train", OF_TRAIN), ("layout", OF_LAYOUT)):
        section = getattr(recipe, name)
        fields = type(section).model_fields
        for key in sorted(section.model_fields_set - {*kept}):
            if getattr(section, key) != fields[key].default:
                raise ValueError(
                    f"{name}.{key} does nothing beside [saddle]; use {' or '.join(f'{name}.{k}' for k in kept)}, or "
                    "leave it out"
                )
    if recipe.train.dtype == "bfloat16":
        raise ValueError(
            "train.dtype = 'bfloat16' is too coarse for saddle points; use 'float32' or 'float64'"
        )
    if recipe.checkpoint.export:
        raise ValueError(
            "checkpoint.export is for language models; leave it out, checkpoints hold the saddle point"
        )
    if recipe.saddle.devices % recipe.layout.dp:
        raise ValueError(
            f"saddle.devices = {recipe.saddle.devices} cannot be divided by layout.dp = {recipe.layout.dp}; change one "
            "of them"
        )
