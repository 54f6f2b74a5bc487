"""Fields of a ``config.json``, with error lines for fields that are missing or not supported."""

import json
from pathlib import Path
from typing import Any, NoReturn

from weft.errors import WeftError


class ConfigFields(dict[str, Any]):
    """Fields of a ``config.json`` by name; ``path`` names the file in errors."""

    def __init__(self, fields: Any, path: Path | str) -> None:
        super().__init__(fields)
        self.path = path

    def refuse(self, field: str, supported: str, value: Any = None) -> NoReturn:
        """Raise :class:`WeftError`: ``field`` is not supported. ``value``: its value, if it has another name."""
        value = self.get(field) if value is None else value
        raise WeftError(
            f"{self.path}: {field} = {str(value)[:60]!r} is not supported; Weft supports {supported}"
        )

    def given(self, *names: str) -> Any:
        """Return the value of the first of ``names`` that has one; None if none has."""
        return next((self[name] for name in names if self.get(name) is not None), None)

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the whole number under any of ``names``, or ``default``; raises :class:`WeftError` without one."""
        given = [name for name in names if self.get(name) is not None]
        name = given[0] if given else names[0]
        value = self[name] if given else default
        if other := [another for another in given if self[another] != value]:
            self.refuse(other[0], f"that of {name}, {value}")
        self.check_complete([name] if value is None else [])
        if not isinstance(value, int) or value < 0:
            self.refuse(name, "whole numbers")
        return value

    def check_complete(self, missing: list[str]) -> None:
        """Raise :class:`WeftError` if fields are ``missing``."""
        if missing:
            raise WeftError(
                f"{self.path} has no {', '.join(missing)}; it is not a complete config.json"
            )


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Read the object of a JSON file. Raises :class:`WeftError` with ``hint`` if the file has none."""
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
