"""Read texts from files of records, and from data sets that Hugging Face's ``datasets`` has saved."""

import operator
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.data.files import FilePart, read_records
from weft.data.reading import format_of
from weft.data.source_report import SourceReport
from weft.encodable import encodable
from weft.errors import WeftError, nearest
from weft.recipe import Source

#: Texts with the lines or numbers of their records.
Numbered = Iterator[tuple[int, str]]


def jsonl_texts(
    file: Path, source: Source, report: SourceReport, part: FilePart | None
) -> Numbered:
    """Yield the texts in a file of records, or in the bytes ``part``, with the numbers of their lines. ``source`` says
    which field has the text; ``report`` counts skipped records and unread fields.
    """
    wrong = report.skip if source.skips else None
    for number, record in read_records(file, wrong, part):
        try:
            if not isinstance(record, dict):
                raise WeftError(
                    f"{file}:{number}: expected a JSON object, got {type(record).__name__}"
                )
            if not is_wanted(record, source, file):
                continue
            _check_field(f"{file}:{number}", source.field, list(record))
            value = record[source.field]
            text = _text_of(value, f"{file}:{number}", source.field, report)
        except WeftError as error:
            if not source.skips:
                raise
            report.skip(error)
            continue
        report.count(
            str(name)
            for name, value in record.items()
            if name != source.field and value not in (None, "", [], {})
        )
        if text is not None:
            yield number, encodable(text)


def chat_texts(
    file: Path, source: Source, report: SourceReport, part: FilePart | None
) -> Numbered:
    """Yield ``(line, text)`` for each record of conversations, in any form, to train a tokenizer on them.

    The text joins all strings anywhere in the record. ``report`` counts skipped records. ``part`` is not used.
    """

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield encodable(value)
        elif isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                yield from texts(item)

    wrong = report.skip if source.skips else None
    for number, record in read_records(file, wrong):
        yield number, "\n".join(texts(record))


def parquet_texts(
    file: Path, source: Source, report: SourceReport, part: FilePart | None
) -> Numbered:
    """Yield the texts in a Parquet file, or in the row groups ``part``, with the numbers of their rows. ``source`` says
    which column has the text; ``report`` counts skipped rows and unread columns.
    """
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        every = range(table.num_row_groups)
        groups = list(every[part.start : part.end] if part else every)
        rows = sum(table.metadata.row_group(group).num_rows for group in groups)
        _count_columns(report, file, source, table.schema_arrow.names, rows)
        row = part.first if part else 1
        for name in source.where:
            _check_field(str(file), name, table.schema_arrow.names, "where")
        columns = list(dict.fromkeys([source.field, *source.where]))
        for batch in table.iter_batches(1024, groups, columns=columns):
            values = batch.column(source.field).to_pylist()
            numbered = _numbered(values, row, str(file), source.field, report)
            if source.where:
                wanted = _wanted_rows(batch, source)
                numbered = (pair for pair in numbered if wanted[pair[0] - row])
            yield from numbered
            row += len(values)


def is_wanted(record: Mapping[str, Any], source: Source, file: Path) -> bool:
    """Return whether the fields of a record of ``file`` have the values that the setting ``where`` of ``source``
    demands.
    """
    # the cells of CSV and TSV are texts, also of numbers
    same = _is_text_of if format_of(file) in (".csv", ".tsv") else operator.eq
    return all(same(record.get(name), value) for name, value in source.where.items())


def _is_text_of(cell: Any, wanted: str | bool | int | float) -> bool:
    """Return whether ``cell``, a cell of CSV or TSV, has the value that ``where`` asks for."""
    if not isinstance(cell, str) or isinstance(wanted, str):
        return bool(cell == wanted)
    if isinstance(wanted, bool):
        return cell.strip().lower() == str(wanted).lower()
    for number in (int, float):  # a float has not all digits of a large integer
        with suppress(ValueError):
            return bool(number(cell) == wanted)
    return False


def _wanted_rows(batch: Any, source: Source) -> list[bool]:
    """Return for each row of an Arrow batch whether the row has the values that ``where`` asks for."""
    columns = {name: batch.column(name).to_pylist() for name in source.where}
    return [
        all(columns[name][row] == value for name, value in source.where.items())
        for row in range(batch.num_rows)
    ]


def huggingface_texts(
    folder: Path, source: Source, report: SourceReport, part: FilePart | None
) -> Numbered:
    """Yield ``(row, text)`` of a data set that ``datasets`` has saved in ``folder``, with row numbers from 1.

    If the data set has splits, only 'train' is read, and ``report`` notes the others. ``part`` is not used. Raises
    :class:`WeftError` if ``folder`` holds no data set, or no split 'train'.
    """
    import datasets

    try:
        data = datasets.load_from_disk(str(folder))
    except FileNotFoundError:
        raise WeftError(
            f"{folder} is not a dataset from save_to_disk; set 'path' to the folder of one"
        ) from None
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise WeftError(
                f"{folder} has no split 'train'; set 'path' to one of its folders: {', '.join(data)}"
            )
        report.left = tuple(folder / name for name in data if name != "train")
        data = data["train"]
    _count_columns(report, folder, source, data.column_names, len(data))
    row = 1
    for batch in data.select_columns([source.field]).iter(batch_size=1024):
        values = batch[source.field]
        yield from _numbered(values, row, str(folder), source.field, report)
        row += len(values)


def _numbered(
    values: list[Any], first: int, where: str, field: str, report: SourceReport
) -> Numbered:
    """Yield the texts among ``values`` with their numbers, of which the first is ``first``."""
    for number, value in enumerate(values, first):
        text = _text_of(value, where, field, report)
        if text is not None:
            yield number, text


def _count_columns(
    report: SourceReport, path: Path, source: Source, names: list[str], rows: int
) -> None:
    _check_field(str(path), source.field, names)
    report.records += rows
    report.unread.update({name: rows for name in names if name != source.field})


def _check_field(
    where: str, field: str, fields: list[str], setting: str = "field"
) -> None:
    """Raise :class:`WeftError`, which names the place ``where``, if a record with ``fields`` has no ``field``.

    ``setting``: the setting of the source that names it.
    """
    if field not in fields:
        raise WeftError(
            f"{where}: no field {field!r}; set the source's {setting!r}, {nearest(field, fields)}"
        )


def _text_of(value: Any, where: str, field: str, report: SourceReport) -> str | None:
    """Return the text that is the value of ``field``, or None if there is no value, which ``report`` counts.

    Raises :class:`WeftError`, which names the place ``where``, for a value that is no text.
    """
    if value is None:
        report.empty += 1
    elif not isinstance(value, str):
        kind = type(value).__name__
        raise WeftError(
            f"{where}: field {field!r} holds {kind}, not text; set the source's 'field'"
        )
    return value
