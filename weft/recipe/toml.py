"""Reads TOML files as nested dictionaries, with one line for each error, and writes them."""

import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from weft.errors import UsageError, WeftError


def read_toml(path: Path, name: str = "") -> dict[str, Any]:
    """Read the TOML file ``path`` in UTF-8, with or without a byte order mark, as a nested dictionary.

    ``name``: what error lines call the file, by default its path.
    """
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


def write_toml(tree: dict[str, Any], digits: int | None = None) -> str:
    """Return the nested dictionary ``tree`` as TOML with each list on one line.

    ``digits``: significant digits to which floats are rounded; None: all digits.
    """
    rounded = tree if digits is None else _rounded(tree, digits)
    return _lists_on_a_line(tomli_w.dumps(rounded, indent=0))


def toml_value(value: Any) -> str:
    """Return ``value`` as TOML on one line, as it would be written after ``key =``."""
    # within two lists even a table is written as a value
    text = tomli_w.dumps({"": [[value]]}, indent=0)
    return _lists_on_a_line(text).removeprefix('"" = [[').removesuffix("]]\n")


def _lists_on_a_line(text: str) -> str:
    """What tomli-w has written without indent; it ends lines within lists only, as strings have theirs escaped."""
    return text.replace("[\n", "[").replace(",\n]", "]").replace(",\n", ", ")


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
