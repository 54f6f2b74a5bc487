"""Reads and writes JSON whose author is a model or a client: it may be nested without end, or say what UTF-8 cannot."""

import json
from typing import Any

from weft.data.chat.marks import map_json
from weft.encodable import encodable

#: Levels of lists and objects at most: templates and checks go down into each with Python's own stack.
MOST_LEVELS = 128


def parse_json(text: str) -> Any:
    """Parse ``text`` and return the value. Raises ValueError for a text that is no JSON, or that has more than
    :data:`MOST_LEVELS` levels of lists and objects.
    """
    value, end = parse_json_at(text, len(text) - len(text.lstrip()))
    if text[end:].strip():
        raise ValueError("text follows the JSON value")
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at index ``start`` of ``text``, and the index behind it. Raises ValueError if
    the value is incomplete or has more than :data:`MOST_LEVELS` levels of lists and objects.
    """
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except RecursionError:
        raise ValueError("the JSON value has too many levels") from None
    layer = _branches([value])
    for _ in range(MOST_LEVELS):
        layer = [inner for outer in layer for inner in _branches(outer)]
        if not layer:
            return value, end
    raise ValueError("the JSON value has too many levels")


def _branches(value: list[Any] | dict[str, Any]) -> list[Any]:
    """Return the lists and objects among the elements of a list or the values of an object."""
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, (list, dict))]


def encodable_json(value: Any) -> str:
    """Return ``value`` as JSON that UTF-8 can encode: with plain characters, or with escapes if a text in it has a lone
    surrogate, which stays as it is.
    """
    text = json.dumps(value, ensure_ascii=False)
    return text if encodable(text) == text else json.dumps(value)


def as_strict_json(value: Any) -> Any:
    """Return the JSON value ``value`` with question marks in place of lone surrogates, as a response can hold it.
    Raises ValueError if it has NaN or an infinite number, which JSON cannot say.
    """
    json.dumps(value, allow_nan=False)
    return _without_surrogates(value)


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(value)
    return map_json(_without_surrogates, value)
