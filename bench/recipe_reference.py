"""Make the reference page of recipes (docs/reference/recipe.md) from the fields of its sections.

    python bench/recipe_reference.py [--mend]

Without ``--mend`` the page is printed, with ``--mend`` it is written. ``tests/recipe/test_schema.py`` compares the
page with the fields.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from weft.recipe.recipe import Recipe
from weft.recipe.schema import Schema, recipe_schema, technique_fields
from weft.recipe.toml import toml_value
from weft.registry import KINDS, declared

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "recipe.md"

HEAD = """\
# The recipe

A recipe is a TOML file with the sections below; a section or setting that is left out has its default. `weft new NAME`
writes a recipe to edit, with `--all` one that shows every setting. On a command line, `--set section.key=value` changes
one setting for one run. A wrong key or value is refused in one line before anything starts.

In the tables, a name such as `rl.group` is the setting `group` of the section `[rl]`; a name without a section is a
setting of the same table. "Not set" in the column of defaults means that the setting has no value unless the recipe
gives it one. Techniques that a recipe can name, such as an update rule, have a table of their own below the section
that names them. The [vocabulary](vocabulary.md) explains words such as rank, host and island.

**Editors** complete and check recipes (Taplo; Even Better TOML for VS Code): write the schema with
`weft recipes --schema > recipe.schema.json` and name it in a recipe's first line, `#:schema recipe.schema.json`. For
recipes that name plugins add `--plugin MODULE`, so that the schema knows their names and settings.

This page is made by `python bench/recipe_reference.py --mend` from the fields themselves.
"""

TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "`true` or `false`",
    "array": "list",
}

#: Sections within sections, each shown below the one that has it.
NESTED = {
    "data": {"data.sources": "Source", "data.chat": "Chat"},
    "model": {"model.rope_scaling": "RopeScaling"},
    "checkpoint": {"checkpoint.levels": "Level"},
    "optimizer": {"optimizer.groups": "ParameterGroup"},
    "rl": {
        "rl.start": "SupervisedStart",
        "rl.loss": "PolicyLoss",
        "rl.loss.correction": "SamplerCorrection",
    },
    "roles": {
        "roles.rollout": "RolloutRole",
        "roles.reference": "ReferenceRole",
        "roles.reward": "RewardRole",
        "roles.critic": "CriticRole",
    },
    "control": {"control.terms": "RewardTerm"},
}


def values_in_words(node: Schema) -> str:
    """Say what a setting can be by its schema: its choices, or its type and limits."""
    if choices := node.get("enum"):
        return ", ".join(f"`{toml_value(choice)}`" for choice in choices)
    if options := node.get("anyOf"):
        return " or ".join(dict.fromkeys(map(values_in_words, options)))
    words = TYPES.get(node.get("type", ""), "table")
    if words == "list" and (items := node.get("items")):
        of = items[0] if isinstance(items, list) else items
        words = f"list of {plural(values_in_words(of))}"
    for limit, open_words, closed_words in (
        ("minimum", "above", "at least"),
        ("maximum", "below", "at most"),
    ):
        if limit in node:
            is_open = node.get(f"exclusive{limit.capitalize()}")
            words += f", {open_words if is_open else closed_words} {node[limit]:,}"
    return words


def plural(values: str) -> str:
    """Say of several values what ``values`` says of one."""
    return re.sub(r"(^| or )(list|(?:whole )?number|text|table)\b", r"\1\2s", values)


def table(fields: dict[str, Schema], required: Collection[str] = ()) -> Iterator[str]:
    """A table of settings, of which a recipe must give the ``required`` ones."""
    yield "| setting | default | values | meaning |"
    yield "|---|---|---|---|"
    for key, node in fields.items():
        values = values_in_words(node).replace("|", "\\|")
        meaning = linked(node["description"]).replace("|", "\\|")
        default = "required" if key in required else default_in_words(node)
        yield f"| `{key}` | {default} | {values} | {meaning} |"
    yield ""


def default_in_words(node: Schema) -> str:
    """The default of a setting as TOML, or that it is not set."""
    default: Any = node.get("default")
    of_tables = isinstance(default, list) and default and isinstance(default[0], dict)
    return "not set" if default is None or of_tables else f"`{toml_value(default)}`"


def linked(text: str) -> str:
    """Pages that a description names, as links from this page."""
    return re.sub(r"\bdocs/([\w/-]+)\.md", r"[\1](../\1.md)", text)


def of_technique(text: str) -> bool:
    """Whether a description is that of a technique's setting, which begins with the names of its techniques."""
    return bool(re.match(r'With \w+ = "', text))


def sections(schema: Schema) -> Iterator[str]:
    """The sections of a recipe: a table each, then those of the techniques that it can name, and of tables in it."""
    definitions = schema["definitions"]
    for name, field in Recipe.model_fields.items():
        node = schema["properties"][name]
        reference = node.get("$ref") or node.get("items", {}).get("$ref")
        if reference is None:
            continue
        section = definitions[reference.rpartition("/")[2]]
        title = f"[[{name}]]" if "items" in node else f"[{name}]"
        own = {k: v for k, v in section["properties"].items() if not of_technique(v["description"])}  # fmt: skip
        yield from (f"## `{title}`", "", linked(field.description or ""), "")
        yield from table(own, section.get("required", ()))
        for kind, about in KINDS.items():
            if about.setting.partition(".")[0] == name:
                yield from techniques(kind, title)
        of_path = {p: definitions[d] for p, d in NESTED.get(name, {}).items()}
        yield from nested({name: section} | of_path)


def techniques(kind: str, title: str) -> Iterator[str]:
    """A table for each technique of a kind that has settings, in the section with this title."""
    key = KINDS[kind].setting.rpartition(".")[2]
    for technique in declared(kind):
        if fields := technique_fields(technique):
            paper = f" ({technique.paper})" if technique.paper else ""
            yield from (f'### `{title}` with `{key} = "{technique.name}"`', "")
            yield from (f"{technique.title}{paper}.", "", *table(fields))


def nested(of_path: dict[str, Schema]) -> Iterator[str]:
    """A table for each section within the first one of these, introduced by the setting that holds it."""
    for path, section in list(of_path.items())[1:]:
        above, _, key = path.rpartition(".")
        about = of_path[above]["properties"][key]["description"]
        yield from (f"### `{path}`", "", linked(about), "")
        yield from table(section["properties"], section.get("required", ()))


def page() -> str:
    """The whole page."""
    schema = recipe_schema()
    of_sections = {
        key
        for key, node in schema["properties"].items()
        if "$ref" in node or "$ref" in node.get("items", {})
    }
    top = {k: v for k, v in schema["properties"].items() if k not in of_sections}
    lines = [HEAD, "## Top level", "", *table(top), *sections(schema)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    if "--mend" in sys.argv:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page())
    else:
        print(page())
