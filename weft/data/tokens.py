"""Token files: the token ids of all documents in one memory-mapped file, tokenized once.

A folder holds ``tokens.bin`` (little-endian uint16, or uint32 if the vocabulary needs it), ``offsets.npy`` (int64
``[documents + 1]``: document ``i`` is ``tokens[offsets[i] : offsets[i + 1]]``) and ``meta.json``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.cache import build_once, cache_root, digest
from weft.data.corpora import (
    is_tokenized_in_pieces,
    placed_documents,
    source_fingerprint,
)
from weft.data.files import source_files
from weft.data.source_report import SourceReport
from weft.data.token_writing import (
    DocumentPlaces,
    add_to_meta,
    encoded_documents,
    write_documents,
)
from weft.errors import WeftError
from weft.paths import home_path

if TYPE_CHECKING:
    from weft.data.batch import Pairs
    from weft.data.tokenizer import Tokenizer
    from weft.recipe import Source


@dataclass(frozen=True)
class Tokens:
    """Tokenized documents in a folder of token files.

    Attributes:
        ``ids``: token ids of all documents, ``[tokens]``.
        ``offsets``: index in ``ids`` of each document's first token, and the end, ``[documents + 1]``.
        ``vocab``: number of ids of the tokenizer that wrote the files; None if no ``meta.json`` gives it.
        ``eos``: id of the token that ends documents; None if no ``meta.json`` gives it.
        ``fingerprint``: digest of the content.
        ``weights``: for conversations, the weight of each token as a label, ``[tokens]``; None for plain documents.
        ``alike``: whether all weights are 0 or 1.
        ``lines``: for conversations, the index in ``files`` and the line of each document, ``[documents, 2]``.
        ``files``: the files that the conversations come from.
        ``pairs``: the pairs of answers that successive documents form; None if they form none.
        ``notes``: lines to print at the start of a run.
        ``folder``: the folder of the token files, None if they are single files.
    """

    ids: np.ndarray
    offsets: np.ndarray
    vocab: int | None  # these two are None where no meta.json says them
    eos: int | None
    fingerprint: str
    weights: np.ndarray | None = None
    alike: bool = True
    lines: np.ndarray | None = None
    files: tuple[str, ...] = ()
    pairs: Pairs | None = None
    notes: tuple[str, ...] = ()
    folder: Path | None = None

    def place(self, document: int) -> str:
        """Return the origin of a document for errors: its file and line if they are known, else its number."""
        if self.lines is None:
            return f"document {document}"
        file, line = self.lines[document].tolist()
        return f"{self.files[file]}:{line}"


def write_tokens(
    folder: str | Path, docs: Iterable[np.ndarray], vocab: int, eos: int
) -> None:
    """Write documents as token files to a new ``folder``. Empty documents are skipped.

    ``docs``: arrays of token ids. ``vocab``: number of ids of the tokenizer, all of which are smaller. ``eos``: id that
    is written after each document.
    """
    if Path(folder).exists():
        raise WeftError(f"{folder} exists already; remove it or choose another folder")
    build_once(
        Path(folder),
        lambda making: write_documents(making, docs, vocab, eos, str(folder)),
    )


def read_tokens(path: str | Path) -> Tokens:
    """Open token files: a folder that :func:`write_tokens` wrote, or a file of ids with a file of offsets.

    The offsets of a file ``X.bin`` are in ``X.offsets.npy`` or ``offsets.npy`` beside it. Raises :class:`WeftError`,
    which names the missing or damaged file.
    """
    path = home_path(path)
    binary = path / "tokens.bin" if path.is_dir() else path
    index = binary.with_suffix(".offsets.npy")
    index = index if index.is_file() else binary.with_name("offsets.npy")
    about = binary.with_name("meta.json")
    file = index
    try:
        offsets = np.load(index)
        if (
            offsets.dtype != np.int64
            or len(offsets) < 2
            or offsets[0] != 0
            or (np.diff(offsets) < 1).any()
        ):
            raise ValueError("expected int64 offsets that rise from 0")
        file, vocab, eos, seen, meta = about, None, None, None, {}
        if path.is_dir() or about.is_file():
            meta = json.loads(about.read_text())
            vocab, eos, seen = meta["vocab"], meta["eos"], meta["fingerprint"]
        file = binary
        count, size = int(offsets[-1]), binary.stat().st_size
        if size not in (2 * count, 4 * count):
            raise ValueError(f"{size} bytes for the {count} tokens of {index.name}")
        ids = np.asarray(np.memmap(binary, f"<u{size // count}", "r"))
        weights = lines = pairs = None
        if path.is_dir() and "alike" in meta:  # conversations
            file = path / "weights.bin"
            weights = np.asarray(np.memmap(file, "<f4", "r", shape=(count,)))
            file = path / "lines.npy"
            lines = np.load(file)
            file = path / "pairs.npy"
            if file.exists():
                from weft.data.batch import Pairs

                pairs = Pairs.listed(*np.load(file))
            if pairs is not None and 2 * len(pairs) != len(offsets) - 1:
                raise ValueError(f"{len(pairs)} pairs for {len(offsets) - 1} documents")
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise WeftError(
            f"{file} is missing or damaged ({reason}); weft.data.tokens.write_tokens makes it"
        ) from None
    seen = seen or digest(size, hashlib.sha256(offsets.tobytes()).hexdigest())
    of, notes = tuple(meta.get("files", ())), tuple(meta.get("notes", ()))
    return Tokens(
        ids,
        offsets,
        vocab,
        eos,
        seen,
        weights,
        meta.get("alike", True),
        lines,
        of,
        pairs,
        notes,
        path if path.is_dir() else None,
    )


def open_source(
    source: Source,
    tokenizer: Tokenizer,
    cache: Path | None = None,
    opening: Sequence[int] = (),
) -> Tokens:
    """Open the tokens of a source. On first use, text is tokenized into the cache folder ``cache``.

    ``opening``: ids that begin every document of text. Raises :class:`WeftError` if a source of token files was written
    by another tokenizer.
    """
    if source.kind != "tokens":
        name = f"data source {source.shown}"

        def build(making: Path) -> None:
            tokenizer.save(making)
            if is_tokenized_in_pieces(source):
                from weft.data.tokenize_pieces import tokenize_pieces

                notes = tokenize_pieces(making, source, tokenizer, opening, name)
            else:
                report, places = SourceReport(), DocumentPlaces()
                docs = encoded_documents(
                    placed_documents(source, report), tokenizer, places
                )
                write_documents(
                    making,
                    docs,
                    tokenizer.vocab,
                    tokenizer.closing,
                    name,
                    opening=opening,
                    places=places,
                )
                notes = report.lines()
            add_to_meta(making, {"notes": notes})

        # Those without an opening are the ones that were there before documents could have one.
        key = digest(
            2 if opening else 1,
            source_fingerprint(source),
            tokenizer.fingerprint,
            *opening,
        )
        return read_tokens(build_once(cache_root(cache) / f"tokens-{key}", build))
    path = home_path(source.path or "")
    if not path.is_dir():
        path, *more = source_files(source)
        if more:
            raise WeftError(
                f"data source {source.shown} matches {1 + len(more)} files; give each its own source"
            )
    tokens = read_tokens(path)
    # Without meta.json only the ids themselves can tell whether they fit.
    vocab = tokens.vocab or 1 + int(tokens.ids.max())
    if vocab > tokenizer.vocab or tokens.eos not in (None, tokenizer.closing):
        wanted, theirs = (
            f"vocab {vocab}, eos {tokens.eos}",
            f"vocab {tokenizer.vocab}, eos {tokenizer.eos}",
        )
        raise WeftError(
            f"{path} has {wanted}, not {theirs}; set data.tokenizer to the one that made the tokens"
        )
    return tokens
