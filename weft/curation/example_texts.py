"""Examples of texts from files, each with its name and the group that it belongs to, such as a package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.data.corpora import read_documents
from weft.data.files import TABLES, format_of, read_records, select_files
from weft.data.reading import reading
from weft.data.source_kinds import documents_of
from weft.encodable import encodable
from weft.errors import UsageError, WeftError, nearest
from weft.paths import home_path
from weft.recipe import Source


class ExampleText(NamedTuple):
    """An example to train or judge a classifier with: a text with its name and its group.

    ``name``: for a text file, its path below the folder that was read; for a record, its file and line. ``group``:
    examples of one group are held out together. For a text file it is the first folder of the path or, without folders,
    the file's name without its ending. For a record it is the value of the column of groups or, without one, ``name``.
    """

    name: str
    group: str
    text: str


def read_examples(
    path: str, field: str = "text", group: str = ""
) -> Iterator[ExampleText]:
    """Yield the texts at ``path``: a file, a folder or a glob of plain text or of records, or "stdlib".

    ``field``: column of records with the text. ``group``: column of records with the group; "" for none. Raises
    :class:`WeftError`, which names the file, if one cannot be read.
    """
    if path == "stdlib" and not Path(path).exists():
        source = Source(kind="stdlib")
    else:
        source = Source(kind="text", path=path)
    root = _root(source)
    for file in _files(source):
        if format_of(file) in (*TABLES, ".json"):
            yield from _records(file, field, group)
            continue
        place = file.relative_to(root) if file.is_relative_to(root) else Path(file.name)
        name = place.parts[0] if len(place.parts) > 1 else place.stem
        # a module of Python may declare another encoding
        kind = "stdlib" if file.suffix == ".py" else "text"
        for text in read_documents(Source(kind=kind, path=str(file))):
            yield ExampleText(str(place), name, encodable(text))


def examples_of(
    paths: Sequence[str], field: str = "text", group: str = ""
) -> list[ExampleText]:
    """Return the texts at all ``paths`` (:func:`read_examples`), without empty ones.

    Raises :class:`WeftError` if no text is left.
    """
    every = [text for path in paths for text in read_examples(path, field, group)]
    texts = [example for example in every if example.text.strip()]
    if not texts:
        raise WeftError(f"there is no text at {', '.join(paths)}; give other paths")
    return texts


def _files(source: Source) -> list[Path]:
    """Return the files of plain text below a folder or, if it has none, its files of records."""
    try:
        return documents_of(source).read
    except UsageError:  # there are records only
        chosen = select_files(source).read
        return [file for file in chosen if format_of(file) in (*TABLES, ".json")]


def _root(source: Source) -> Path:
    if source.path is None:
        import sysconfig

        return Path(sysconfig.get_paths()["stdlib"])
    return home_path(source.path)


def _records(file: Path, field: str, group: str) -> Iterator[ExampleText]:
    with reading(file, "records"):
        for number, record in read_records(file):
            name = f"{file}:{number}"
            yield ExampleText(
                name,
                str(_value(record, group, name, "--group")) if group else name,
                encodable(_text(_value(record, field, name, "--field"), name)),
            )


def _value(record: Any, field: str, name: str, option: str) -> Any:
    if not isinstance(record, dict):
        raise WeftError(f"{name}: expected an object with fields, got {record!r:.40}")
    if field not in record:
        raise WeftError(
            f"{name}: no field {field!r}; set {option}, {nearest(field, list(record))}"
        )
    return record[field]


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise WeftError(
            f"{name}: the field holds {value!r:.40}, which is no text; set --field"
        )
    return value
