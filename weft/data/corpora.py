"""Corpora: every kind of source becomes one string per document, always in the same order."""

from __future__ import annotations

import glob
import gzip
import importlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from weft.data.cache import digest
from weft.errors import WeftError, nearest
from weft.recipe import Source

#: Folders of the standard library that are not the standard library's own code.
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz"), "parquet": (".parquet",), "tokens": (".bin",), "stdlib": (".py",)}


def documents(source: Source) -> Iterator[str]:
    """The documents of ``source`` in a deterministic order, read as a stream.

    Null fields are left out. Raises :class:`WeftError` naming the file, and the line or row, that cannot be read.
    """
    readers: dict[str, Callable[[Path, str], Iterator[str]]] = {
        "stdlib": _python,
        "text": _text,
        "jsonl": _jsonl,
        "parquet": _parquet,
    }
    if source.kind == "huggingface":
        yield from _huggingface(_folder(source), source.field)
        return
    for file in files(source):
        try:
            yield from readers[source.kind](file, source.field)
        except (OSError, EOFError) as error:
            raise WeftError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None


def files(source: Source) -> list[Path]:
    """The files of ``source``, sorted: ``path`` is a file, a folder (searched through) or a glob."""
    if source.kind == "stdlib":
        return _walk(Path(sysconfig.get_paths()["stdlib"]), source.kind, _NOT_STDLIB)
    path = Path(source.path or "").expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = _walk(path, source.kind)
    elif glob.has_magic(str(path)):
        found = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p))
    else:
        raise WeftError(f"data source {path} does not exist; set 'path' to a file, a folder or a glob")
    if not found:
        wanted = " or ".join(_SUFFIXES.get(source.kind, ())) or source.kind
        raise WeftError(f"data source {path} matches no {wanted} file; check 'path' and 'kind'")
    return found


def fingerprint(source: Source) -> str:
    """Digest of what a source would read: kind, field, and every file's path, size and time of change."""
    stats = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files(source)]
    return digest(source.kind, source.field, stats)


def _walk(root: Path, kind: str, without: set[str] | None = None) -> list[Path]:
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in (without or ()) and not name.startswith(".")]
        wanted = (name for name in names if name.endswith(_SUFFIXES.get(kind, "")) and not name.startswith("."))
        found += [Path(folder, name) for name in wanted]
    return sorted(found)


def _python(file: Path, field: str) -> Iterator[str]:
    try:
        yield file.read_bytes().decode()
    except UnicodeDecodeError:  # a few modules declare another encoding
        return


def _text(file: Path, field: str) -> Iterator[str]:
    try:
        yield file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise WeftError(f"{file} is not UTF-8 text (byte {error.start}); leave it out with a glob in 'path'") from None


def _jsonl(file: Path, field: str) -> Iterator[str]:
    with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise WeftError(f"{file}:{number}: not valid JSON ({getattr(error, 'msg', error)})") from None
            if not isinstance(record, dict):
                raise WeftError(f"{file}:{number}: expected a JSON object, got {type(record).__name__}")
            _has(f"{file}:{number}", field, list(record))
            # JSON may hold lone surrogates, which no tokenizer can encode.
            yield from (text.encode(errors="replace").decode() for text in _strings([record[field]], file, field))


def _parquet(file: Path, field: str) -> Iterator[str]:
    arrow = _extra("pyarrow")
    try:
        with _extra("pyarrow.parquet").ParquetFile(file) as table:
            _has(str(file), field, table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                yield from _strings(batch.column(0).to_pylist(), file, field)
    except arrow.ArrowException as error:
        raise WeftError(f"cannot read {file}: {str(error).splitlines()[0]}") from None


def _huggingface(folder: Path, field: str) -> Iterator[str]:
    datasets = _extra("datasets")
    try:
        data = datasets.load_from_disk(str(folder))
    except (OSError, ValueError) as error:
        raise WeftError(f"{folder} is not a dataset saved with save_to_disk: {str(error).splitlines()[0]}") from None
    if isinstance(data, datasets.DatasetDict):
        if "train" not in data:
            raise WeftError(f"{folder} has no split 'train'; set 'path' to one of its folders: {', '.join(data)}")
        data = data["train"]
    _has(str(folder), field, data.column_names)
    for batch in data.select_columns([field]).iter(batch_size=1024):
        yield from _strings(batch[field], folder, field)


def _folder(source: Source) -> Path:
    folder = Path(source.path or "").expanduser()
    if not folder.is_dir():
        raise WeftError(f"data source {folder} does not exist; set 'path' to the folder of a saved dataset")
    return folder


def _has(where: str, field: str, fields: list[str]) -> None:
    if field not in fields:
        raise WeftError(f"{where}: no field {field!r}; set the source's 'field', {nearest(field, fields)}")


def _strings(values: list[Any], where: Path, field: str) -> Iterator[str]:
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
