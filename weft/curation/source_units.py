"""The units in which a pipeline's sources are read: a few small files, or a part of a large one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from weft.curation.document_files import arrow
from weft.curation.documents import Documents
from weft.data.corpora import decode_file, read_documents
from weft.data.files import FilePart, format_of, read_records
from weft.data.reading import DOWNLOADS, PACKED, file_state, open_file, reading
from weft.data.record_texts import is_wanted
from weft.data.source_kinds import documents_of
from weft.data.source_report import SourceReport
from weft.encodable import encodable
from weft.errors import UsageError, WeftError, nearest
from weft.paths import home_path
from weft.recipe import Source

#: Where the pipeline does not say into how many shards its sources are divided: bytes of a shard at most and at least,
#: and how many there are at least, so that processes have something to do.
SHARD, LEAST, FEWEST = 2**26, 2**20, 8
#: Kinds of sources whose files are read one by one; the others are a stream of texts.
_PLAIN = ("text", "stdlib")
_RECORDS = ("jsonl", "parquet")
#: Columns of the files that a pipeline writes, which a column of a source must not hide.
_RESERVED = {"id", "text"}


@dataclass(frozen=True)
class UnitFile:
    """A file, or a part of one, that a task reads.

    Attributes:
        ``path``: the file.
        ``name``: its name in the ids of documents, which does not depend on where the source's folder is.
        ``size``, ``changed``: bytes of the file, and the time of its last change in nanoseconds.
        ``start``, ``stop``: the part, as bytes of JSON Lines or rows of Parquet; ``stop`` is 0 for a whole file.
        ``first``: number of the part's first line, from 1.
    """

    path: str
    name: str
    size: int
    changed: int
    start: int = 0
    stop: int = 0
    first: int = 1


@dataclass(frozen=True)
class SourceUnit:
    """The part of a source that one task reads: one or more files, or parts of a file.

    ``source``: index of the source. ``label``: the source's name in ids. ``files``: the files; empty for a source that
    is read as a stream.
    """

    source: int
    label: str
    files: tuple[UnitFile, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the unit as values that JSON can hold; the inverse is :meth:`from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> SourceUnit:
        """Build a unit from the JSON values that :meth:`as_json` returned."""
        files = tuple(UnitFile(**file) for file in values["files"])
        return SourceUnit(values["source"], values["label"], files)


def source_labels(sources: Sequence[Source]) -> list[str]:
    """Return a short name for each source, all different: ``name``, or else its file or folder, or else its kind."""
    labels: list[str] = []
    for source in sources:
        path = home_path(source.shown)
        name = path.name if source.path and not set(path.name) & set("*?[") else ""
        label = os.fsencode((source.name or name or source.kind).replace(":", "-"))
        labels.append(_new_label(label.decode(errors="backslashreplace"), labels))
    return labels


def _new_label(label: str, taken: Sequence[str]) -> str:
    """Return ``label``, with the first number from 2 behind it that makes it another one than those ``taken``."""
    numbered = (f"{label}~{number}" for number in count(2))
    return next(name for name in chain([label], numbered) if name not in taken)


def shard_bytes(sources: Sequence[Source], shards: int) -> int:
    """Return how many bytes of the files of ``sources`` a shard should have, so that there are about ``shards`` shards.

    If ``shards`` is 0, the number follows from the size: about :data:`FEWEST` shards, as long as each has between
    :data:`LEAST` and :data:`SHARD` bytes.
    """
    sizes = [file.size for source in sources for file in _files_of(source)]
    each = max(1, -(-sum(sizes) // (shards or FEWEST)))
    return each if shards else min(SHARD, max(LEAST, each))


def source_units(sources: Sequence[Source], most: int) -> list[SourceUnit]:
    """Return the units of all sources, in the order of their documents. ``most``: bytes that a unit should not exceed.

    Raises :class:`UsageError` for a source without texts, and :class:`WeftError` for one without files.
    """
    units: list[SourceUnit] = []
    for number, (source, label) in enumerate(
        zip(sources, source_labels(sources), strict=True)
    ):
        if source.kind in ("tokens", "preference", "feedback"):
            raise UsageError(
                f"sources[{number}]: kind = {source.kind!r} has no documents of text; name the texts themselves"
            )
        if source.kind not in (*_PLAIN, *_RECORDS):
            units.append(SourceUnit(number, label))
            continue
        held: list[UnitFile] = []
        for file in _files_of(source):
            parts = _parts_of(file, source, most)
            if len(parts) > 1 or sum(f.size for f in held) + file.size > most:
                units += [SourceUnit(number, label, tuple(held))] if held else []
                held = []
            if len(parts) > 1:
                units += [SourceUnit(number, label, (part,)) for part in parts]
            else:
                held += parts
        units += [SourceUnit(number, label, tuple(held))] if held else []
    return units


def _files_of(source: Source) -> list[UnitFile]:
    if source.kind not in (*_PLAIN, *_RECORDS):
        return []
    paths = documents_of(source).read
    root = _root(source, paths)
    files = []
    for path in paths:
        size, changed = file_state(path)
        given = (path.relative_to(root) if root else path).as_posix()
        # a name of bytes that are no UTF-8 is told by their numbers
        name = os.fsencode(given).decode(errors="backslashreplace")
        files.append(UnitFile(str(path), name, size, changed))
    return files


def _root(source: Source, paths: Sequence[Path]) -> Path | None:
    """Return the folder below which all files of a source are."""
    given = home_path(source.path) if source.path else None
    if given is not None and given.is_dir():
        return given
    root = paths[0].parent
    while not all(path.is_relative_to(root) for path in paths):
        root = root.parent
    return root


def _parts_of(file: UnitFile, source: Source, most: int) -> list[UnitFile]:
    """Divide a file into parts of about ``most`` bytes where its format has places to divide it at."""
    path = Path(file.path)
    if file.size <= most or DOWNLOADS in path.parts:  # what is elsewhere is whole
        return [file]
    if source.kind == "parquet":
        return _row_parts(file, -(-file.size // most))
    packed = path.name.lower().endswith(PACKED)
    if source.kind == "jsonl" and format_of(path) in (".jsonl", ".ndjson"):
        return [file] if packed else _line_parts(file, most)
    return [file]


def _row_parts(file: UnitFile, parts: int) -> list[UnitFile]:
    with reading(Path(file.path), "parquet"):
        rows = arrow().parquet.read_metadata(file.path).num_rows
    step = max(1, -(-rows // parts))
    return [
        UnitFile(file.path, file.name, file.size, file.changed, start, min(start + step, rows))
        for start in range(0, rows, step)
    ]  # fmt: skip


def _line_parts(file: UnitFile, most: int) -> list[UnitFile]:
    """Divide at the first line that begins after every ``most`` bytes."""
    parts: list[UnitFile] = []

    def add(start: int, stop: int, first: int) -> None:
        parts.append(
            UnitFile(file.path, file.name, file.size, file.changed, start, stop, first)
        )

    start, first, position = 0, 1, 0
    with open(file.path, "rb") as stream:
        for line, text in enumerate(stream, 1):
            position += len(text)
            if position - start >= most:
                add(start, position, first)
                start, first = position, line + 1
    if start < position:
        add(start, position, first)
    return parts


def read_unit(
    unit: SourceUnit, source: Source, most: int, report: SourceReport
) -> Iterator[Documents]:
    """Yield the documents of ``unit``, a part of ``source``, about ``most`` bytes of text at a time.

    Fields of records beside the text become columns. ``report`` counts records that are skipped or have no text. Raises
    :class:`WeftError`, which names the file and the line, for what cannot be read.
    """
    ids: list[str] = []
    texts: list[str] = []
    rows: list[dict[str, Any]] = []
    held = 0
    for name, text, row in _documents_in(unit, source, report):
        ids.append(f"{unit.label}:{name}")
        texts.append(text)
        rows.append(row)
        held += len(text)
        if held > most:
            yield Documents(ids, texts, _as_columns(rows))
            ids, texts, rows, held = [], [], [], 0
    for file in unit.files:
        with reading(Path(file.path), source.kind):
            state = file_state(Path(file.path))
        if state != (file.size, file.changed):
            raise WeftError(
                f"{file.path} has changed while it was read; run the same command again when it is complete"
            )
    if ids:
        yield Documents(ids, texts, _as_columns(rows))


def _as_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {
        f"source_{name}" if name in _RESERVED else name: [row.get(name) for row in rows]
        for name in names
    }


Row = tuple[str, str, dict[str, Any]]  # name, text, other fields


def _documents_in(
    unit: SourceUnit, source: Source, report: SourceReport
) -> Iterator[Row]:
    if not unit.files:
        for number, text in enumerate(read_documents(source, report), 1):
            yield f"#{number}", text, {}
    for file in unit.files:
        path = Path(file.path)
        with reading(path, source.kind):
            if source.kind in _PLAIN:
                # a few modules of Python declare another encoding
                lenient = source.kind == "stdlib"
                with open_file(path) as stream:
                    content = stream.read()
                decoded = decode_file(path, content, source, report, lenient)
                if decoded is not None:
                    yield file.name, decoded, {}
                continue
            yield from _record_rows(path, file, source, report)


def _record_rows(
    path: Path, file: UnitFile, source: Source, report: SourceReport
) -> Iterator[Row]:
    """Yield the documents of a file of records."""
    records = _parquet(file) if source.kind == "parquet" else _json(file, report, source)  # fmt: skip
    for number, record in records:
        if isinstance(record, dict) and not is_wanted(record, source, path):
            continue
        try:
            text = _text_of(record, source.field, f"{path}:{number}")
        except WeftError as error:
            if not source.skips:
                raise
            report.skip(error)
            continue
        report.records += 1
        if text is None:
            report.empty += 1
            continue
        others = {str(k): v for k, v in record.items() if k != source.field}
        yield f"{file.name}#{number}", encodable(text), _encodable_values(others)


def _encodable_values(value: Any) -> Any:
    """Return a value of JSON whose texts can be encoded, as the text of the document can."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {encodable(str(k)): _encodable_values(v) for k, v in value.items()}
    return [*map(_encodable_values, value)] if isinstance(value, list) else value


def _text_of(record: Any, field: str, where: str) -> str | None:
    if not isinstance(record, dict):
        raise WeftError(f"{where}: expected a JSON object, got {type(record).__name__}")
    if field not in record:
        raise WeftError(
            f"{where}: no field {field!r}; set the source's 'field', {nearest(field, list(record))}"
        )
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise WeftError(
            f"{where}: field {field!r} holds {type(text).__name__}, not text; set the source's 'field'"
        )
    return text


def _parquet(file: UnitFile) -> Iterator[tuple[int, Any]]:
    number = 0
    with arrow().parquet.ParquetFile(file.path) as table:
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            end = file.stop or number + rows
            if number + rows <= file.start or number >= end:
                number += rows
                continue
            for batch in table.iter_batches(batch_size=1024, row_groups=[group]):
                for record in batch.to_pylist():
                    if file.start <= number < end:
                        yield number + 1, record
                    number += 1


def _json(
    file: UnitFile, report: SourceReport, source: Source
) -> Iterator[tuple[int, Any]]:
    wrong = report.skip if source.skips else None
    part = FilePart(file.start, file.stop, file.first) if file.stop else None
    return read_records(Path(file.path), wrong, part)
