"""What a rank and the process that writes its checkpoints tell each other: a task, and how it went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.checkpoint.storage import Storage
    from weft.layout.dims import Box, Tensor


@dataclass(frozen=True)
class Commit:
    """What the committing rank adds: the root's own contents, and the manifests that must be there first."""

    manifests: tuple[str, ...]
    meta: Mapping[str, Any]
    files: Mapping[str, bytes]  # other files, by name
    timeout: float


@dataclass(frozen=True)
class WriteTask:
    """One rank's part of a save: its memory holds ``shares`` (tensor and box), one after the other, each row-major."""

    storage: Storage
    file: str
    manifest: str
    tensors: Mapping[str, Tensor]
    shares: tuple[tuple[str, Box], ...]
    commit: Commit | None


@dataclass
class Report:
    """How a task went: seconds per stage, bytes, and what was wrong, if anything."""

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    committed: bool = False
    problem: str = ""
