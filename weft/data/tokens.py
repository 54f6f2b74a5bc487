"""The token format: every document as token ids in one memory-mapped file, tokenized once.

A folder holds ``tokens.bin`` (little-endian uint16, or uint32 if the vocabulary needs it), ``offsets.npy`` (int64
``[documents + 1]``: document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``) and ``meta.json``.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from weft.data.cache import build_once, cache_root, digest
from weft.data.corpora import documents, files, fingerprint
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError
from weft.recipe import Source

#: Called now and then with the numbers of documents and tokens written so far.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Tokens:
    """Tokenized documents: ``ids`` uint16 or uint32 ``[tokens]`` (memory-mapped), ``offsets`` int64 ``[documents + 1]``.

    ``vocab`` is None where no ``meta.json`` says it; ``fingerprint`` changes with the content.
    """

    ids: np.ndarray
    offsets: np.ndarray
    vocab: int | None
    eos: int | None
    fingerprint: str


def write_tokens(
    folder: str | Path, docs: Iterable[np.ndarray], vocab: int, eos: int, progress: Progress | None = None
) -> None:
    """Write documents (arrays of ids below ``vocab``) as a stream into a new ``folder``, adding ``eos`` where missing.

    Documents without a token are left out. Raises :class:`WeftError` if the folder exists, an id is out of range or
    there is no document.
    """
    folder = Path(folder)
    if folder.exists():
        raise WeftError(f"{folder} exists already; remove it or choose another folder")
    build_once(folder, lambda making: _write(making, docs, vocab, eos, progress))


def read_tokens(path: str | Path) -> Tokens:
    """Open a folder of :func:`write_tokens`, or a bare ``X.bin`` beside ``X.offsets.npy`` or ``offsets.npy``.

    Raises :class:`WeftError` naming the file that is missing or damaged.
    """
    path = Path(path).expanduser()
    binary = path / "tokens.bin" if path.is_dir() else path
    named = binary.with_suffix(".offsets.npy")
    index = named if named.is_file() else binary.with_name("offsets.npy")
    about = binary.with_name("meta.json")
    for file in (binary, index, *([about] if path.is_dir() else [])):
        if not file.is_file():
            raise WeftError(f"{file} does not exist; weft.data.tokens.write_tokens makes the files of kind 'tokens'")
    try:
        offsets = np.load(index)
        assert offsets.dtype == np.int64 and offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0
        assert (np.diff(offsets) > 0).all()
    except (ValueError, OSError, EOFError, AssertionError):
        raise WeftError(f"{index} is damaged: expected int64 offsets, rising from 0, one more than documents") from None
    meta = {}
    if about.is_file():
        try:
            meta = json.loads(about.read_text())
            meta = {"vocab": int(meta["vocab"]), "eos": int(meta["eos"]), "fingerprint": str(meta["fingerprint"])}
        except (ValueError, KeyError, TypeError):
            raise WeftError(f"{about} is damaged: expected an object with vocab, eos and fingerprint") from None
    count, size = int(offsets[-1]), binary.stat().st_size
    if size not in (2 * count, 4 * count):
        raise WeftError(f"{binary} is damaged: {size} bytes for the {count} tokens of {index.name}; make it again")
    ids = np.asarray(np.memmap(binary, f"<u{size // count}", "r"))
    seen = meta.get("fingerprint") or digest(size, hashlib.sha256(offsets.tobytes()).hexdigest())
    return Tokens(ids, offsets, meta.get("vocab"), meta.get("eos"), seen)


def open_source(
    source: Source, tokenizer: Tokenizer, cache: Path | None = None, progress: Progress | None = None
) -> Tokens:
    """The tokens of any source; text is tokenized on first use, into the cache, by one process for all.

    Raises :class:`WeftError` if the source is empty, or was tokenized with another tokenizer.
    """
    if source.kind != "tokens":
        folder = cache_root(cache) / f"tokens-{digest(1, fingerprint(source), tokenizer.fingerprint)}"

        def build(making: Path) -> None:
            tokenizer.save(making)
            docs = _encoded(documents(source), tokenizer)
            try:
                _write(making, docs, tokenizer.vocab, tokenizer.eos, progress)
            except _EmptyError:
                raise WeftError(f"data source {source.path or source.kind} holds no text; check 'path'") from None

        return read_tokens(build_once(folder, build))
    path = Path(source.path or "").expanduser()
    if not path.is_dir():
        matches = files(source)
        if len(matches) > 1:
            raise WeftError(f"data source {path} matches {len(matches)} files; give each its own source")
        path = matches[0]
    tokens = read_tokens(path)
    # Without meta.json only the ids themselves can tell whether they fit.
    vocab = tokens.vocab or 1 + max(int(tokens.ids[at : at + 2**24].max()) for at in range(0, len(tokens.ids), 2**24))
    if vocab > tokenizer.vocab or tokens.eos not in (None, tokenizer.eos):
        eos = "" if tokens.eos is None else f" and eos {tokens.eos}"
        raise WeftError(
            f"{path} has vocab {vocab}{eos} but the tokenizer has vocab {tokenizer.vocab} and eos {tokenizer.eos}; "
            "set data.tokenizer to the one that made the tokens"
        )
    return tokens


class _EmptyError(WeftError):
    """There was no document to write."""


def _write(folder: Path, docs: Iterable[np.ndarray], vocab: int, eos: int, progress: Progress | None) -> None:
    dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
    offsets, content = array("q", [0]), hashlib.sha256()
    with open(folder / "tokens.bin", "wb", buffering=2**20) as out:
        for number, doc in enumerate(docs):
            doc = np.asarray(doc)
            if len(doc) == 0 or (len(doc) == 1 and doc[0] == eos):
                continue
            if doc.min() < 0 or doc.max() >= vocab:
                raise WeftError(f"document {number} holds token id {doc.max()}, outside 0..{vocab - 1}; check 'vocab'")
            if doc[-1] != eos:
                doc = np.append(doc, eos)
            data = doc.astype(dtype).tobytes()
            out.write(data)
            content.update(data)
            offsets.append(offsets[-1] + len(doc))
            if progress and len(offsets) % 256 == 0:
                progress(len(offsets) - 1, offsets[-1])
    if len(offsets) == 1:
        raise _EmptyError(f"no document to write into {folder}")
    if progress:
        progress(len(offsets) - 1, offsets[-1])
    index = np.array(offsets, np.int64)
    content.update(index.tobytes())
    np.save(folder / "offsets.npy", index)
    meta = {"dtype": dtype.name, "vocab": vocab, "eos": eos, "count": offsets[-1], "fingerprint": content.hexdigest()}
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def _encoded(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Encode about a million characters at a time: enough to occupy all cores, little enough to stream."""
    group: list[str] = []
    for text in texts:
        group.append(text)
        if sum(map(len, group)) > 2**20 or len(group) == 256:
            yield from tokenizer.encode_many(group)
            group = []
    yield from tokenizer.encode_many(group)
