"""Check of values against a JSON schema, without the features that fetch or run anything.

A schema with a keyword that is not known is refused, as such a part of it would never be checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import Any

from weft.errors import UsageError, nearest

Schema = Mapping[str, Any] | bool

#: What Python values each type of JSON has; true and false are no numbers.
TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": lambda value: _is_number(value),
    "integer": lambda value: _is_number(value) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
#: Keywords that only describe.
WORDS = {
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions", "format",
    "deprecated", "readOnly", "writeOnly",
}  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal in JSON, where 1 equals 1.0 but not true."""
    if _is_number(first) and _is_number(second):
        return bool(first == second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            same(value, second[key]) for key, value in first.items()
        )
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def check_schema(schema: Any, place: str = "schema") -> None:
    """Check that :func:`matches` can handle a JSON schema.

    Raises :class:`UsageError`, which names the ``place``, if not.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise UsageError(f"{place}: a schema is an object, not {json.dumps(schema)}")
    for key, value in schema.items():
        if key not in CHECKS and key not in WORDS:
            raise UsageError(
                f"{place}: the keyword {key!r} is not known; {nearest(key, sorted(CHECKS), True)}"
            )
        here = f"{place}.{key}"
        if key in ("properties", "$defs", "definitions"):
            for name, below in value.items():
                check_schema(below, f"{here}.{name}")
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            for number, below in enumerate(value):
                check_schema(below, f"{here}[{number}]")
        elif key in ("items", "not", "additionalProperties"):
            check_schema(value, here)
        elif key == "pattern":
            try:
                re.compile(value)
            except re.error as error:
                raise UsageError(f"{here}: no regular expression: {error}") from None
        elif key == "type":
            for name in [value] if isinstance(value, str) else value:
                if name not in TYPES:
                    raise UsageError(f"{here}: no type is called {name!r}")
        elif key == "$ref" and not str(value).startswith("#"):
            raise UsageError(
                f"{here}: only parts of the same schema ('#/...') are read"
            )


def matches(value: Any, schema: Schema, root: Schema) -> bool:
    """Return whether ``value``, as parsed from JSON, conforms to ``schema``.

    ``root``: the whole schema, in which references (``$ref``) are looked up.
    """
    if isinstance(schema, bool):
        return schema
    return all(
        CHECKS[key](value, limit, schema, root)
        for key, limit in schema.items()
        if key in CHECKS
    )


def _reference(value: Any, path: str, schema: Schema, root: Schema) -> bool:
    part: Any = root
    for key in filter(None, path.lstrip("#").split("/")):
        name = key.replace("~1", "/").replace("~0", "~")
        if not isinstance(part, Mapping) or name not in part:
            raise UsageError(f"the schema has no part {path!r}")
        part = part[name]
    return matches(value, part, root)


def _properties(value: Any, limit: Any, schema: Any, root: Schema) -> bool:
    return not isinstance(value, dict) or all(
        matches(value[key], below, root) for key, below in limit.items() if key in value
    )


def _additional(value: Any, limit: Any, schema: Any, root: Schema) -> bool:
    known = schema.get("properties", {})
    return not isinstance(value, dict) or all(
        matches(other, limit, root) for key, other in value.items() if key not in known
    )


def _items(value: Any, limit: Any, schema: Any, root: Schema) -> bool:
    first = len(schema.get("prefixItems", ()))
    return not isinstance(value, list) or all(
        matches(item, limit, root) for item in value[first:]
    )


def _first_items(value: Any, limit: Any, schema: Any, root: Schema) -> bool:
    return not isinstance(value, list) or all(
        matches(item, below, root) for item, below in zip(value, limit, strict=False)
    )


def _is_multiple(value: Any, step: float) -> bool:
    if isinstance(value, int) and isinstance(step, int):
        return value % step == 0
    quotient = value / step
    return isclose(quotient, round(quotient), rel_tol=1e-9)


def _all_differ(values: Sequence[Any]) -> bool:
    texts = [json.dumps(_plain(value), sort_keys=True) for value in values]
    return len(set(texts)) == len(texts)


def _plain(value: Any) -> Any:
    """Write equal numbers alike: 1.0 as 1."""
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _of(
    kind: Callable[[Any], bool], check: Callable[[Any, Any], bool]
) -> Callable[[Any, Any, Any, Schema], bool]:
    """Return a check of values of one kind, which all others pass."""
    return lambda value, limit, schema, root: not kind(value) or check(value, limit)


_OBJECT, _ARRAY, _STRING = TYPES["object"], TYPES["array"], TYPES["string"]
#: The check of each keyword, which gets the value, the keyword's own value, its schema and the whole schema.
CHECKS: dict[str, Callable[[Any, Any, Any, Schema], bool]] = {
    "type": lambda value, limit, schema, root: any(
        TYPES[name](value) for name in ([limit] if isinstance(limit, str) else limit)
    ),
    "enum": lambda value, limit, schema, root: any(same(value, x) for x in limit),
    "const": lambda value, limit, schema, root: same(value, limit),
    "anyOf": lambda value, limit, schema, root: any(matches(value, s, root) for s in limit),
    "allOf": lambda value, limit, schema, root: all(matches(value, s, root) for s in limit),
    "oneOf": lambda value, limit, schema, root: sum(matches(value, s, root) for s in limit) == 1,
    "not": lambda value, limit, schema, root: not matches(value, limit, root),
    "$ref": _reference,
    "properties": _properties,
    "additionalProperties": _additional,
    "required": _of(_OBJECT, lambda value, keys: all(key in value for key in keys)),
    "minProperties": _of(_OBJECT, lambda value, limit: len(value) >= limit),
    "maxProperties": _of(_OBJECT, lambda value, limit: len(value) <= limit),
    "items": _items,
    "prefixItems": _first_items,
    "minItems": _of(_ARRAY, lambda value, limit: len(value) >= limit),
    "maxItems": _of(_ARRAY, lambda value, limit: len(value) <= limit),
    "uniqueItems": _of(_ARRAY, lambda value, limit: not limit or _all_differ(value)),
    "minLength": _of(_STRING, lambda value, limit: len(value) >= limit),
    "maxLength": _of(_STRING, lambda value, limit: len(value) <= limit),
    "pattern": _of(_STRING, lambda value, pattern: bool(re.search(pattern, value))),
    "minimum": _of(_is_number, lambda value, limit: value >= limit),
    "maximum": _of(_is_number, lambda value, limit: value <= limit),
    "exclusiveMinimum": _of(_is_number, lambda value, limit: value > limit),
    "exclusiveMaximum": _of(_is_number, lambda value, limit: value < limit),
    "multipleOf": _of(_is_number, _is_multiple),
}  # fmt: skip
