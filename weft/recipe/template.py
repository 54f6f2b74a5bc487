"""A recipe to edit: one that works, with every other setting beside it as a comment."""

import re
import tomllib
from typing import Any, get_args

from pydantic.fields import FieldInfo

from weft.recipe import Recipe, Section, build_recipe
from weft.recipe.host_section import HostSection
from weft.recipe.toml import toml_value
from weft.registry import KINDS, names

_HEAD = """\
# A line with '#' and no space after it is a setting at its default: take the '#' away to change it.
# Try it: weft train {file}      Prove its layout: weft verify {file}
"""


def template(text: str, file: str) -> str:
    """The TOML recipe ``text``, to be written to ``file``, with all settings that it leaves out as comments."""
    given = tomllib.loads(text)
    recipe = build_recipe(given)
    kinds = _sections()
    sections = {key: value for key, value in recipe if key in kinds}
    lists = [
        f"#{key} = []\n"
        for key, value in recipe
        if value == () and key not in kinds and key not in given
    ]
    out = [_HEAD.format(file=file), *lists]
    for part in re.split(r"(?m)^(?=\[)", text):
        head = re.match(r"\[(\w+)\]\n", part)
        section = sections.pop(head[1], None) if head else None
        if head and section is not None:
            part = (
                head[0]
                + _about(section)
                + part[head.end() :].rstrip()
                + "\n"
                + _defaults(section, given[head[1]])
            )
        out.append(part.strip() + "\n")
    for key, section in sections.items():
        if key not in given:
            named = f"[[{key}]]" if section == () else f"[{key}]"
            section = section or kinds[key].model_construct()
            out.append(f"#{named}\n{_about(section)}{_defaults(section, {})}")
    return "\n".join(out)


def _sections() -> dict[str, type[Section]]:
    """The sections of a recipe in their order, also those that there may be several of."""
    kinds = (
        (name, kind)
        for name, f in Recipe.model_fields.items()
        for kind in (f.annotation, *get_args(f.annotation))
    )
    return {name: kind for name, kind in kinds if hasattr(kind, "model_fields")}


def _about(section: Section) -> str:
    """What the section's class says of itself, as a comment."""
    lines = re.sub(r"``|:\w+:|`", "", type(section).__doc__ or "").strip().splitlines()
    return "".join(f"# {line.strip()}".rstrip() + "\n" for line in lines)


def _defaults(section: Section, given: dict[str, Any]) -> str:
    """A commented line for every field that ``given`` leaves out."""
    values = section.model_dump(mode="json", by_alias=True, exclude_none=True)
    settings = {f.alias or name: f for name, f in type(section).model_fields.items()}
    if given.keys() - settings.keys():  # those of the only source
        settings.pop("sources")
    lines = [
        # "..." where there is no default, and the user must say something.
        f"#{name} = {toml_value(values[name]) if name in values else '...'}".ljust(34)
        + _note(section, name, field)
        for name, field in settings.items()
        if name not in given
    ]
    return "".join(line.rstrip() + "\n" for line in lines)


def _note(section: Section, name: str, field: FieldInfo) -> str:
    """What a setting means, and what else it can be."""
    if isinstance(section, HostSection) and name in section.hosts:
        kind = section.hosts[name]
        choices = KINDS[kind].choices(names(kind))
    else:
        choices = [
            str(c) for c in get_args(field.annotation) if isinstance(c, str | int)
        ]
    choices = [choice for choice in choices if choice]
    notes = [field.description or "", f"({', '.join(choices)})" * bool(choices)]
    return " # " + " ".join(filter(None, notes)) if any(notes) else ""
