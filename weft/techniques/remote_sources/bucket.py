"""Sources in object stores: ``s3://bucket/prefix/*.jsonl.zst``, with the ``AWS_*`` variables as for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from weft.data.remote_store import RemoteFile, RemoteProblem
from weft.recipe.storage_address import storage_address
from weft.registry import register

if TYPE_CHECKING:
    from weft.checkpoint.s3 import S3Storage


@register("remote", "bucket")
@dataclass(frozen=True)
class BucketFolder:
    """The objects of a bucket whose keys begin with a prefix, as a source of data files. ``address``:
    s3://bucket/prefix.
    """

    address: str

    @cached_property
    def _storage(self) -> S3Storage:
        from weft.checkpoint.s3 import S3Storage

        place = storage_address(self.address)
        return S3Storage(place.bucket, place.path)

    def list_files(self, name: str) -> list[RemoteFile]:
        """Return all objects below the prefix, whatever ``name`` is. Raises :class:`RemoteProblem` if they cannot be
        listed.
        """
        from weft.checkpoint.storage import StorageError

        try:
            return [
                RemoteFile(name, size, mark)
                for name, (size, mark) in self._storage.marked_objects().items()
            ]
        except StorageError as error:
            raise RemoteProblem(str(error)) from None

    def read_from(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        """Yield the bytes of ``file`` from ``start`` to its end, several ranges at a time."""
        from weft.checkpoint.storage import StorageError

        try:
            granule = self._storage.granule
            for at in range(start, file.size, granule):
                buffer = bytearray(min(granule, file.size - at))
                self._storage.read_into(file.name, at, memoryview(buffer))
                yield bytes(buffer)
            now = self._storage.marked_objects(file.name).get(file.name)
        except StorageError as error:
            raise RemoteProblem(str(error)) from None
        if now != (file.size, file.mark):
            raise RemoteProblem("it has changed", changed=True)
