"""Sections: frozen objects built from a user's values, or one line that says what is wrong with them."""

import re
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from weft.errors import UsageError, nearest
from weft.refusal import Conflict

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

M = TypeVar("M", bound=BaseModel)

#: Characters of a value in an error line.
LONG = 100

#: What a value should be, by the type of pydantic's error, as whoever writes TOML calls it.
KINDS = {
    "int_parsing": "a whole number", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_parsing": "a number", "float_type": "a number", "string_type": "a text in quotes",
    "bool_parsing": "true or false", "bool_type": "true or false", "tuple_type": "a list",
    "model_type": "a section of keys",
}  # fmt: skip


class WrongValue(UsageError, ValueError):
    """Raised for a wrong value in a section that Python code creates.

    It is also a :class:`ValueError`, like pydantic's own error.
    """


class OneLine(ModelMetaclass):
    """Metaclass of sections, which makes a wrong value raise an error of one line instead of pydantic's report."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        model: Any = cls
        if with_settings := getattr(cls, "with_settings", None):
            model = with_settings(values)
        try:
            return super(OneLine, model).__call__(*args, **values)
        except ValidationError as error:
            refusal = _refusal(error, cls, cls.__name__, values)  # type: ignore[arg-type]  # a class of models
            raise (
                refusal if isinstance(refusal, Conflict) else WrongValue(str(refusal))
            ) from None


class Section(BaseModel, metaclass=OneLine):
    """Base of every section of a recipe: unknown keys are errors, and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @classmethod
    def user_path(cls, path: list[str], given: Any) -> list[str]:
        """Return the path of a value in this section as the user wrote it, for error lines.

        In most sections it is ``path`` itself. ``path``: keys and indices that lead to the value in the validated
        section. ``given``: the user's values of the section.
        """
        return path


