"""A piece of a source: files, or a part of one file, in a known state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft.cache import digest
from weft.data.files import FilePart
from weft.data.reading import file_state


class FileStamp(NamedTuple):
    """State of a file: its path, size and time of the last change in nanoseconds."""

    file: str
    size: int
    changed: int


@dataclass(frozen=True)
class SourcePiece:
    """Part of a source that is tokenized as one task: several files, or a part of one file.

    Attributes:
        ``stamps``: state of each of the files.
        ``part``: the part of the only file; None: all of the files.
        ``size``: bytes of the files that are read, for the progress line.
    """

    stamps: tuple[FileStamp, ...]
    part: FilePart | None = None
    size: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """Digest of the state of the files and the part, which names the piece."""
        return digest(self.stamps, self.part)

    @property
    def files(self) -> list[Path]:
        """Paths of the files that the piece consists of."""
        return [Path(stamp.file) for stamp in self.stamps]

    @staticmethod
    def parsed(values: dict[str, Any]) -> SourcePiece:
        """Build a piece from ``values``, the JSON object into which ``dataclasses.asdict`` has converted it."""
        part = values["part"] and FilePart(*values["part"])
        stamps = tuple(FileStamp(*stamp) for stamp in values["stamps"])
        return SourcePiece(stamps, part, values["size"])


def stamp_of(file: Path) -> FileStamp:
    """Return path, size and time of the last change of ``file`` as they are now, to notice later changes."""
    return FileStamp(str(file), *file_state(file))
