"""Suggests the right spelling of an unknown key of a recipe."""

from typing import Any

from pydantic import BaseModel

from weft.errors import nearest
from weft.recipe.elsewhere import here_it_is
from weft.section import fields_at, sections_of

#: Sections whose settings are meant only where no other section has a setting of that name.
SPECIAL = ("sync", "control", "saddle")


def unknown_key(path: list[str], value: Any, model: type[BaseModel]) -> str:
    """Return the error line for the unknown key at ``path``, with the nearest valid key.

    ``path``: names of the sections that contain the key, then the key; ``value``: the key's value; ``model``: the class
    of the outermost section.
    """
    key, last = ".".join(path), path[-1]
    below = value if isinstance(value, dict) else {}
    # of an unknown section also what stands in it
    for name in (key, *(f"{key}.{inner}" for inner in below)):
        if elsewhere := here_it_is(name):
            return f"unknown key {name!r}; {elsewhere}"
    near = nearest(last, fields_at(model, path[:-1]))
    settings = [
        name
        for name in settings_called(last, model)
        if name.partition(".")[0] not in path
    ]
    # a section that a program makes
    if not settings and not near.startswith("did"):
        settings = settings_called(last)
    if settings and (len(path) == 1 or (len(path) == 2 and not near.startswith("did"))):
        near = f"did you mean {' or '.join(map(repr, settings))}?"
    return f"unknown key {key!r}; {near}"


def settings_called(name: str, model: type[BaseModel] | None = None) -> list[str]:
    """Return all settings (``section.key``) of ``model`` whose key is ``name``; None stands for :class:`Recipe`.

    If other sections have a key of this name, settings of :data:`SPECIAL` sections are left out.
    """
    if model is None:
        from weft.recipe.recipe import Recipe

        model = Recipe
    sections = [
        section for section in sections_of(model) if name in fields_at(model, [section])
    ]
    usual = [section for section in sections if section not in SPECIAL]
    return [f"{section}.{name}" for section in usual or sections]
