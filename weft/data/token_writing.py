"""Write token files: the ids of documents, where each document begins, and the names of the documents."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import WeftError

if TYPE_CHECKING:
    from weft.data.placed_text import PlacedText
    from weft.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class DocumentPlaces:
    """Files and lines of documents, by which :mod:`weft.data.document_names` finds them.

    ``files``: index of each file by its path. ``lines``: for each document in order, the index of its file and its
    line, as one flat list.
    """

    files: dict[str, int] = field(default_factory=dict)
    lines: array[int] = field(default_factory=lambda: array("q"))

    def add(self, file: str, line: int) -> None:
        """Append the place of the next document: its path ``file``, and its ``line`` or record number in it."""
        self.lines.extend((self.files.setdefault(file, len(self.files)), line))

    def write(self, folder: Path, numbers: Sequence[int]) -> None:
        """Write the files and lines of the documents ``numbers`` to a folder of token files.

        ``files.json`` gets a list of the files. ``lines.npy`` (int64 ``[documents, 2]``) gets, for each document, the
        index of its file in this list, and its line.
        """
        lines = np.array(self.lines, np.int64).reshape(-1, 2)
        np.save(folder / "lines.npy", lines[np.array(numbers, np.int64)])
        (folder / "files.json").write_text(json.dumps([*self.files]))


def write_documents(
    folder: Path, docs: Iterable[np.ndarray], vocab: int, eos: int, name: str, close: bool = True,
    opening: Sequence[int] = (), places: DocumentPlaces | None = None,
) -> None:  # fmt: skip
    """Write documents as token files to an existing ``folder``.

    ``docs``: arrays of token ids below ``vocab``. ``close``: whether to append ``eos`` to each document that does not
    end with it, and to skip empty documents. ``name``: what errors call the source. ``opening``: ids that are written
    before each document. ``places``: file and line of each document, which may be added while ``docs`` is iterated;
    None: documents have no names.
    """
    dtype = token_type(vocab)
    offsets, numbers, content = array("q", [0]), array("q"), hashlib.sha256()
    with open(folder / "tokens.bin", "wb", buffering=2**20) as out:
        for number, doc in closed_documents(docs, vocab, eos, close, opening):
            data = doc.astype(dtype).tobytes()
            out.write(data)
            content.update(data)
            offsets.append(offsets[-1] + len(data) // dtype.itemsize)
            numbers.append(number)
    content.update(offsets.tobytes())
    write_meta(folder, vocab, eos, offsets[-1], content.hexdigest(), name)
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    if places is not None:
        places.write(folder, numbers)


def token_type(vocab: int) -> np.dtype:
    """Return the type of the ids in a file of tokens of a vocabulary with ``vocab`` entries."""
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


def write_meta(
    folder: Path, vocab: int, eos: int, count: int, content: str, name: str
) -> None:
    """Write ``meta.json`` of a folder of token files that has ``count`` tokens with the digest ``content``.

    ``vocab``, ``eos``: number of ids of the tokenizer, and id that ends documents. ``name``: name of the source in
    errors. Raises :class:`WeftError` if ``count`` is 0.
    """
    if not count:
        raise WeftError(
            f"{name} holds no document with a token in it; check where it comes from"
        )
    meta = {
        "dtype": token_type(vocab).name,
        "vocab": vocab,
        "eos": eos,
        "count": count,
        "fingerprint": content,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def closed_documents(
    docs: Iterable[np.ndarray],
    vocab: int,
    eos: int,
    close: bool,
    opening: Sequence[int],
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield ``(number, ids)`` of each document to write, with ``opening`` before and ``eos`` behind its ids.

    The arguments are those of :func:`write_documents`. ``number`` counts ``docs`` from 0, also the empty ones that are
    skipped.
    """
    for number, doc in enumerate(docs):
        doc = np.asarray(doc)
        if close and (len(doc) == 0 or (len(doc) == 1 and doc[0] == eos)):
            continue
        if doc.min() < 0 or doc.max() >= vocab:
            raise WeftError(
                f"document {number} holds a token id outside 0..{vocab - 1}; check the vocabulary"
            )
        ends = [eos] if close and doc[-1] != eos else []
        yield number, np.concatenate([opening, doc, ends])


def add_to_meta(folder: Path, more: Mapping[str, Any]) -> None:
    """Add the entries ``more`` to the JSON file ``meta.json`` in a ``folder`` of token files."""
    file = folder / "meta.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | dict(more), indent=2) + "\n"
    )


def encoded_documents(
    documents: Iterable[PlacedText], tokenizer: Tokenizer, places: DocumentPlaces
) -> Iterator[np.ndarray]:
    """Yield the token ids of each of the ``documents``. Its place is added to ``places`` before its ids are yielded.

    About a million characters are encoded at a time: enough to occupy all cores, little enough to stream.
    """
    group, held = list[str](), 0
    for document in documents:
        group.append(document.text)
        places.add(str(document.file), document.number)
        held += len(document.text)
        if held > 2**20:
            yield from tokenizer.encode_many(group)
            group, held = [], 0
    yield from tokenizer.encode_many(group)
