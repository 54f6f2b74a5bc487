"""Messages between a rank and the process that writes its checkpoints: tasks and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.checkpoint.storage import Storage
    from weft.layout.dims import Box, Tensor


@dataclass(frozen=True)
class Commit:
    """Commit of a save: the root file is created when all ``manifests`` are in storage, within ``timeout`` seconds."""

    manifests: tuple[str, ...]
    meta: Mapping[str, Any]  # the root's contents beside the index of tensors
    files: Mapping[str, bytes]  # other files, by name
    timeout: float


@dataclass(frozen=True)
class WriteTask:
    """Task to write one rank's part of a save, and on rank 0 to commit.

    The rank's memory holds ``shares`` (name of a tensor and box) one after another, each row-major.
    """

    storage: Storage
    file: str
    manifest: str
    tensors: Mapping[str, Tensor]
    shares: tuple[tuple[str, Box], ...]
    commit: Commit | None


@dataclass
class Report:
    """Result of a task: seconds of each stage, bytes written, and the problem (empty: none)."""

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    committed: bool = False
    problem: str = ""
