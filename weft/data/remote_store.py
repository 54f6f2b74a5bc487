"""What a place outside this machine is, from which sources are read: kind ``remote`` of techniques."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from weft.errors import WeftError


class RemoteFile(NamedTuple):
    """A file in a remote place, as it was listed.

    ``name``: its path below the place. ``size``: its bytes, -1 if unknown. ``mark``: text that changes with its
    content, such as an ETag; "" if there is none. ``version``: version of the place that contains it, such as a commit.
    """

    name: str
    size: int
    mark: str
    version: str = ""


class RemoteStore(Protocol):
    """A remote place with files, such as a prefix in a bucket. It is made from the address of a folder.

    All methods raise :class:`RemoteProblem` if the place cannot be reached or read.
    """

    def list_files(self, name: str) -> list[RemoteFile]:
        """Return all files below the place, or only the file ``name`` if the place cannot be listed."""
        ...

    def read_from(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """Yield the bytes of ``file`` from ``start`` to its end."""
        ...


class RemoteProblem(WeftError):
    """A remote file that cannot be read.

    ``again``: whether another attempt may succeed. ``changed``: whether the file has changed since it was listed, so
    that bytes that were read before have to be discarded.
    """

    def __init__(self, reason: str, again: bool = False, changed: bool = False) -> None:
        super().__init__(reason)
        self.again, self.changed = again, changed
