"""Pieces of a source that are tokenized, joined one behind another in files that survive the end of the process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weft.data.source_piece import FileStamp, SourcePiece
from weft.data.source_report import SourceReport
from weft.data.token_writing import write_meta

if TYPE_CHECKING:
    from weft.data.tokenizer import Tokenizer


class PieceDone(NamedTuple):
    """A piece of a source whose tokens are in the joined files: its numbers of tokens and documents, files and report.

    ``files``: paths of the files that its documents come from. ``report``: the fields of its :class:`SourceReport`.
    """

    piece: SourcePiece
    tokens: int
    documents: int
    files: list[str]
    report: dict[str, Any]


class JoinedPieces:
    """Tokenized pieces of a source, which are appended one after another to joined files in ``folder``.

    Every line of ``done.jsonl`` describes one joined piece. Bytes of the joined files beyond these pieces come from an
    append that was interrupted, and are truncated. ``width``: bytes of a token id.
    """

    def __init__(self, folder: Path, width: int) -> None:
        self.folder, self.width = folder, width
        self.waiting = folder / "waiting"
        self.waiting.mkdir(exist_ok=True)
        for left in self.waiting.glob("*.*"):  # of processes that were killed
            shutil.rmtree(left, ignore_errors=True)
        self.files: dict[str, int] = {}
        self.done = [
            PieceDone(**values | {"piece": SourcePiece.parsed(values["piece"])})
            for values in self._lines()
        ]
        if not all(
            (folder / name).is_file() and (folder / name).stat().st_size >= size
            for name, size in self._sizes().items()
        ):
            self.done = []  # the process was killed after all had been moved away
        #: End and number of lines of parts of JSON Lines, by file and start.
        self.parts: dict[tuple[FileStamp, int], tuple[int, int]] = {}
        for before, after in pairwise(done.piece for done in self.done):
            if before.part and after.part and before.stamps == after.stamps:
                lines = after.part.first - before.part.first
                self.parts[before.stamps[0], before.part.start] = (
                    before.part.end,
                    lines,
                )

    def _sizes(self) -> dict[str, int]:
        """Return the bytes of the joined files by name, as the pieces in ``done`` have them."""
        documents = sum(done.documents for done in self.done)
        return {
            "tokens.bin": self.width * sum(done.tokens for done in self.done),
            "lengths.bin": 8 * documents,
            "lines.bin": 16 * documents,
        }

    def waits(self, piece: SourcePiece) -> bool:
        """Return whether ``piece`` is tokenized but not appended to the joined files yet."""
        return (self.waiting / piece.name).is_dir()

    def matching(
        self, planned: Iterator[SourcePiece]
    ) -> tuple[list[SourcePiece], Iterator[SourcePiece]]:
        """Compare ``planned`` with the joined pieces; return the matching ones at the start, and an iterator over the
        others.

        The joined files are truncated behind the last piece that matches.
        """
        kept = list[SourcePiece]()
        for piece in planned:
            if self.done[len(kept) : len(kept) + 1] == [] or (
                self.done[len(kept)].piece != piece
            ):
                planned = chain([piece], planned)
                break
            kept.append(piece)
        self.done = self.done[: len(kept)]
        for name, size in self._sizes().items():
            with open(self.folder / name, "ab") as file:
                file.truncate(size)
        draft = self.folder / "done.part"
        draft.write_text("".join(map(_line_of, self.done)))
        draft.rename(self.folder / "done.jsonl")
        for done in self.done:
            self._number(done.files)
        return kept, planned

    def _number(self, files: Sequence[str]) -> list[int]:
        """Return the indices of ``files`` among all files, in the order in which they are named."""
        return [self.files.setdefault(file, len(self.files)) for file in files]

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            text = (self.folder / "done.jsonl").read_text()
        except FileNotFoundError:
            return
        for line in text.split("\n")[:-1]:  # the last is empty, or not complete
            yield json.loads(line)

    def append(self, piece: SourcePiece) -> None:
        """Append ``piece``, which is tokenized and waits, to the joined files, and delete its own files."""
        place = self.waiting / piece.name
        lines = np.load(place / "lines.npy")
        names = json.loads((place / "files.json").read_text())
        if len(lines):
            lines[:, 0] = np.array(self._number(names))[lines[:, 0]]
        tokens = (place / "tokens.bin").stat().st_size // self.width
        with open(place / "tokens.bin", "rb") as stream:
            self._add("tokens.bin", iter(lambda: stream.read(2**20), b""))
        self._add("lengths.bin", [(place / "lengths.bin").read_bytes()])
        self._add("lines.bin", [lines.tobytes()])
        report = json.loads((place / "report.json").read_text())
        done = PieceDone(piece, tokens, len(lines), names, report)
        self._add("done.jsonl", [_line_of(done).encode()])
        self.done.append(done)
        shutil.rmtree(place)

    def _add(self, name: str, content: Iterable[bytes]) -> None:
        """Append ``content`` to a file, and wait until it is on the disk."""
        with open(self.folder / name, "ab") as out:
            out.writelines(content)
            out.flush()
            os.fsync(out.fileno())

    def finish(self, making: Path, tokenizer: Tokenizer, name: str) -> SourceReport:
        """Convert the joined files to token files in the folder ``making``, and return the report about all pieces.

        ``name``: what errors call the source. Raises :class:`WeftError` if there is no token.
        """
        lengths = np.fromfile(self.folder / "lengths.bin", np.int64)
        offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
        content = hashlib.sha256()
        with open(self.folder / "tokens.bin", "rb") as stream:
            while block := stream.read(2**22):
                content.update(block)
        content.update(offsets.tobytes())
        count = int(offsets[-1])
        write_meta(
            making, tokenizer.vocab, tokenizer.closing, count, content.hexdigest(), name
        )
        np.save(making / "offsets.npy", offsets)
        lines = np.fromfile(self.folder / "lines.bin", np.int64).reshape(-1, 2)
        np.save(making / "lines.npy", lines)
        (making / "files.json").write_text(json.dumps([*self.files]))
        (self.folder / "tokens.bin").rename(making / "tokens.bin")
        return _joined_report([done.report for done in self.done])


def _line_of(done: PieceDone) -> str:
    return json.dumps(done._asdict() | {"piece": asdict(done.piece)}) + "\n"


def _joined_report(reports: Sequence[Mapping[str, Any]]) -> SourceReport:
    """Return one report for the reports of all pieces, in their order, as JSON has them."""
    report = SourceReport()
    for values in reports:
        report.add(values)
    return report
