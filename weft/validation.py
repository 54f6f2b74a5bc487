"""What a person has written becomes a validated object, or one line that says what is wrong with it."""

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from weft.errors import UsageError, nearest
from weft.layout.conflicts import Conflict

M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], values: dict[str, Any], origin: str) -> M:
    """``values`` as a ``model``; one line per :class:`UsageError`, beginning with ``origin``."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        if isinstance(conflict := error.errors()[0].get("ctx", {}).get("error"), Conflict):
            raise Conflict(f"{origin}: {conflict}", conflict.rule) from None
        raise UsageError(f"{origin}: {explain(error, model)}") from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """First problem of a pydantic error as one line: key, cause, remedy."""
    first = error.errors()[0]
    path = [part for part in map(str, first["loc"]) if not re.match(r"constrained-|\w+\[", part)]  # kinds of a union
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        sections = [name for name in model.model_fields if path[0] in _fields_at(model, [name])]
        if len(path) == 1 and sections:
            return f"unknown key {key!r}; did you mean {f'{sections[0]}.{key}'!r}?"
        return f"unknown key {key!r}; {nearest(path[-1], _fields_at(model, path[:-1]))}"
    if first["type"] == "literal_error":
        expected = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{key} = {first['input']!r} is not possible; {nearest(str(first['input']), expected)}"
    message = first["msg"].removeprefix("Value error, ").replace("Input should", "it should")
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    where = f"{key} = {first['input']!r}: " if path and not isinstance(first["input"], dict) else f"{key}: " * bool(key)
    return f"{where}{message}{more}"


def _fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Field names of the (nested) section that ``path`` leads to; none if that is no section."""
    for part in path:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        model = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), model)
    return [field.alias or name for name, field in model.model_fields.items()]
