"""Every setting says what it means: templates and help print it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from weft.recipe import Recipe
from weft.registry import KINDS, declared
from weft.section import Section


def sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a field of this type may hold, and those in them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    for part in get_args(annotation):
        yield from sections(part)


def test_every_field_has_a_description() -> None:
    techniques = {t.settings for kind in KINDS for t in declared(kind) if t.settings}
    every = {*sections(Recipe), *techniques}
    fields = [
        (f"{section.__name__}.{name}", field.description or "")
        for section in every
        for name, field in section.model_fields.items()
    ]
    assert len(fields) > 200
    assert not [name for name, text in fields if not (text and text.endswith("."))]
