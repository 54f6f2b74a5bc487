"""Reads the file of a pipeline of data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.curation.data_pipeline import DataPipeline, DataStep
from weft.errors import UsageError, WeftError, nearest
from weft.plugins import load_plugins_of
from weft.recipe.host_section import unused_settings
from weft.recipe.masked import masked_text
from weft.recipe.read import apply_override
from weft.recipe.shipped import shipped
from weft.recipe.toml import read_toml
from weft.section import validated


def shipped_pipelines() -> dict[str, Path]:
    """Return the file of every pipeline that comes with Weft, by name."""
    folder = shipped("recipes") / "data"
    files = sorted(folder.glob("*.toml"))
    return {path.stem: path for path in files if "[[steps]]" in path.read_text()}


def load_pipeline(path: str | Path, overrides: Sequence[str] = ()) -> DataPipeline:
    """Read a pipeline: a TOML file at ``path``, or the pipeline of this name that comes with Weft, such as ``stdlib``.

    ``overrides``: texts such as ``shards=4``, or ``steps.words.least=20`` for the step whose operator is ``words``; a
    step's number, from 0, stands for it, too. Raises :class:`UsageError` with one line for a wrong value, and
    :class:`WeftError` if there is no such file.
    """
    file = Path(path)
    if not file.is_file():
        known = shipped_pipelines()
        name = file.stem
        if name not in known or file.parent not in (Path("."), Path("recipes/data")):
            raise WeftError(f"pipeline {path} does not exist; {nearest(name, known)}")
        file = known[name]
    tree = read_toml(file, str(path))
    for item in overrides:
        _override_step(tree, item)
    tree.setdefault("name", file.stem)
    return build_pipeline(tree, str(path))


def build_pipeline(tree: dict[str, Any], origin: str = "pipeline") -> DataPipeline:
    """Return the data pipeline that the nested dictionary ``tree`` describes, after validation. ``origin``: where the
    dictionary comes from. Raises :class:`UsageError`, whose line begins with ``origin``.
    """
    try:
        load_plugins_of(tree)
    except ValueError as error:
        raise UsageError(f"{origin}: {error}") from None
    pipeline = validated(DataPipeline, tree, origin)
    for number, values in enumerate(tree.get("steps", ())):
        if not isinstance(values, dict):
            continue
        for line in unused_settings(f"steps[{number}]", DataStep, values):
            raise UsageError(f"{origin}: {line}; take it out")
    return pipeline


def _override_step(tree: dict[str, Any], item: str) -> None:
    """Apply one ``key=value``; behind ``steps`` stands the operator's name or the step's number."""
    parts = item.partition("=")[0].strip().split(".")
    if parts[0] != "steps" or len(parts) < 3:
        apply_override(tree, item)
        return
    steps = tree.get("steps", [])
    chosen = [
        step
        for number, step in enumerate(steps)
        if parts[1] in (str(number), step.get("operator"))
    ]
    if len(chosen) != 1:
        names = [str(step.get("operator")) for step in steps]
        how = f"there are {len(chosen)} such steps; say its number" if chosen else nearest(parts[1], names)  # fmt: skip
        raise UsageError(f"--set {masked_text(item)!r}: no step {parts[1]!r}; {how}")
    apply_override(chosen[0], item.partition(f"{parts[1]}.")[2])
