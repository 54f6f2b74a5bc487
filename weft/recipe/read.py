"""Recipes from TOML files, with overrides of ``section.key=value``."""

import os
import sys
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError
from weft.layout.layout import Layout
from weft.plugins import load_plugins_of
from weft.recipe.curated_folder import name_curated_data
from weft.recipe.data_section import Source
from weft.recipe.host_section import HostSection, unused_settings
from weft.recipe.recipe import Recipe
from weft.recipe.shipped import find_recipe, shipped_recipes
from weft.recipe.toml import read_toml
from weft.recipe.validation_section import Task
from weft.section import validated

#: Settings that say what the model is asked at the end of a run.
PROMPTS = {"generate.prompt", "generate.prompts"}


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), layout: str | None = None, origin: str | None = None,
    data: str | None = None, quiet: bool = False,
) -> Recipe:  # fmt: skip
    """Read a recipe: a TOML file at ``path``, or the recipe of this name that comes with Weft.

    ``overrides``: texts ``section.key=value``. ``layout``: such as ``"shard=2,tp=2"``, as on the command line.
    ``origin``: a model to start from, with its own tokenizer, instead of the recipe's. ``data``: path of records or
    texts to read instead of the recipe's sources. ``quiet``: do not say which settings have no effect. Raises
    :class:`UsageError` with one line that names the nearest valid choice, and :class:`WeftError` if there is no such
    recipe.
    """
    file = Path(path) if os.path.isfile(path) else find_recipe(path)
    if file is None:
        if os.path.isdir(path):
            raise UsageError(
                f"{path} is a folder; give a recipe, which is a TOML file, or a name of 'weft recipes'"
            )
        alike = get_close_matches(Path(path).stem, shipped_recipes(), n=1)
        remedy = (
            f"did you mean {alike[0]!r}?"
            if alike
            else "see 'weft recipes', or write one with 'weft new NAME'"
        )
        raise WeftError(f"recipe {path} does not exist; {remedy}")
    if file.suffix in (".yaml", ".yml", ".json"):
        raise UsageError(
            f"{path}: recipes are TOML files; docs/how-to/coming-from.md says what settings of other programs are"
        )
    if file.suffix in (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"):
        raise UsageError(
            f"{path} is data, and a recipe comes first: 'weft train finetune --data {path}' for conversations, "
            "or data.path in a recipe of yours"
        )
    tree = read_toml(file, str(path))
    # nobody means to train what all defaults together give
    if not (tree or overrides or origin or data):
        raise UsageError(
            f"{path} is empty; 'weft new NAME' writes a recipe to edit, 'weft recipes' lists others"
        )
    tree.setdefault("name", file.stem)
    return recipe_of_tree(tree, path, overrides, layout, origin, data, quiet)


def recipe_of_tree(
    tree: dict[str, Any], path: str | Path, overrides: Sequence[str] = (), layout: str | None = None,
    origin: str | None = None, data: str | None = None, quiet: bool = False,
) -> Recipe:  # fmt: skip
    """Build the recipe of the settings ``tree``, a nested dictionary, which this changes.

    ``path``: where the settings come from, for error lines. The other arguments are those of :func:`load_recipe`.
    """
    if origin is not None:
        tree["model"] = {"from": origin}
        tree["data"] = {
            key: value
            for key, value in tree.get("data", {}).items()
            if key != "tokenizer"
        }
    set_keys = {item.partition("=")[0].strip() for item in overrides}
    if (
        "data.path" in set_keys
        and "data.sources" not in set_keys
        and isinstance(tree.get("data"), dict)
    ):
        # a path of the user's own is read instead of what the recipe names
        tree["data"].pop("sources", None)
    if data is not None:
        tree["data"] = _with_data(tree.get("data", {}), data)
        # what the recipe would ask is about its own data
        if isinstance(asked := tree.get("generate"), dict) and not set_keys & PROMPTS:
            own = {key: asked[key] for key in asked if f"generate.{key}" not in PROMPTS}
            tree["generate"] = own | {"from_data": True}
    for item in overrides:
        apply_override(tree, item)
    name_curated_data(tree, set_keys)
    if layout is not None:
        try:
            load_plugins_of(tree)
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
        tree["layout"] = Layout.parse(layout, tree.get("layout", {})).model_dump()
    if isinstance(tree.get("model"), dict) and "adapter" in tree["model"]:
        raise UsageError(
            f"{path}: unknown section [model.adapter]; adapters have a section of their own, [adapter]"
        )
    recipe = build_recipe(tree, str(path))
    # of several ranks one, and not those that a launcher has started after it has said so itself
    launched = "WEFT_LAUNCHED" in os.environ or os.environ.get("RANK", "0") != "0"
    if not (quiet or launched):
        for line in settings_without_use(tree, recipe):
            print(f"{path}: {line}", file=sys.stderr)
    return recipe


def build_recipe(tree: dict[str, Any], origin: str = "recipe") -> Recipe:
    """Validate a nested dictionary, ``tree``, into a :class:`Recipe`.

    Raises :class:`UsageError` with one line that begins with ``origin`` (for example the file's name).
    """
    return validated(Recipe, tree, origin)


def settings_without_use(tree: dict[str, Any], recipe: Recipe) -> list[str]:
    """Return a line for each setting in ``tree`` that has no effect, because ``recipe`` does not name its technique.

    ``tree``: the recipe as a nested dictionary, from which ``recipe`` was validated.
    """
    lines = []
    for name in Recipe.model_fields:
        section, values = getattr(recipe, name), tree.get(name)
        if isinstance(section, HostSection) and isinstance(values, dict):
            lines += unused_settings(name, type(section).hosting(), values)
    for number, values in enumerate(tree.get("tasks", ())):
        lines += unused_settings(f"tasks[{number}]", Task, values)
    return lines


def _with_data(section: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the section ``[data]`` with ``path`` as its only source: of the kind of its first, whose files are of
    others.
    """
    first = (section.get("sources") or [section])[0]
    kind = first.get("kind", "stdlib")
    if kind == "stdlib":
        endings = {
            ".jsonl": "jsonl",
            ".json": "jsonl",
            ".csv": "csv",
            ".tsv": "tsv",
            ".parquet": "parquet",
        }
        kind = next(
            (endings[ending] for ending in Path(path).suffixes if ending in endings),
            "text",
        )
    others = {
        key: value
        for key, value in section.items()
        if key not in (*Source.model_fields, "sources")
    }
    return others | {"kind": kind, "path": path}


def apply_override(tree: dict[str, Any], item: str) -> None:
    """Set one setting in the nested dictionary ``tree``, as the option ``--set`` of the command line does.

    ``item``: a text ``section.key=value``; the value is read as TOML and, if that fails, taken as a string.
    ``section=none`` removes a section.
    """
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        from weft.recipe.masked import masked_text

        raise UsageError(
            f"--set {masked_text(item)!r} is not of the form section.key=value"
        )
    try:
        value = tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *sections, leaf = key.strip().split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UsageError(
                f"--set {key.strip()}: {section!r} is a value, not a section"
            )
    if (
        value == "none"
        and isinstance(tree.get(leaf), dict | None)
        and leaf in ("adapter", "generate")
    ):
        tree.pop(leaf, None)
    else:
        tree[leaf] = value
