"""Tokenize a large source in pieces: by several processes, and so that an interrupted tokenization goes on.

A piece is a few whole files, or a part of one file. Processes tokenize pieces in any order into folders of their own;
this process joins them in the order of the source, so that the files are the same as those of one process. The folder
``.tokens-pieces-KEY`` in the cache keeps what is done, until all is. It does not depend on the state of files that come
later: if a damaged file is replaced, the pieces of all other files stay.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from weft.cache import digest, locked
from weft.data.corpora import documents_in
from weft.data.files import FilePart, format_of
from weft.data.joined_pieces import JoinedPieces
from weft.data.reading import open_file, reading
from weft.data.source_kinds import documents_of
from weft.data.source_piece import FileStamp, SourcePiece, stamp_of
from weft.data.source_report import SourceReport
from weft.data.token_writing import (
    DocumentPlaces,
    closed_documents,
    encoded_documents,
    token_type,
)
from weft.data.tokenize_progress import TokenizeProgress
from weft.errors import WeftError
from weft.recipe.masked import masked_values

if TYPE_CHECKING:
    from weft.data.tokenizer import Tokenizer
    from weft.recipe import Source

#: Bytes of files in a piece, about.
PIECE = 2**24
#: Pieces that a process may be ahead of the one that is joined next.
AHEAD = 8


def tokenize_process_count(size: int) -> int:
    """Return how many processes tokenize ``size`` bytes: ``$WEFT_TOKENIZE_PROCESSES``, else one for each core."""
    asked = os.environ.get("WEFT_TOKENIZE_PROCESSES", "")
    if asked and not (asked.isdecimal() and int(asked)):
        raise WeftError(
            f"WEFT_TOKENIZE_PROCESSES={asked!r} is no number of processes; set 1 or more"
        )
    return min(int(asked or len(os.sched_getaffinity(0))), max(1, -(-size // PIECE)))


def tokenize_pieces(
    making: Path,
    source: Source,
    tokenizer: Tokenizer,
    opening: Sequence[int],
    name: str,
    processes: int = 0,
) -> tuple[str, ...]:
    """Tokenize a source into the folder ``making`` of token files. Returns lines about the source for the user.

    ``opening``: ids that begin every document. ``name``: what errors call the source. ``processes``: how many tokenize;
    0: :func:`tokenize_process_count`. Raises :class:`WeftError` for the first file that cannot be read.
    """
    files = [stamp_of(file) for file in documents_of(source).read]
    size = sum(stamp.size for stamp in files)
    processes = processes or tokenize_process_count(size)
    # not the state of the files, so that what is done stays when one of them is replaced, nor secrets of an address
    key = digest(
        masked_values(source.model_dump(mode="json", exclude={"weight"})),
        tokenizer.fingerprint,
        *opening,
    )
    folder = making.parent / f".tokens-pieces-{key}"
    with ExitStack() as stack:
        stack.enter_context(locked(making.parent / f".tokens-pieces-{key}.lock"))
        folder.mkdir(exist_ok=True)
        tokenizer.save(folder / "tokenizer")
        joined = JoinedPieces(folder, token_type(tokenizer.vocab).itemsize)
        progress = stack.enter_context(TokenizeProgress(name, len(files), size))
        begin: Callable[[SourcePiece], Future[None]] | None = None
        if processes > 1:
            from weft.data.tokenize_processes import TokenizeProcesses

            workers = TokenizeProcesses(folder, source, opening, processes)
            begin = stack.enter_context(workers).tokenize
        ahead = processes * AHEAD if begin else 1
        for piece in _tokenized(files, joined, begin, ahead, progress):
            if not joined.waits(piece):
                write_piece(folder, piece, source, tokenizer, opening)
            joined.append(piece)
            progress.add(piece)
        report = joined.finish(making, tokenizer, name)
        shutil.rmtree(folder, ignore_errors=True)
    return report.lines()


def _tokenized(
    files: Sequence[FileStamp],
    joined: JoinedPieces,
    begin: Callable[[SourcePiece], Future[None]] | None,
    ahead: int,
    progress: TokenizeProgress,
) -> Iterator[SourcePiece]:
    """Yield the pieces that are not joined yet, in order, when other processes are done with them.

    ``begin``: starts the tokenization of a piece in another process; None: there are no others. ``ahead``: how many
    pieces are under way at most. Raises :class:`WeftError` if the tokenization of the first piece that is missing has
    failed.
    """
    pending: deque[tuple[SourcePiece, Future[None] | None]] = deque()
    kept, planned = joined.matching(cut_into_pieces(files, joined))
    for piece in kept:
        progress.skip(piece)
    while True:
        for piece in islice(planned, ahead - len(pending)):
            there = begin is None or joined.waits(piece)
            pending.append((piece, None if begin is None or there else begin(piece)))
        if not pending:
            return
        piece, future = pending.popleft()
        while future is not None and not future.done():
            wait([future], progress.every)
            ready = (p.size for p, f in pending if f is not None and f.done())
            progress.show(sum(ready))
        if future is not None:
            future.result()
        yield piece


def cut_into_pieces(
    files: Sequence[FileStamp], joined: JoinedPieces
) -> Iterator[SourcePiece]:
    """Cut the files of a source into pieces, and yield the pieces in their order.

    The end of a piece of JSON Lines is found by reading the file, unless ``joined`` knows it already.
    """
    group: list[FileStamp] = []
    for stamp in files:
        form = format_of(Path(stamp.file))
        plain = Path(stamp.file).suffix == form  # not compressed
        cut = plain and form in (".jsonl", ".ndjson", ".parquet")
        if stamp.size <= PIECE or not cut:
            group.append(stamp)
            if sum(stamp.size for stamp in group) < PIECE:
                continue
        if group:
            yield SourcePiece(tuple(group), size=sum(stamp.size for stamp in group))
        if stamp not in group:
            pieces = _row_groups if form == ".parquet" else _line_ranges
            yield from pieces(stamp, joined)
        group = []
    if group:
        yield SourcePiece(tuple(group), size=sum(stamp.size for stamp in group))


def _row_groups(stamp: FileStamp, joined: JoinedPieces) -> Iterator[SourcePiece]:
    """Cut a Parquet file into runs of row groups, each of about :data:`PIECE` bytes."""
    import pyarrow.parquet

    with reading(Path(stamp.file), "parquet"):
        data = pyarrow.parquet.read_metadata(stamp.file)
    start, row, size, first = 0, 1, 0, 1
    for group in range(data.num_row_groups):
        about = data.row_group(group)
        size += sum(
            about.column(i).total_compressed_size for i in range(about.num_columns)
        )
        row += about.num_rows
        if size >= PIECE or group + 1 == data.num_row_groups:
            yield SourcePiece((stamp,), FilePart(start, group + 1, first), size)
            start, size, first = group + 1, 0, row


def _line_ranges(stamp: FileStamp, joined: JoinedPieces) -> Iterator[SourcePiece]:
    """Cut a file of JSON Lines at ends of lines, into parts of about :data:`PIECE` bytes."""
    start, first = 0, 1
    file = Path(stamp.file)
    with reading(file, "JSON Lines"), open_file(file) as stream:
        while start < stamp.size:
            known = joined.parts.get((stamp, start))
            if known is not None:
                end, lines = known
            else:
                stream.seek(start)
                block = stream.read(PIECE)
                rest = stream.readline()
                end = start + len(block) + len(rest)
                lines = block.count(b"\n") + rest.count(b"\n")
            if end <= start:  # the file has become shorter, which write_piece says
                end = stamp.size
            yield SourcePiece((stamp,), FilePart(start, end, first), end - start)
            start, first = end, first + lines


def write_piece(
    folder: Path,
    piece: SourcePiece,
    source: Source,
    tokenizer: Tokenizer,
    opening: Sequence[int],
) -> None:
    """Tokenize ``piece`` into a folder below ``folder``, which appears only when it is complete.

    ``opening``: ids that begin every document. Raises :class:`WeftError` if a file cannot be read, or has changed since
    the piece was planned.
    """
    out = folder / "waiting" / piece.name
    making = out.with_suffix(f".{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    report, places = SourceReport(), DocumentPlaces()
    documents = documents_in(source, piece.files, report, piece.part)
    numbers, lengths = list[int](), list[int]()
    kind = token_type(tokenizer.vocab)
    with open(making / "tokens.bin", "wb", buffering=2**20) as stream:
        for number, ids in closed_documents(
            encoded_documents(documents, tokenizer, places),
            tokenizer.vocab,
            tokenizer.closing,
            True,
            opening,
        ):
            stream.write(ids.astype(kind).tobytes())
            numbers.append(number)
            lengths.append(len(ids))
    for stamp in piece.stamps:
        if stamp_of(Path(stamp.file)) != stamp:
            raise WeftError(
                f"{stamp.file} has changed while it was read; start again when it is complete"
            )
    np.array(lengths, np.int64).tofile(making / "lengths.bin")
    places.write(making, numbers)
    (making / "report.json").write_text(json.dumps(vars(report) | {"left": []}))
    shutil.rmtree(out, ignore_errors=True)
    making.rename(out)
