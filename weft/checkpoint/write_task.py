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
    """Commit of a save: creation of the root file as soon as all manifests are in storage.

    Attributes:
        ``manifests``: names of the manifests of all ranks.
        ``meta``: contents of the root file beside the index of tensors.
        ``files``: contents of further files of the checkpoint, by name.
        ``timeout``: seconds after which the commit fails if a manifest is still missing.
    """

    manifests: tuple[str, ...]
    meta: Mapping[str, Any]  # the root's contents beside the index of tensors
    files: Mapping[str, bytes]  # other files, by name
    timeout: float


@dataclass(frozen=True)
class WriteTask:
    """Task for a rank's writer process: to write the rank's part of a save.

    Attributes:
        ``storage``: storage of the checkpoint.
        ``file``: name of the data file to write.
        ``manifest``: name of the manifest to write.
        ``tensors``: descriptions of tensors, by name.
        ``shares``: pairs of a tensor's name and a box, in the order in which they lie in the shared memory, each
            row-major.
        ``commit``: the commit to make afterwards, on rank 0; None on other ranks.
    """

    storage: Storage
    file: str
    manifest: str
    tensors: Mapping[str, Tensor]
    shares: tuple[tuple[str, Box], ...]
    commit: Commit | None


@dataclass
class Report:
    """Result of writing a rank's part of a save, or of a commit.

    Attributes:
        ``seconds``: duration of each stage of the work, such as ``hash`` and ``write``.
        ``bytes``: number of bytes written.
        ``committed``: whether this is the report of a commit that succeeded.
        ``problem``: why the work failed; empty if it succeeded.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    committed: bool = False
    problem: str = ""
