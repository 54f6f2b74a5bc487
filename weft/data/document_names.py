"""Names of tokenized documents: the file and line that each comes from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.cache import build_once
from weft.data.corpora import placed_documents
from weft.data.files import format_of, read_records
from weft.data.token_writing import DocumentPlaces, closed_documents, encoded_documents
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError, WeftError
from weft.paths import home_path

if TYPE_CHECKING:
    from weft.data.tokens import Tokens
    from weft.recipe import Source


@dataclass(frozen=True)
class DocumentNames:
    """Names of the documents of a source: for each document, its file and its line in the file.

    Attributes:
        ``files``: paths of the files.
        ``lines``: index in ``files`` and line of each document, int64 ``[documents, 2]``. In files without lines, the
            line is the record's number from 1; it is 0 if the document is the whole file.
    """

    files: tuple[str, ...]
    lines: np.ndarray

    def name(self, document: int) -> str:
        """Return the name of a document: its file, and behind a colon its line if the file has several documents."""
        file, line = self.lines[document].tolist()
        return f"{self.files[file]}:{line}" if line else self.files[file]

    def find(self, name: str) -> list[int]:
        """Return the numbers of the documents that ``name`` names; an empty list if there are none.

        ``name``: a file, the last parts of its path, or either with ":LINE" or "#NUMBER" behind it.
        """
        file, line = _split(name)
        documents = self._of_file(name)
        if len(documents) == 0 and line is not None:
            documents = self._of_file(file)
            documents = documents[self.lines[documents, 1] == line]
        return [int(document) for document in documents]

    def _of_file(self, name: str) -> np.ndarray:
        """Return the documents of the files that are called ``name``; of an address its last part counts."""
        if "://" in name:
            name = name.rpartition("/")[2]
        whole = str(home_path(name).absolute())
        numbers = [
            number
            for number, file in enumerate(self.files)
            if file in (name, whole)
            or str(Path(file).absolute()) == whole
            or file.endswith("/" + name.removeprefix("./"))
        ]
        return np.flatnonzero(np.isin(self.lines[:, 0], numbers))

    def with_id(self, name: str) -> list[int]:
        """Return the numbers of the documents whose record has ``name`` under "id". The files of records are read for
        it.

        Ids that ``weft data run`` has given, such as "docs:a.jsonl#7", are also matched by "a.jsonl:7", without the
        source.
        """
        file, line = _split(name)
        wanted = {name, name if line is None else f"{file}#{line}"}
        return [
            document
            for document, own in self._ids()
            if own is not None and wanted & {str(own), str(own).partition(":")[2]}
        ]

    def _ids(self) -> Iterator[tuple[int, object]]:
        for number, file in enumerate(self.files):
            path = Path(file)
            if format_of(path) not in (".jsonl", ".ndjson", ".parquet", ".arrow"):
                continue
            if not path.is_file():
                continue
            documents = np.flatnonzero(self.lines[:, 0] == number)
            of_line: dict[int, list[int]] = {}
            for document in documents.tolist():
                of_line.setdefault(int(self.lines[document, 1]), []).append(document)
            for line, record in read_records(path, lambda error: None):
                own = record.get("id") if isinstance(record, dict) else None
                yield from ((document, own) for document in of_line.get(line, ()))

    @cached_property
    def short_names(self) -> list[str]:
        """File names without their folders, among which suggestions for an unknown name are looked for."""
        return [Path(file).name for file in self.files]


def names_of_documents(source: Source, tokens: Tokens) -> DocumentNames | None:
    """Return the names of the documents of ``source``, whose opened tokens are ``tokens``; None if they have none.

    If the token cache was written without names, the source is read again to find them. Token files that a data
    pipeline has written beside its ``documents`` get the names of these documents.
    """
    if tokens.lines is not None:  # conversations
        return DocumentNames(tokens.files, tokens.lines)
    if tokens.folder is None:
        return None
    folder = tokens.folder
    if not (folder / "files.json").is_file():
        if source.kind == "tokens":
            return _names_of_pipeline(folder, len(tokens.offsets) - 1)
        folder = build_once(
            folder.with_name(f"names-{folder.name}"),
            lambda making: _read_again(making, source, tokens),
        )
    files = json.loads((folder / "files.json").read_text())
    return DocumentNames(tuple(files), np.load(folder / "lines.npy", mmap_mode="r"))


def _read_again(making: Path, source: Source, tokens: Tokens) -> None:
    """Write the names of the documents of an older cache. Raises :class:`WeftError` if the source has changed."""
    assert tokens.folder is not None
    tokenizer, places = load_tokenizer(str(tokens.folder)), DocumentPlaces()
    docs = encoded_documents(placed_documents(source), tokenizer, places)
    numbers = [
        number
        for number, _ in closed_documents(
            docs, tokenizer.vocab, tokenizer.closing, True, ()
        )
    ]
    if len(numbers) != len(tokens.offsets) - 1:
        raise WeftError(
            f"data source {source.shown} has {len(numbers):,} documents and its tokens in "
            f"{tokens.folder} {len(tokens.offsets) - 1:,}; remove that folder, so that both fit again"
        )
    places.write(making, numbers)


def _names_of_pipeline(folder: Path, count: int) -> DocumentNames | None:
    """Return the names of tokens that a pipeline has written beside the files of its ``documents``, in their order."""
    from weft.data.files import select_files
    from weft.recipe import Source

    documents = folder.parent / "documents"
    if not documents.is_dir():
        return None
    kind = "parquet" if any(documents.glob("*.parquet")) else "jsonl"
    files = select_files(Source(kind=kind, path=str(documents))).read
    lines = [
        (number, line)
        for number, file in enumerate(files)
        for line, _ in read_records(file)
    ]
    if len(lines) != count:
        return None
    return DocumentNames(tuple(map(str, files)), np.array(lines, np.int64))


def _split(name: str) -> tuple[str, int | None]:
    """Split a name into the file, and the line or number behind ":" or "#" if there is one."""
    match = re.fullmatch(r"(.+)[:#](\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def unknown_document(name: str, names: list[DocumentNames]) -> UsageError:
    """Return the error for the document ``name``, which no source has. Its line suggests the most similar file
    names.
    """
    file, _ = _split(name)
    every = sorted({short for known in names for short in known.short_names})
    close = get_close_matches(Path(file).name, every, n=3, cutoff=0.4) or every[:3]
    return UsageError(
        f"no source of the run has a document {name!r}; documents are called FILE, FILE:LINE or by their 'id', and "
        f"files are called {', '.join(close)}{' ...' if len(every) > len(close) else ''}"
    )
