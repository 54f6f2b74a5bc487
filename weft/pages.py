"""Weft's pages: Jinja templates that share one frame (``page.html``) and become one file that works offline."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import WeftError, why_unwritten

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def templates() -> "Environment":
    """Return the Jinja environment of page templates, which escapes HTML in values.

    A template's name is its path in the package, such as ``observe/run_page.html``.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("weft", package_path="")
    return Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, **values: Any) -> str:
    """Return the page of ``template`` (such as ``observe/run_page.html``) filled with ``values``."""
    return templates().get_template(template).render(values)


def write(path: Path, page: str | bytes, option: str) -> Path:
    """Write ``page``, a text or its bytes in UTF-8, to the file ``path``, create missing folders, and return the path.

    ``option``: the command's option that names the file, for the error line.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(page if isinstance(page, bytes) else page.encode())
    except OSError as error:
        raise WeftError(
            f"cannot write {option} {path}: {why_unwritten(error, 'name another file')}"
        ) from None
    return path
