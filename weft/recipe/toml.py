"""TOML files as nested dictionaries: read, with one line for what is wrong with them, and written."""

import json
import tomllib
from pathlib import Path
from typing import Any

from weft.errors import UsageError, WeftError


def read_toml(path: Path, name: str = "") -> dict[str, Any]:
    """The tables of a TOML file in UTF-8, with or without a byte order mark; errors call it ``name``."""
    name = name or str(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not text in UTF-8 (byte {error.start}); save it in that encoding"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not valid TOML: {error}") from None
    except OSError as error:
        raise WeftError(f"cannot read {name}: {error.strerror}") from None


def write_toml(tree: dict[str, Any], digits: int | None = None, path: str = "") -> str:
    """``tree`` as text: numbers, strings, lists and tables; ``digits``: of floats, all that they have if None.

    ``path`` is the name of the table that ``tree`` stands in.
    """
    lines = [f"[{path}]"] if path else []
    lines += [
        f"{_key(k)} = {toml_value(v, digits)}"
        for k, v in tree.items()
        if not isinstance(v, dict)
    ]
    tables = [
        write_toml(v, digits, f"{path}.{_key(k)}" if path else _key(k))
        for k, v in tree.items()
        if isinstance(v, dict)
    ]
    return "\n".join([*lines, *(f"\n{table}" for table in tables)]) + "\n" * (not path)


def _key(text: str) -> str:
    return (
        text if text.replace("_", "").replace("-", "").isalnum() else json.dumps(text)
    )


def toml_value(value: Any, digits: int | None = None) -> str:
    """One value as TOML; ``digits`` as of :func:`write_toml`."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(item, digits) for item in value) + "]"
    if isinstance(value, dict):  # within a list
        return (
            "{ "
            + ", ".join(
                f"{_key(k)} = {toml_value(v, digits)}" for k, v in value.items()
            )
            + " }"
        )
    if isinstance(value, float) and digits is not None:
        text = f"{value:.{digits}g}"
        return text if any(c in text for c in ".en") else text + ".0"
    return json.dumps(value, ensure_ascii=False)
