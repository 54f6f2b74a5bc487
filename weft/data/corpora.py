"""Corpora: every kind of source becomes one string per document, always in the same order."""

import ast
import glob
import gzip
import inspect
import json
import os
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.data.cache import digest
from weft.errors import WeftError, nearest
from weft.plugins import blame_plugin, find
from weft.recipe import SOURCES, Source

#: Folders below the standard library that are not its own code.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_SUFFIXES = {
    "jsonl": (".jsonl", ".jsonl.gz"),
    "chat": (".jsonl", ".jsonl.gz", ".json", ".parquet"),
    "preference": (".jsonl", ".jsonl.gz", ".json", ".parquet"),
    "parquet": (".parquet",),
    "tokens": (".bin",),
    "stdlib": (".py",),
}


def documents(source: Source) -> Iterator[str]:
    """The documents of ``source`` as a stream, in a deterministic order; a file that cannot be read is named."""
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
    for path in [Path(source.path or "").expanduser()] if source.kind == "huggingface" else files(source):
        with reading(path, source.kind):
            yield from readers[source.kind](path, source)


def _plugin(source: Source) -> Iterator[str]:
    found = find("dataset", source.kind)
    given = source.path and str(Path(source.path).expanduser())
    with blame_plugin(str(found)):
        for number, text in enumerate(found.call(source.settings)(given), 1):
            if not isinstance(text, str):
                raise WeftError(f"{found}: document {number} is {type(text).__name__}, not a text")
            yield text.encode(errors="replace").decode()  # no tokenizer can encode lone surrogates


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """What may go wrong within is said in one line, with ``path`` and ``kind``."""
    try:
        yield
    except ImportError as error:
        raise WeftError(f"{kind} needs {error.name}, which is not installed; pip install 'weft[data]'") from None
    except (OSError, EOFError, ValueError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        raise WeftError(f"cannot read {path} as {kind}: {reason}; check 'path' and 'kind'") from None


def files(source: Source) -> list[Path]:
    """The files of ``source``, sorted: ``path`` is a file, a folder (searched through) or a glob."""
    stdlib, suffixes = source.path is None, _SUFFIXES.get(source.kind, ("",))
    suffixes = (".py",) if source.form == "docstrings" else suffixes
    path = Path(sysconfig.get_paths()["stdlib"] if stdlib else source.path or "").expanduser()
    found = [path] if path.is_file() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    if path.is_dir():
        found = []
        for folder, below, names in os.walk(path):
            below[:] = [name for name in below if not name.startswith(".") and not (stdlib and name in _NOT_STDLIB)]
            found += [Path(folder, name) for name in names if name.endswith(suffixes) and not name.startswith(".")]
    if not (found := sorted(file for file in found if file.is_file())):
        wanted = " or ".join(suffixes) or source.kind
        raise WeftError(f"no {wanted} file at data source {path}; set 'path' to a file, a folder or a glob")
    return found


def fingerprint(source: Source) -> str:
    """Digest of what a source would read: kind, field, and every file's path, size and time of change."""
    if source.kind not in SOURCES:
        return _plugin_fingerprint(source)
    stats = [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in files(source)]
    return digest(source.kind, source.field, stats)


def _plugin_fingerprint(source: Source) -> str:
    """Of a plugin's data set what can be seen: its module's code, its settings, and what ``path`` leads to."""
    code = inspect.getsourcefile(inspect.unwrap(find("dataset", source.kind).made))
    given = Path(source.path).expanduser() if source.path else None
    paths = [Path(code)] if code else []
    if given is not None and given.exists():
        paths += [given] if given.is_file() else sorted(p for p in given.rglob("*") if p.is_file())
    seen = [(str(p.absolute()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    return digest(source.kind, source.path, source.settings, seen)


def _text(file: Path, source: Source) -> Iterator[str]:
    # A few modules of the standard library declare another encoding.
    yield file.read_bytes().decode(errors="replace" if source.kind == "stdlib" else "strict")


def records(file: Path) -> Iterator[tuple[int, Any]]:
    """The records of a file, each with the number of its line: of JSON Lines, or a list in JSON, or of Parquet.

    Of Python code what is documented, as prompt and completion.
    """
    if file.suffix == ".py":
        yield from docstrings(file)
    elif file.suffix == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(file) as table:
            rows = (row for batch in table.iter_batches(batch_size=1024) for row in batch.to_pylist())
            yield from enumerate(rows, 1)
    elif file.suffix == ".json":
        value = _parsed(file.read_bytes(), str(file))
        yield from enumerate(value if isinstance(value, list) else [value], 1)
    else:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parsed(line, f"{file}:{number}")


def docstrings(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """A question for everything that a Python file documents, and the first paragraph of its docstring as the answer.

    What cannot be parsed, or has no answer of more than a few words, has none.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return
    packages = [p.name for p in file.parents if (p / "__init__.py").exists()]
    module = [*reversed(packages), *([] if file.stem == "__init__" else [file.stem])]

    def walk(node: ast.AST, names: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                path = [*names, child.name]
                text = " ".join((ast.get_docstring(child) or "").partition("\n\n")[0].split())
                if len(text.split()) > 4 and not any(name.startswith("_") for name in path):
                    kind = "class" if isinstance(child, ast.ClassDef) else "function"
                    asked = f"What does the Python {kind} {'.'.join(path)} do?"
                    yield child.lineno, {"prompt": asked, "completion": text}
                yield from walk(child, path)

    yield from walk(tree, module)


def _parsed(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeftError(f"{where}: not valid JSON ({error})") from None


def _jsonl(file: Path, source: Source) -> Iterator[str]:
    for number, record in records(file):
        if not isinstance(record, dict):
            raise WeftError(f"{file}:{number}: expected a JSON object, got {type(record).__name__}")
        _has(f"{file}:{number}", source.field, list(record))
        # JSON may hold lone surrogates, which no tokenizer can encode.
        for text in _strings([record[source.field]], f"{file}:{number}", source.field):
            yield text.encode(errors="replace").decode()


def _words(file: Path, source: Source) -> Iterator[str]:
    """All texts of each record, whatever its form: what a tokenizer is trained on."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value.encode(errors="replace").decode()
        elif isinstance(value, (dict, list)):
            for one in value.values() if isinstance(value, dict) else value:
                yield from texts(one)

    for _, record in records(file):
        yield "\n".join(texts(record))


def _parquet(file: Path, source: Source) -> Iterator[str]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        _has(str(file), source.field, table.schema_arrow.names)
        for batch in table.iter_batches(batch_size=1024, columns=[source.field]):
            yield from _strings(batch.column(0).to_pylist(), str(file), source.field)


def _huggingface(folder: Path, source: Source) -> Iterator[str]:
    import datasets

    try:
        data = datasets.load_from_disk(str(folder))
    except FileNotFoundError:
        raise WeftError(f"{folder} is not a dataset from save_to_disk; set 'path' to the folder of one") from None
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
            kind = type(value).__name__
            raise WeftError(f"{where}: field {field!r} holds {kind}, not text; set the source's 'field'")
