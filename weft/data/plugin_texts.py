"""Read the documents of a plugin's data set, and tell by a digest when they may have changed."""

import inspect
from collections.abc import Iterator
from pathlib import Path

from weft.cache import digest
from weft.data.placed_text import PlacedText
from weft.encodable import encodable
from weft.errors import WeftError
from weft.paths import home_path
from weft.plugins import blame_plugin, call
from weft.recipe import Source
from weft.registry import find


def plugin_documents(source: Source) -> Iterator[PlacedText]:
    """Yield the documents of a plugin's data set. Raises :class:`WeftError` for a document that is not a text."""
    plugin = find("dataset", source.kind)
    given = source.path and str(home_path(source.path))
    with blame_plugin(str(plugin)):
        for number, text in enumerate(call(plugin, source.settings)(given), 1):
            if not isinstance(text, str):
                raise WeftError(
                    f"{plugin}: document {number} is {type(text).__name__}, not a text"
                )
            yield PlacedText(Path(given or source.kind), number, encodable(text))


def plugin_fingerprint(source: Source) -> str:
    """Return a digest that changes when a plugin's data set may have changed.

    It covers the settings and the size and time of last change of files: the plugin's module, and all files at
    ``path``. Secrets in addresses count too, as two documents may differ by a query alone.
    """
    code = inspect.getsourcefile(
        inspect.unwrap(find("dataset", source.kind).implementation)
    )
    given = home_path(source.path) if source.path else None
    paths = [Path(code)] if code else []
    if given is not None and given.exists():
        paths += (
            [given]
            if given.is_file()
            else sorted(p for p in given.rglob("*") if p.is_file())
        )
    seen = [(str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    return digest(source.kind, source.path, source.settings, seen)
