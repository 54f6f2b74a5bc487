"""Writes JSON whose author is a model or a client: it may say what UTF-8 or JSON itself cannot."""

import json
from typing import Any

from weft.data.chat.marks import map_json
from weft.encodable import encodable


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
