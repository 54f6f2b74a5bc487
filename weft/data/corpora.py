"""Read sources of text: one string per document, always in the same order."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.cache import digest
from weft.data.files import read_records
from weft.data.reading import open_file, reading
from weft.data.source_kinds import documents_of
from weft.data.source_report import SourceReport
from weft.encodable import encodable
from weft.errors import WeftError, nearest
from weft.plugins import blame_plugin, call
from weft.recipe import SOURCES, Source
from weft.registry import find


def read_documents(source: Source, report: SourceReport | None = None) -> Iterator[str]:
    """Iterate over the texts of the documents of ``source`` in a deterministic order.

    ``report`` counts unread fields and skipped records. Raises :class:`WeftError`, which names the unreadable file.
    """
    report = report or SourceReport()
    if source.kind not in SOURCES:
        yield from _plugin(source)
        return
    readers = {
        "stdlib": _text,
        "text": _text,
        "jsonl": _jsonl,
        "chat": _words,
        "parquet": _parquet,
        "huggingface": _huggingface,
    }
    chosen = [Path(source.path or "").expanduser()]
    for path in chosen if source.kind == "huggingface" else documents_of(source).read:
        with reading(path, source.kind):
            yield from readers[source.kind](path, source, report)


def _plugin(source: Source) -> Iterator[str]:
    plugin = find("dataset", source.kind)
    given = source.path and str(Path(source.path).expanduser())
    with blame_plugin(str(plugin)):
        for number, text in enumerate(call(plugin, source.settings)(given), 1):
            if not isinstance(text, str):
                raise WeftError(
                    f"{plugin}: document {number} is {type(text).__name__}, not a text"
                )
            yield encodable(text)


def unread_files(source: Source) -> tuple[str, ...]:
    """Return a tuple with one line for the user, which names the files in a source's folder that are not read.

    The tuple is empty if all files are read.
    """
    if source.kind not in SOURCES or source.kind in ("huggingface", "tokens"):
        return ()
    return SourceReport(left=tuple(documents_of(source).left)).lines()


def source_fingerprint(source: Source) -> str:
    """Return a digest of a source that changes with its files and with the settings by which they are read.

    Of every file the path, size and modification time count.
    """
    if source.kind not in SOURCES:
        return _plugin_fingerprint(source)
    read = documents_of(source).read
    stats = [
        (str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns)
        for file in read
    ]
    how = (
        [source.columns, source.roles, source.on_error]
        if source.columns or source.roles or source.skips
        else []
    )
    return digest(source.kind, source.field, stats, *how)


def _plugin_fingerprint(source: Source) -> str:
    """Of a plugin's data set what can be seen: its module's code, its settings, and what ``path`` leads to."""
    code = inspect.getsourcefile(
        inspect.unwrap(find("dataset", source.kind).implementation)
    )
    given = Path(source.path).expanduser() if source.path else None
    paths = [Path(code)] if code else []
    if given is not None and given.exists():
        paths += (
            [given]
            if given.is_file()
            else sorted(p for p in given.rglob("*") if p.is_file())
        )
    seen = [(str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    return digest(source.kind, source.path, source.settings, seen)


def _text(file: Path, source: Source, report: SourceReport) -> Iterator[str]:
    with open_file(file) as stream:
        text = stream.read()
    # A few modules of Python declare another encoding.
    yield text.decode(
        errors="replace"
        if source.kind == "stdlib" and file.suffix == ".py"
        else "strict"
    )


def _jsonl(file: Path, source: Source, report: SourceReport) -> Iterator[str]:
    for number, record in read_records(file, report.skip if source.skips else None):
        try:
            if not isinstance(record, dict):
                raise WeftError(
                    f"{file}:{number}: expected a JSON object, got {type(record).__name__}"
                )
            _has(f"{file}:{number}", source.field, list(record))
            texts = [
                *_strings(
                    [record[source.field]], f"{file}:{number}", source.field, report
                )
            ]
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
        yield from map(encodable, texts)


def _words(file: Path, source: Source, report: SourceReport) -> Iterator[str]:
    """Yield all texts of each record, whatever its form: what a tokenizer is trained on."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield encodable(value)
        elif isinstance(value, (dict, list)):
            for item in value.values() if isinstance(value, dict) else value:
                yield from texts(item)

    for _, record in read_records(file, report.skip if source.skips else None):
        yield "\n".join(texts(record))


def _parquet(file: Path, source: Source, report: SourceReport) -> Iterator[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        _count_columns(
            report, file, source, table.schema_arrow.names, table.metadata.num_rows
        )
        for batch in table.iter_batches(batch_size=1024, columns=[source.field]):
            yield from _strings(
                batch.column(0).to_pylist(), str(file), source.field, report
            )


def _huggingface(folder: Path, source: Source, report: SourceReport) -> Iterator[str]:
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
    for batch in data.select_columns([source.field]).iter(batch_size=1024):
        yield from _strings(batch[source.field], str(folder), source.field, report)


def _count_columns(
    report: SourceReport, path: Path, source: Source, names: list[str], rows: int
) -> None:
    _has(str(path), source.field, names)
    report.records += rows
    report.unread.update({name: rows for name in names if name != source.field})


def _has(where: str, field: str, fields: list[str]) -> None:
    if field not in fields:
        raise WeftError(
            f"{where}: no field {field!r}; set the source's 'field', {nearest(field, fields)}"
        )


def _strings(
    values: list[Any], where: str, field: str, report: SourceReport
) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif value is not None:
            kind = type(value).__name__
            raise WeftError(
                f"{where}: field {field!r} holds {kind}, not text; set the source's 'field'"
            )
        else:
            report.empty += 1
