"""Interface of the formats of checkpoints that other programs write."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from weft.checkpoint.convert.foreign import Foreign


class SourceFormat:
    """Format of checkpoints that ``weft checkpoint convert`` and ``model.from`` read.

    Attributes:
        ``patterns``: globs; a folder of this format contains a match of at least one of them.
        ``suffix``: suffix of the file's name if a checkpoint of this format is a single file; else empty.
        ``place``: priority: of several formats that match, the format with the lowest number is taken.
    """

    patterns: ClassVar[tuple[str, ...]] = ()
    suffix: ClassVar[str] = ""
    place: ClassVar[int] = 100

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Return whether the existing file or folder ``path`` looks like a checkpoint of this format."""
        if path.is_file():
            return bool(cls.suffix) and path.suffix == cls.suffix
        folder = newest_save(path)
        return any(any(folder.glob(pattern)) for pattern in cls.patterns)

    @staticmethod
    def open(path: Path, config: Path | None) -> Foreign:
        """Open the checkpoint at ``path`` under Weft's names. Tensors are read only when they are asked for.

        ``config``: the model's ``config.json``, if it lies elsewhere. Raises :class:`WeftError` if a file is missing
        or damaged.
        """
        raise NotImplementedError


def newest_save(path: Path) -> Path:
    """Return the folder of the newest save below ``path``, if a file such as ``latest`` in ``path`` names that folder.

    DeepSpeed and Megatron write such a file. Without such a file ``path`` itself is returned.
    """
    for file in ("latest_universal", "latest", "latest_checkpointed_iteration.txt"):
        if (path / file).is_file():
            tag = (path / file).read_text(errors="replace").strip()
            numbered = file.endswith(".txt") and tag != "release"  # Megatron's
            return path / (f"iter_{tag:0>7}" if numbered else tag)
    return path
