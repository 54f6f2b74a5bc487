"""Read the records in files of text: JSON Lines, JSON, CSV and TSV."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from weft.data.json_text import RefusedJson, parse_record
from weft.data.reading import JSON_LINES, FilePart, format_of, open_file
from weft.errors import WeftError


def read_text_records(
    file: Path, wrong: Callable[[WeftError], None] | None, part: FilePart | None
) -> Iterator[tuple[int, Any]]:
    """Yield the records of a file, each as a pair of its line number and the record.

    ``part``: the bytes of a file in JSON Lines that are read; None: the whole file. ``wrong``: called with the error
    for a line that is no record; None: the error is raised.
    """
    form = format_of(file)
    if form in (".csv", ".tsv"):
        yield from _table(file, wrong)
    elif form == ".json":
        with open_file(file) as stream:
            text = stream.read()
        if _is_lines(text):
            yield from _lines(io.BytesIO(text), file, wrong)
        else:
            value = _unwrapped(_parsed(text, str(file)))
            yield from enumerate(value if isinstance(value, list) else [value], 1)
    else:
        with open_file(file) as stream:
            if part is None:
                yield from _lines(stream, file, wrong)
            else:
                yield from _lines(_lines_of(stream, part), file, wrong, part.first)


def _lines_of(stream: IO[bytes], part: FilePart) -> Iterator[bytes]:
    """Yield the lines that begin in a part of a file."""
    at = stream.seek(part.start)
    while at < part.end and (line := stream.readline()):
        at += len(line)
        yield line


def _lines(
    stream: Iterable[bytes],
    file: Path,
    wrong: Callable[[WeftError], None] | None,
    first: int = 1,
) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, first):
        if not line.strip():
            continue
        if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError("not UTF-8")  # of which 'reading' says what it is
        try:
            record = _parsed(line, f"{file}:{number}")
        except WeftError as error:
            if number == 1 and format_of(file) not in (*JSON_LINES, ".json"):
                error = WeftError(f"{error}; kind = 'text' reads plain text")
            if wrong is None:
                raise error from None
            wrong(error)
        else:
            yield number, record


def _is_lines(text: bytes) -> bool:
    """Return whether the text of a ``.json`` file is JSON Lines: its first line is an object, and not all of it."""
    first, _, rest = text.strip().partition(b"\n")
    if not rest or not first.strip().endswith((b"}", b"]")):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _unwrapped(value: Any) -> Any:
    """Return the list of records of an object that has nothing else, under a name that data sets give it."""
    if (
        isinstance(value, dict)
        and len(value) == 1
        and {*value} <= {"data", "rows", "records", "examples", "train"}
    ):
        (inner,) = value.values()
        return (
            inner
            if isinstance(inner, list)
            and all(isinstance(record, dict) for record in inner)
            else value
        )
    return value


def _table(
    file: Path, wrong: Callable[[WeftError], None] | None
) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yield the rows of a table under the names of its first line. An empty cell is nothing."""
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(open_file(file), "utf-8-sig", newline="") as text:
        head = text.readline()
        mark = "\t" if format_of(file) == ".tsv" else max(",;\t", key=head.count)
        names = next(csv.reader([head], delimiter=mark), [])
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise WeftError(
                f"{file}:1: two columns are called {twice[0]!r}; the first line names each column"
            )
        reader, before = csv.reader(text, delimiter=mark), 0
        for cells in reader:
            number, before = before + 2, reader.line_num
            if not cells:
                continue
            if len(cells) == len(names):
                yield (
                    number,
                    {
                        name: cell or None
                        for name, cell in zip(names, cells, strict=True)
                    },
                )
                continue
            error = WeftError(
                f"{file}:{number}: {len(cells)} cells under the {len(names)} names of the first line; put cells with "
                f"{'a tab' if mark == chr(9) else repr(mark)} in them in double quotes"
            )
            if wrong is None:
                raise error
            wrong(error)


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_record(text)
    except RefusedJson as error:
        raise WeftError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        raise WeftError(
            f"{where}: not valid JSON ({error.msg} at character {error.pos + 1})"
        ) from None
    except ValueError as error:
        raise WeftError(f"{where}: not valid JSON ({error})") from None
