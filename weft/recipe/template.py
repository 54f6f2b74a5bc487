"""A recipe to edit: its settings with their meaning as comments, on request with all other settings."""

import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from weft.recipe import Recipe, build_recipe
from weft.recipe.schema import Schema, recipe_schema
from weft.recipe.toml import toml_value
from weft.section import Section, section_in

_HEAD = """\
# Train: weft train {file}      Prove its layout: weft verify {file}
# Completion in editors with Taplo or Even Better TOML: weft recipes --schema > recipe.schema.json, and this first line:
# #:schema recipe.schema.json
"""
_SHORT = "# All other settings: weft new NAME --all, or docs/reference/recipe.md\n"
_LONG = "# A line with '#' and no space after it is a setting at its default: take the '#' away to change it.\n"

#: Characters of a line of comment.
_WIDTH = 100


def starter() -> str:
    """Return a recipe of ten settings that trains a small model on Python's own source in minutes."""
    return Path(__file__).with_name("starter.toml").read_text()


def template(text: str, file: str, with_all: bool = True) -> str:
    """Return ``text``, a recipe in TOML, with the meaning of each setting as a comment above it.

    ``file``: the name under which the recipe will be saved, for its first lines. ``with_all``: whether to add every
    setting that ``text`` leaves out, as a comment with its default.
    """
    given = tomllib.loads(text)
    recipe = build_recipe(given)
    schema = recipe_schema()
    classes = _section_classes()
    sections = {key: value for key, value in recipe if key in classes}
    out = [_HEAD.format(file=file) + (_LONG if with_all else _SHORT)]
    if with_all:
        out += [
            _about(schema["properties"][key]) + f"#{key} = []\n"
            for key, value in recipe
            if value == () and key not in classes and key not in given
        ]
    for part in re.split(r"(?m)^(?=\[)", text):
        head = re.match(r"\[(\w+)\]\n", part)
        section = sections.pop(head[1], None) if head else None
        if head and section is not None:
            fields = _fields(schema, section)
            body = _with_comments(part[head.end() :].rstrip() + "\n", fields)
            rest = _defaults(section, fields, given[head[1]]) if with_all else ""
            part = head[0] + body + rest
        out.append(part.strip() + "\n")
    for key, section in sections.items():
        if with_all and key not in given:
            title = f"[[{key}]]" if section == () else f"[{key}]"
            section = section or classes[key].model_construct()
            about = _about(schema["properties"][key])
            rest = _defaults(section, _fields(schema, section), {})
            out.append(f"{about}#{title}\n{rest}")
    return "\n".join(filter(str.strip, out))


def _section_classes() -> dict[str, type[Section]]:
    """Return the sections of a recipe in their order, also those that there may be several of."""
    kinds = {name: section_in(f.annotation) for name, f in Recipe.model_fields.items()}
    return {name: k for name, k in kinds.items() if k and issubclass(k, Section)}


def _fields(schema: Schema, section: Section) -> dict[str, Schema]:
    """Return the schema of each field of a section."""
    fields: dict[str, Schema] = schema["definitions"][type(section).__name__]["properties"]  # fmt: skip
    return fields


def _about(field: Schema) -> str:
    """Return the meaning of a setting and its choices, as lines of comment; none for an unknown setting."""
    if "description" not in field:
        return ""
    choices = [str(choice) for choice in field.get("enum", ()) if choice != ""]
    text = field["description"] + f" ({', '.join(choices)})" * bool(choices)
    lines = textwrap.wrap(text, _WIDTH, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


def _with_comments(body: str, fields: dict[str, Schema]) -> str:
    """Return the settings of a section's text, each below its meaning."""

    def about(line: re.Match[str]) -> str:
        return _about(fields.get(line[1], {}))

    return re.sub(r"(?m)^(?=(\w+) = )", about, body)


def _defaults(
    section: Section, fields: dict[str, Schema], given: dict[str, Any]
) -> str:
    """Return a commented setting, below its meaning, for every field that ``given`` leaves out."""
    values = section.model_dump(mode="json", by_alias=True, exclude_none=True)
    keys = [f.alias or name for name, f in type(section).model_fields.items()]
    if given.keys() - keys:  # those of the only source
        keys.remove("sources")
    # "..." where there is no default, and the user must say something
    lines = [
        f"{_about(fields[key])}#{key} = {toml_value(values[key]) if key in values else '...'}\n"
        for key in keys
        if key not in given
    ]
    return "".join(lines)
