"""Reads JSON that people, programs and models bring: it may be nested without end, or give a key twice."""

import json
from collections.abc import Sequence
from typing import Any

#: Levels of lists and objects at most: templates and checks go down into each with Python's own stack.
MOST_LEVELS = 128


class RefusedJson(ValueError):
    """Error of a text that is valid JSON, and is not taken all the same."""


class TooDeep(RefusedJson):
    """Error of a JSON value with more than :data:`MOST_LEVELS` levels of lists and objects."""

    def __init__(self) -> None:
        super().__init__(
            f"nested too deeply (JSON of {MOST_LEVELS} levels at most is read)"
        )


class RepeatedKey(RefusedJson):
    """Error of a JSON object that gives a key twice. Parsers keep the last value, so the others would be lost.

    ``key``: the key.
    """

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:80]!r} is given twice; leave one of both out")
        self.key = key


def parse_json(text: str) -> Any:
    """Parse ``text`` and return the value. Raises ValueError for a text that is no JSON, or that has more than
    :data:`MOST_LEVELS` levels of lists and objects. Of a key that is given twice, the last value counts.
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
        raise TooDeep from None
    _check_levels(value)
    return value, end


def parse_record(text: str | bytes) -> Any:
    """Parse ``text``, JSON to learn from, and return the value. Raises ValueError as :func:`parse_json` does, and
    :class:`RepeatedKey` for an object that gives a key twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_with_each_key_once)
    except RecursionError:
        raise TooDeep from None
    _check_levels(value)
    return value


def parse_finite(text: str) -> Any:
    """Parse ``text`` as :func:`parse_record` does. Raises ValueError also for NaN and infinite numbers, which JSON does
    not have.
    """
    value = parse_record(text)
    check_numbers(value)
    return value


def check_numbers(value: Any) -> None:
    """Raise ValueError if a JSON value has NaN or an infinite number in it."""
    try:
        json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        raise RefusedJson("it has a number that is not finite") from None


def repeated_keys(text: bytes) -> list[str]:
    """Return the keys that an object of the JSON ``text`` gives twice, sorted. ``text`` must be valid JSON."""
    repeated: set[str] = set()

    def note(pairs: Sequence[tuple[str, Any]]) -> None:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            repeated.update(key for key in keys if keys.count(key) > 1)

    # numbers are left as they are: Python refuses integers of many digits
    json.loads(text, object_pairs_hook=note, parse_int=str, parse_float=str)
    return sorted(repeated)


def _with_each_key_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise RepeatedKey(next(key for key in keys if keys.count(key) > 1))
    return value


def _check_levels(value: Any) -> None:
    layer = _branches([value])
    for _ in range(MOST_LEVELS):
        layer = [inner for outer in layer for inner in _branches(outer)]
        if not layer:
            return
    raise TooDeep


def _branches(value: list[Any] | dict[str, Any]) -> list[Any]:
    """Return the lists and objects among the elements of a list or the values of an object."""
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, (list, dict))]