def validated(model: type[M], values: dict[str, Any], origin: str) -> M:
    """Validate ``values`` as an instance of the section class ``model``.

    Raises :class:`UsageError` with one line that begins with ``origin``, the name of the values' source.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _refusal(error, model, origin, values) from None


def _refusal(
    error: ValidationError, model: type[BaseModel], origin: str, values: dict[str, Any]
) -> UsageError:
    """Return the first problem of ``error`` as one line that begins with ``origin``. ``values``: what was validated."""
    if isinstance(conflict := error.errors()[0].get("ctx", {}).get("error"), Conflict):
        return Conflict(f"{origin}: {conflict}", conflict.rule)
    return UsageError(f"{origin}: {explain(error, model, values)}")


def explain(
    error: ValidationError, model: type[BaseModel], values: dict[str, Any]
) -> str:
    """Return the first problem of the pydantic error ``error`` as one line: key, cause, remedy.

    ``model``: the class of the section that was validated; ``values``: the user's values of this section.
    """
    first = error.errors()[0]
    path = _path(first)
    key = ".".join(_user_path(path, model, values))
    if first["type"] == "extra_forbidden":
        # read for whoever has made a mistake only
        from weft.recipe.unknown_key import unknown_key

        return unknown_key(path, first["input"], model)
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "literal_error":
        expected = (
            first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        )
        expected = [choice for choice in expected if choice]  # "" is what is left out
        return f"{key} = {first['input']!r} is not possible; {nearest(str(first['input']), expected)}"
    # A union has an error for each of its kinds.
    errors = [e for e in error.errors() if _path(e) == path]
    kinds = [KINDS[e["type"]] for e in errors if e["type"] in KINDS]
    words = [e["ctx"]["expected"] for e in errors if e["type"] == "literal_error"]
    # a number is one of the kinds
    kinds += [word for word in words if word.startswith("'")] if kinds else []
    plain = (
        f"it should be {' or '.join(dict.fromkeys(kinds))}" if kinds else first["msg"]
    )
    message = plain.removeprefix("Value error, ").replace("Input should", "it should")
    keys = {tuple(_path(other)) for other in error.errors()}
    more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
    if not path or isinstance(first["input"], dict):
        return f"{key}: " * bool(key) + message + more
    about = "" if first["type"] == "value_error" else _meaning(model, path, values)
    return f"{key} = {_shown(first['input'])}: {message}{about}{more}"


def _user_path(path: list[str], model: type[BaseModel], values: Any) -> list[str]:
    """Return the path of a value as the user wrote it, by what each section on the way says of its own."""
    written = []
    while path:
        if issubclass(model, Section):
            path = model.user_path(path, values)
        if not path:
            break
        written.append(path[0])
        model = _section_at(model, path[0])
        values = values.get(path[0]) if isinstance(values, dict) else None
        path = path[1:]
    return written


def _meaning(model: type[BaseModel], path: list[str], values: Any) -> str:
    """Return the meaning of the key at ``path`` in parentheses: the first sentence of its description, or "".

    ``values``: the user's values of ``model``. Of techniques that share the key, one that they name is explained.
    """
    for part in path[:-1]:
        model = _section_at(model, part)
        values = _value_at(values, part)
    key = path[-1]
    owners = model.owners(key) if hasattr(model, "owners") else []
    chosen = [*values.values()] if isinstance(values, dict) else []
    owners = [owner for owner in owners if owner.name in chosen] or owners
    sections = [model, *(technique.settings for technique in owners)]
    fields = [pair for section in sections for pair in section.model_fields.items()]
    about = next((f.description for name, f in fields if key in (name, f.alias)), None)
    sentence = re.split(r"[.;] |\.$", about or "")[0]
    return f" ({key}: {sentence})" if sentence else ""


def _value_at(values: Any, part: str) -> Any:
    """Return the value of a key of a table, or of an index of a list; None where there is none."""
    if isinstance(values, dict):
        return values.get(part)
    if isinstance(values, list) and part.isdecimal() and int(part) < len(values):
        return values[int(part)]
    return None


def _shown(value: object) -> str:
    """Return a value for an error line: the beginning of a long value, the class of an object."""
    if isinstance(value, BaseModel):
        return f"{type(value).__name__}(...)"
    text = repr(value)
    if "://" in text:
        from weft.recipe.masked import masked_text

        text = masked_text(text)
    return text if len(text) <= LONG else f"{text[:LONG]}..."


def _path(error: ErrorDetails) -> list[str]:
    """Return the path of a pydantic error, without the kinds of a union."""
    return [
        part
        for part in map(str, error["loc"])
        if not re.match(r"constrained-|\w+\[|(int|float|bool|str)$", part)
    ]


def fields_at(model: type[BaseModel], path: list[str]) -> list[str]:
    """Return the keys of a section of ``model``, with the settings of techniques that the section could name.

    ``path``: the names that lead from ``model`` to this section; empty for ``model`` itself.
    """
    for part in path:
        model = _section_at(model, part)
    own = [field.alias or name for name, field in model.model_fields.items()]
    every = getattr(model, "technique_settings", list)
    return [*own, *(name for name in every() if name not in own)]


def sections_of(model: type[BaseModel]) -> list[str]:
    """Return the names of those fields of ``model`` that hold a section, not a value."""
    return [
        name for name in model.model_fields if _section_at(model, name) is not model
    ]


def _section_at(model: type[BaseModel], key: str) -> type[BaseModel]:
    """Return the section that a field of ``model`` holds; ``model`` itself if that field holds none."""
    field = model.model_fields.get(key)
    return section_in(field.annotation if field else None) or model


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the class of the section that a field with the type ``annotation`` holds; None if it holds none."""
    for option in (annotation, *getattr(annotation, "__args__", ())):
        # a class that is imported when it is needed, and of Annotated[Section, ...] the section
        markers = (
            m for m in getattr(option, "__metadata__", ()) if hasattr(m, "section")
        )
        kinds = (getattr(option, "__origin__", option), *(m.section for m in markers))
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                return kind
    return None
