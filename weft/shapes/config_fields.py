"""Fields of a ``config.json``, with error lines for fields that are missing or not supported."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from weft.errors import WeftError

#: Kinds of values in words.
KINDS = {int: "whole numbers", str: "texts", list: "lists", dict: "sets of values"}


class ConfigFields(dict[str, Any]):
    """Fields of a ``config.json`` by name. ``path``: name of the file for errors."""

    def __init__(self, fields: Any, path: Path | str) -> None:
        super().__init__(fields)
        self.path = path

    def refuse(self, field: str, supported: str, value: Any = None) -> NoReturn:
        """Raise a :class:`WeftError` that says that Weft does not support the value of ``field``.

        ``supported``: the values that Weft supports, in words; ``value``: the value to report, if it is not that of
        ``field``.
        """
        value = self.get(field) if value is None else value
        raise WeftError(
            f"{self.path}: {field} = {str(value)[:60]!r} is not supported; Weft supports {supported}"
        )

    def given(self, *names: str) -> Any:
        """Return the value of the first field among ``names`` that is present and not null; None without one."""
        return next((self[name] for name in names if self.get(name) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the whole number that any of the fields ``names``, which are synonyms, states; else ``default``.

        Raises :class:`WeftError` if the fields contradict each other, if a value is no whole number, and if no field
        has a value and ``default`` is None.
        """
        given = [name for name in names if self.get(name) is not None]
        name = given[0] if given else names[0]
        value = self[name] if given else default
        if other := [another for another in given if self[another] != value]:
            self.refuse(other[0], f"that of {name}, {value}")
        self.check_complete([name] if value is None else [])
        if not isinstance(value, int) or value < 0:
            self.refuse(name, "whole numbers")
        return value

    def check_kinds(self, kinds: Mapping[type, Sequence[str]]) -> None:
        """Raise :class:`WeftError` for a field that has a value of another kind than Hugging Face writes.

        ``kinds``: names of fields by the class of their values, which may also be missing or null.
        """
        for kind, names in kinds.items():
            for name in names:
                # a bool is an int for Python alone
                if type(self.get(name)) not in (kind, type(None)):
                    self.refuse(name, KINDS[kind])

    def check_complete(self, missing: list[str]) -> None:
        """Raise :class:`WeftError` if ``missing``, the names of fields that the file lacks, is not empty."""
        if missing:
            raise WeftError(
                f"{self.path} has no {', '.join(missing)}; it is not a complete config.json"
            )


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Return the object in the JSON file ``path``.

    Raises :class:`WeftError` if the file cannot be read or has no object; ``hint``: advice at the end of the message.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        return content
    except UnicodeDecodeError:
        raise WeftError(f"cannot read {path}: it is not JSON; {hint}") from None
    except (OSError, ValueError) as error:
        raise WeftError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}; {hint}"
        ) from None
