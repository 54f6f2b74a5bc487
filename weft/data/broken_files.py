"""Files and rows of others, whose faults are said in one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from weft.errors import WeftError


@contextmanager
def readable(name: str, what: str) -> Iterator[None]:
    """Convert any exception inside the context to a :class:`WeftError`: it says that the file or data called ``name``
    cannot be read as ``what``.

    ``what`` is a format in words, such as "an image". A :class:`WeftError` passes unchanged.
    """
    try:
        yield
    except WeftError:
        raise
    except Exception as error:  # libraries raise nearly every kind for broken files
        cause = str(error).partition("\n")[0].rstrip(":") or type(error).__name__
        raise WeftError(f"{name} cannot be read as {what}: {cause}") from None


def worded(name: str, row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return the text in the first of ``columns`` that has a value in ``row``; an empty text if none has.

    ``name``: what errors call the row. Raises :class:`WeftError` if the value is a list or an object.
    """
    column = next((each for each in columns if row.get(each) is not None), "")
    value = row.get(column, "")
    if isinstance(value, list | dict):
        raise WeftError(
            f"{name} has several values of {column!r}; give one text for each image"
        )
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
