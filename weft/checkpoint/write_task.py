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
    """Commit of a save: creation of the root file once all ``manifests`` are in storage.

    It fails after ``timeout`` seconds. ``meta``: contents of the root; ``files``: other files of the checkpoint by
    name.
    """

    manifests: tuple[str, ...]
    meta: Mapping[str, Any]  # the root's contents beside the index of tensors
    files: Mapping[str, bytes]  # other files, by name
    timeout: float


@dataclass(frozen=True)
class WriteTask:
    """Task to write one rank's part of a save, and on rank 0 to ``commit`` the save.

    ``file`` and ``manifest``: names of the data file and its manifest in ``storage``; ``tensors``: descriptions by
    name; ``shares``: name of tensor and box of each piece, in the order in which they lie in the rank's memory, each
    row-major.
    """

    storage: Storage
    file: str
    manifest: str
    tensors: Mapping[str, Tensor]
    shares: tuple[tuple[str, Box], ...]
    commit: Commit | None


@dataclass
class Report:
    """Result of writing a rank's part, or of a commit: ``seconds`` of each stage, and ``bytes`` written.

    ``committed``: whether the whole save was committed; ``problem``: why the work failed, or empty.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    committed: bool = False
    problem: str = ""
