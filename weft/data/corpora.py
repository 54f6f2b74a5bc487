"""Corpora: every kind of source becomes one string per document, always in the same order."""

from __future__ import annotations

import glob
import gzip
import importlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.data.cache import digest
from weft.errors import WeftError, nearest
from weft.recipe import Source

#: Folders below the standard library that are not its own code.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz"), "parquet": (".parquet",), "tokens": (".bin",), "stdlib": (".py",)}


def documents(source: Source) -> Iterator[str]:
    """The documents of ``source`` in a deterministic order, read as a stream. Null fields are left out.

    Raises :class:`WeftError` naming the file (and the line) that cannot be read.
    """
    readers = {"stdlib": _text, "text": _text, "jsonl": _jsonl, "parquet": _parquet, "huggingface": _huggingface}
    for path in [Path(source.path or "").expanduser()] if source.kind == "huggingface" else files(source):
        try:
            yield from readers[source.kind](path, source)
        except (OSError, EOFError) as error:
            raise WeftError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def files(source: Source) -> list[Path]:
    """The files of ``source``, sorted: ``path`` is a file, a folder (searched through) or a glob."""
    stdlib, suffixes = source.kind == "stdlib", _SUFFIXES.get(source.kind, ("",))
    path = Path(sysconfig.get_paths()["stdlib"] if stdlib else source.path or "").expanduser()
    found = []
    if path.is_dir():
        for folder, below, names in os.walk(path):
            below[:] = [name for name in below if not name.startswith(".") and not (stdlib and name in _NOT_STDLIB)]
            found += [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
    else:
        found = [Path(p) for p in ([path] if path.is_file() else glob.glob(str(path), recursive=True))]
    if found := sorted(file for file in found if file.is_file()):
        return found
    if not path.is_dir() and not glob.has_magic(str(path)):
        raise WeftError(f"data source {path} does not exist; set 'path' to a file, a folder or a glob")
    raise WeftError(
        f"data source {path} matches no {' or '.join(suffixes) or source.kind} file; check 'path' and 'kind'"
    )


def fingerprint(source: Source) -> str:
    """Digest of what a source would read: kind, field, and every file's path, size and time of change."""
    stats = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files(source)]
    return digest(source.kind, source.field, stats)


def _text(file: Path, source: Source) -> Iterator[str]:
    try:
        yield file.read_bytes().decode()
    except UnicodeDecodeError as error:
        if source.kind != "stdlib":  # where a few modules declare another encoding
            raise WeftError(f"{file} is not UTF-8 (at byte {error.start}); leave it out by a glob in 'path'") from None


def _jsonl(file: Path, source: Source) -> Iterator[str]:
    with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}:{number}"
            try:
                record = json.loads(line) if line.strip() else {source.field: None}
            except ValueError as error:
                raise WeftError(f"{where}: not valid JSON ({getattr(error, 'msg', error)})") from None
            if not isinstance(record, dict):
                raise WeftError(f"{where}: expected a JSON object, got {type(record).__name__}")
            _has(where, source.field, list(record))
            # JSON may hold lone surrogates, which no tokenizer can encode.
            for text in _strings([record[source.field]], where, source.field):
                yield text.encode(errors="replace").decode()


def _parquet(file: Path, source: Source) -> Iterator[str]:
    arrow = _extra("pyarrow")
    try:
        with _extra("pyarrow.parquet").ParquetFile(file) as table:
            _has(str(file), source.field, table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=1024, columns=[source.field]):
                yield from _strings(batch.column(0).to_pylist(), str(file), source.field)
    except arrow.ArrowException as error:
        raise WeftError(f"cannot read {file}: {str(error).splitlines()[0]}") from None


def _huggingface(folder: Path, source: Source) -> Iterator[str]:
    datasets = _extra("datasets")
    try:
        data = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise WeftError(f"{folder} is not a dataset from save_to_disk: {str(error).splitlines()[0]}") from None
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise WeftError(f"{folder} has no split 'train'; set 'path' to one of its folders: {', '.join(data)}")
        data = data["train"]
    _has(str(folder), source.field, data.column_names)
    for batch in data.select_columns([source.field]).iter(batch_size=1024):
        yield from _strings(batch[source.field], str(folder), source.field)


def _has(where: str, field: str, fields: list[str]) -> None:
    if field not in fields:
        raise WeftError(f"{where}: no field {field!r}; set the source's 'field', {nearest(field, fields)}")


def _strings(values: list[Any], where: str, field: str) -> Iterator[str]:
    for value in values:
        if isinstance(value, str):
            yield value
        elif value is not None:
            raise WeftError(
                f"{where}: field {field!r} holds {type(value).__name__}, not text; set the source's 'field'"
            )


def _extra(module: str) -> Any:
    """Import a heavy optional dependency only when a source needs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise WeftError(f"this source needs {name}, which is not installed; pip install 'weft[data]'") from None
