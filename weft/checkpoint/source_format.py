"""Formats of checkpoints that other programs write: what a folder of each looks like, and what opens it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from weft.checkpoint.convert.foreign import Foreign


class SourceFormat:
    """A format that ``weft checkpoint convert`` and ``model.from`` read.

    ``patterns``: what is in a folder of it, at least one of them; ``suffix``: of a single file that is one. ``place``:
    where several formats could be meant, the one with the lowest number is.
    """

    patterns: ClassVar[tuple[str, ...]] = ()
    suffix: ClassVar[str] = ""
    place: ClassVar[int] = 100

    @classmethod
    def holds(cls, path: Path) -> bool:
        """Whether a file or folder seems to be of this format; it exists."""
        if path.is_file():
            return bool(cls.suffix) and path.suffix == cls.suffix
        folder = newest_save(path)
        return any(any(folder.glob(pattern)) for pattern in cls.patterns)

    @staticmethod
    def open(path: Path, config: Path | None) -> Foreign:
        """Open what lies there, by Weft's names; ``config``: the model's ``config.json``, if it lies elsewhere.

        Tensors are read when they are asked for. Raises :class:`WeftError` if something is missing or damaged.
        """
        raise NotImplementedError


def newest_save(path: Path) -> Path:
    """The folder of the newest save where ``path`` names it (DeepSpeed, Megatron), else ``path``."""
    for file in ("latest_universal", "latest", "latest_checkpointed_iteration.txt"):
        if (path / file).is_file():
            tag = (path / file).read_text(errors="replace").strip()
            numbered = file.endswith(".txt") and tag != "release"  # Megatron's
            return path / (f"iter_{tag:0>7}" if numbered else tag)
    return path
